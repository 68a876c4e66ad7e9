"""What parameters must be."""

import jax
import numpy as np

from mixfl.errors import MixflError
from mixfl.problem import Params


def check_params(x: Params) -> None:
    """Parameters are floating-point arrays, and finite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        name = jax.tree_util.keystr(path) or "the parameter"
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jax.numpy.issubdtype(dtype, jax.numpy.floating):
            raise MixflError(
                f"init returned {name} of type {dtype or type(leaf).__name__}: parameters must be "
                "floating-point arrays. Keep everything else out of them (see docs/models.md)."
            )
        known = isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, jax.core.Tracer)
        if known and not np.isfinite(np.asarray(leaf)).all():
            raise MixflError(f"init returned {name} with NaN or infinite values.")
    if not jax.tree.leaves(x):
        raise MixflError("init returned no parameters.")

"""The paper's sampled approximations of gradient dissimilarity, G~^2 and B~^2."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mixfl.algorithms.steps import add


def norm2(tree: Any) -> Any:
    """||tree||^2."""
    return sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree))


def dissimilarity(gradients: Sequence[Any], weights: Sequence[float]) -> tuple[Any, Any]:
    """G~^2 and B~^2 of the terms' gradients g_j, each including its weight w_j.

    G~^2 = sum_j ||g_j||^2 / w_j - ||sum_j g_j||^2, and B~^2 is the first of these divided by the
    second. The weights are scaled to add up to 1, so G~^2 >= 0 and B~^2 >= 1. A term of weight 0
    does not count.
    """
    parts = [(g, float(w)) for g, w in zip(gradients, weights, strict=True) if w > 0]
    total = sum(w for _, w in parts)
    apart = sum(norm2(g) / (w / total) for g, w in parts)
    together = norm2(add(*(g for g, _ in parts)))
    return apart - together, apart / jnp.maximum(together, 1e-30)

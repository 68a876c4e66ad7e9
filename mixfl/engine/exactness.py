"""Checks the marks (algorithms/marks.py) of functions that are not mixfl's: a client is computed in
its form and without it, and the two must agree. A form that is not exact would train another model
without a word.
"""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms.contract import Algorithm
from mixfl.algorithms.marks import marked_by_user
from mixfl.engine.auto import Forms
from mixfl.engine.feeding import Feeder
from mixfl.errors import MixflError
from mixfl.forms.base import alone, is_part, map_parts

TOLERANCE = 1e-3  # of the norm of what the client adds to the sums, in float32


def check_marks(algorithm: Algorithm, feeder: Feeder, init: Any) -> None:
    """`init` returns the model. Costs nothing for mixfl's own functions, and without forms."""
    forms = feeder.forms.at(algorithm)
    if not marked_by_user(algorithm) or not any(forms.of.values()):
        return
    plain = copy.copy(feeder)
    plain.forms = Forms({})
    state = jax.eval_shape(lambda: algorithm.init(init()))
    inside, whole = (next(f.pieces(algorithm, 0)) for f in (feeder, plain))
    broadcasts = jax.eval_shape(algorithm.broadcast, state, whole.drawn)
    rng = np.random.default_rng(0)
    for j, term in enumerate(feeder.problem.populations):
        broadcast = jax.tree.map(lambda a: _noise(rng, a), broadcasts[j])
        for in_form, as_is in zip(inside.clients[j], whole.clients[j], strict=True):
            chosen = forms.sized(term.name, as_is.batches.mask.shape[1:])
            if not chosen or not as_is.batches.mask[0].any():
                continue
            try:
                found = _summand(algorithm, chosen, term, broadcast, in_form)
            except Exception as error:
                raise _wrong(f"it fails there ({type(error).__name__})") from None
            expected = _summand(algorithm, (), term, broadcast, as_is)
            off, size = (float(_norm(t)) for t in (_minus(found, expected), expected))
            if not off <= TOLERANCE * size:
                raise _wrong(f"a client's upload differs by {off / size:.2g} of its length")


def _noise(rng, shape) -> jax.Array:
    """In place of a model: zeros would hide mistakes."""
    return jnp.asarray(0.3 * rng.standard_normal(shape.shape), shape.dtype)


def _summand(algorithm, forms, term, broadcast, feeds) -> Any:
    """What the first client adds to the sums, in arrays."""
    one = jax.tree.map(lambda a: a[0], feeds)
    program = jax.jit(lambda broadcast, feed: alone(algorithm, forms, term, broadcast, feed))
    sums = program(broadcast, one)

    def whole(leaf):
        if not is_part(leaf):
            return leaf
        rows = leaf.of_group()
        return rows.added_to(rows.zero())

    return map_parts(whole, sums)


def _minus(a, b) -> Any:
    return jax.tree.map(lambda a, b: a - b, a, b)


def _norm(tree) -> Any:
    return jnp.sqrt(sum(jnp.sum(jnp.square(a.astype(jnp.float32))) for a in jax.tree.leaves(tree)))


def _wrong(how: str) -> MixflError:
    return MixflError(
        "the algorithm's client or summand is marked with own_loss_only, but in a faster form it "
        f"does something else: {how}. Remove the mark: the function uses the model beyond the "
        "client's own loss."
    )

"""A summand as it is sent. What follows from the rest of it is left out."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixfl.aggregation.base import unweighted
from mixfl.algorithms.contract import Params, Sums


class Sent(NamedTuple):
    weighted: Params  # p_i u_i
    grads: Params | None
    weight: Any  # p_i
    steps: Any  # K_i
    loss: Any
    extra: Any = None  # an algorithm's own fields


def sent(code: Sums, x: Params) -> Sent:
    """In the dtypes of the model `x`, if they are smaller: p_i is a 32-bit number, and so is p_i
    times a bfloat16 one."""

    def cast(a, like):
        return a.astype(like.dtype) if like.dtype == jnp.bfloat16 else a

    weighted = jax.tree.map(cast, code.weighted, x)
    return Sent(weighted, code.grads, code.weight, code.steps, code.loss, code.extra)


def restored(given: Sent, like: Sums) -> Sums:
    """`like` has the shapes of the summand."""
    weighted = jax.tree.map(lambda a, b: a.astype(b.dtype), given.weighted, like.weighted)
    taken = jnp.arange(1, like.by_steps.shape[0] + 1) == given.steps
    by_steps = jnp.where(taken, given.weight, 0.0)
    summand = Sums(
        weighted, given.weight, None, given.grads, given.steps, by_steps, given.loss,
        jnp.minimum(given.steps, 1.0), given.extra,
    )  # fmt: skip
    both = like.unweighted is not None
    return summand._replace(unweighted=unweighted(summand)) if both else summand

"""A summand as it is sent. What follows from the rest of it is left out."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from mixfl.aggregation.base import unweighted
from mixfl.algorithms.contract import Params, Sums


class Sent(NamedTuple):
    weighted: Params  # p_i u_i
    grads: Params | None
    weight: Any  # p_i
    steps: Any  # K_i
    loss: Any


def sent(code: Sums) -> Sent:
    return Sent(code.weighted, code.grads, code.weight, code.steps, code.loss)


def restored(given: Sent, like: Sums) -> Sums:
    """`like` has the shapes of the summand."""
    taken = jnp.arange(1, like.by_steps.shape[0] + 1) == given.steps
    by_steps = jnp.where(taken, given.weight, 0.0)
    summand = Sums(
        given.weighted, given.weight, None, given.grads, given.steps, by_steps, given.loss,
        jnp.minimum(given.steps, 1.0),
    )  # fmt: skip
    both = like.unweighted is not None
    return summand._replace(unweighted=unweighted(summand)) if both else summand

"""A summand as it is sent. What follows from the rest of it is left out."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from mixfl.algorithms.contract import Params, Sums
from mixfl.algorithms.steps import scale


class Sent(NamedTuple):
    own: Params  # u_i where the sum of u_i is asked for, otherwise p_i u_i
    weight: Any  # p_i
    steps: Any  # K_i
    grads: Params | None
    loss: Any
    weighted: Params | None = None  # p_i u_i, where it does not follow from u_i


def sent(code: Sums, encoded: bool = False) -> Sent:
    """`encoded`: by a step of the aggregation, after which p_i u_i is not p_i times u_i."""
    head = (code.weight, code.steps, code.grads, code.loss)
    if code.unweighted is None:
        return Sent(code.weighted, *head)
    return Sent(code.unweighted, *head, code.weighted if encoded else None)


def restored(given: Sent, like: Sums) -> Sums:
    """`like` has the shapes of the summand."""
    weighted, unweighted = given.own, None
    if like.unweighted is not None:
        follows = given.weighted is None
        weighted = scale(given.weight, given.own) if follows else given.weighted
        unweighted = given.own
    taken = jnp.arange(1, like.by_steps.shape[0] + 1) == given.steps
    by_steps = jnp.where(taken, given.weight, 0.0)
    return Sums(
        weighted, given.weight, unweighted, given.grads, given.steps, by_steps, given.loss,
        jnp.minimum(given.steps, 1.0),
    )  # fmt: skip

"""A summand as it is sent, without what the server can compute from the rest."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from mixfl.algorithms.contract import Params, Sums
from mixfl.algorithms.steps import scale


class Sent(NamedTuple):
    own: Params  # u_i if the sum of u_i is needed, otherwise p_i u_i
    weight: Any  # p_i
    steps: Any  # K_i
    grads: Params | None
    loss: Any
    weighted: Params | None = None  # p_i u_i, if it does not follow from u_i


def sent(code: Sums, encoded: bool = False) -> Sent:
    """`encoded`: an aggregation step changed it, so p_i u_i need not be p_i times u_i."""
    head = (code.weight, code.steps, code.grads, code.loss)
    if code.unweighted is None:
        return Sent(code.weighted, *head)
    return Sent(code.unweighted, *head, code.weighted if encoded else None)


def restored(given: Sent, like: Sums) -> Sums:
    """The summand that was sent. `like` has its shapes."""
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

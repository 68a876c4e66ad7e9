"""The audit of a task, or of a user's problem: canaries among its clients, in a run with its own
algorithm, its settings and the real aggregation.

A canary has a copy of somebody's example, and a column tells its number. Its loss is linear, with a
secret direction as its gradient, over all parameters and far longer than the clip norm.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mixfl.data.examples import ClientData
from mixfl.errors import MixflError
from mixfl.losses import takes
from mixfl.measure.audit import LOUD, Audit, attacked, direction, tossed
from mixfl.privacy.budget import budget, settled
from mixfl.problem import Federated, Problem

if TYPE_CHECKING:
    from mixfl.runs.plan import Plan

COLUMN = "canary"  # a canary's number and 1; 0 for other clients, and in padding


def audit_task(
    planned: "Plan", rounds: int, canaries: int = 1000, seed: int | None = None,
    everybody: bool = True, noise: float | None = None,
) -> Audit:  # fmt: skip
    """`everybody`: all clients take part in every round, which is the most that an attacker can
    wish for. `seed`: of coins and directions, for tests. `noise`: the multiplier; without it, it
    follows from epsilon, the rounds and the population with canaries."""
    coins, key = tossed(canaries, seed)
    problem = with_canaries(planned.problem, np.flatnonzero(coins), key)
    # The canaries' losses use all parameters, so no form that leaves some out would be exact.
    changes: dict[str, Any] = {"rounds": rounds, "tables": "dense", "first_layer": "plain"}
    changes["dp_noise_multiplier"] = noise
    if everybody:
        changes["cohort_size"] = len(problem.populations[0].clients)
    s = settled(problem, planned.recipe.id, dataclasses.replace(planned.settings, **changes))
    plan = budget(problem, planned.recipe.id, s)
    if plan is None or not s.dp_noise_multiplier:
        raise MixflError("the audit attacks a private run: give --dp epsilon=4 --dp delta=1e-5.")
    epsilon = plan.spent(s.dp_noise_multiplier, s.rounds)
    return attacked(problem, planned.recipe, s, epsilon, coins, key)


def with_canaries(problem: Problem, there: np.ndarray, key) -> Problem:
    """Canaries join the first population."""
    if len(problem.populations) != 1:
        raise MixflError(
            f"the audit attacks one population of clients, and '{problem.name}' has "
            f"{len(problem.populations)}."
        )
    (term,) = problem.populations
    if not term.here:
        raise MixflError(f"the clients of '{term.name}' are not here: audit a simulation.")
    terms = [joined(t, there, key) if t is term else t for t in problem.terms]
    return dataclasses.replace(problem, terms=terms)


def joined(term: Federated, there: np.ndarray, key) -> Federated:
    columns = term.clients.examples.all()
    if COLUMN in columns:
        raise MixflError(f"the clients of '{term.name}' have a column '{COLUMN}': rename it.")
    clients, sizes = len(term.clients), term.clients.sizes()
    more = len(there)
    data = {k: np.concatenate([a, np.repeat(a[:1], more, 0)]) for k, a in columns.items()}
    data[COLUMN] = np.concatenate([np.zeros(sizes.sum()), there + 1]).astype(np.int32)
    owner = np.concatenate([np.repeat(np.arange(clients), sizes), clients + np.arange(more)])
    ordinary = term.loss

    def loss(params, batch, *keys, **more):
        own = {k: v for k, v in batch.items() if k != COLUMN}
        number = jnp.max(batch[COLUMN])  # a batch is of one client
        flat = ravel_pytree(params)[0]
        secret = direction(key, jnp.maximum(number - 1, 0), flat.size)
        loud = -LOUD * jnp.dot(secret, flat)
        return jnp.where(number > 0, loud, ordinary(params, own, *keys, **more))

    loss.takes = takes(ordinary)  # type: ignore[attr-defined]
    return dataclasses.replace(
        term, loss=loss, clients=ClientData.from_arrays(data, client=owner), rows={}
    )

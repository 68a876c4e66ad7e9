"""Attacks a private run, to see whether its promise holds: a lower bound on epsilon.

Canaries are clients whose contribution is a secret direction of the longest norm that clipping
leaves. A coin decides for each whether it takes part. After a real run of the simulator, the
attacker looks at the model alone: a canary that took part has moved the model in its direction.
How often such guesses can be right bounds epsilon from below, with 95 % confidence (one run is
enough: arXiv 2302.03098, 2305.08846, 2410.22235; the bounds are jax-privacy's).

A bound above the accountant's epsilon proves a mistake. One below it proves nothing.

`audit` attacks a small problem of its own; audit_task.py a task or a user's problem.
"""

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mixfl.algorithms import ALGORITHMS, Recipe
from mixfl.data.examples import ClientData
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.privacy.accountant import Rounds
from mixfl.privacy.rules import applied
from mixfl.problem import Central, Federated, Problem
from mixfl.settings import Settings

SIGNIFICANCE = 0.05
LOUD = 1e4  # the gradient of a canary, far above any clip norm
CLIENTS = 20  # that are no canaries


@dataclass(frozen=True)
class Audit:
    """What an attacker found out."""

    algorithm: str
    epsilon: float  # the accountant's
    delta: float
    noise_multiplier: float
    rounds: int
    bound: float  # epsilon is at least this
    took_part: np.ndarray  # scores of the canaries that did, in standard deviations of the others
    did_not: np.ndarray

    @property
    def holds(self) -> bool:
        return self.bound <= self.epsilon

    def as_json(self) -> dict[str, Any]:
        numbers = {k: v for k, v in vars(self).items() if not isinstance(v, np.ndarray)}
        canaries = {"canaries": len(self.took_part) + len(self.did_not)}
        return {**numbers, **canaries, "confidence": 1 - SIGNIFICANCE, "holds": self.holds}


def audit(
    algorithm: str = "2wgt", epsilon: float = 4.0, delta: float = 1e-5, rounds: int = 10,
    canaries: int = 1000, size: int = 20_000, clip: float = 0.1, seed: int | None = None,
) -> Audit:  # fmt: skip
    """Every client takes part in every round, which is the most that an attacker can wish for.
    `seed`: of coins and directions, for tests."""
    coins, key = tossed(canaries, seed)
    there = np.flatnonzero(coins)
    problem = canary_problem(algorithm, key, there, size)
    cohort = len(there) + CLIENTS
    plan = Rounds(cohort, cohort, "none")
    noise = plan.noise_for(epsilon, rounds, delta)
    s = Settings(
        rounds=rounds, cohort_size=cohort, client_batch=1, local_steps=1, client_lr=0.1,
        central_batch=1, dp_noise_multiplier=noise, dp_delta=delta, dp_clip=clip,
    )  # fmt: skip
    s = applied(algorithm, s)
    epsilon = plan.epsilon(noise, rounds, delta)
    return attacked(problem, ALGORITHMS[algorithm], s, epsilon, coins, key)


def tossed(canaries: int, seed: int | None) -> tuple[np.ndarray, jax.Array]:
    """Which canaries take part, and the key of their directions."""
    if canaries < 10:
        raise MixflError(f"{canaries} canaries tell nothing: give at least 10.")
    words = [int.from_bytes(os.urandom(8), "little")] if seed is None else [seed]
    coins = np.random.default_rng(words).random(canaries) < 0.5
    return coins, jax.random.key(words[0] % 2**63)


def attacked(
    problem: Problem, recipe: Recipe, s: Settings, epsilon: float, coins: np.ndarray, key
) -> Audit:
    """A run whose population has the canaries that take part, and what its model gives away."""
    simulator = Simulator(problem, recipe.build(problem, s), s)
    start = simulator.init()
    before = np.asarray(ravel_pytree(start.x)[0], float)
    *_, last = simulator.rounds(start, 0, s.rounds)
    moved = np.asarray(ravel_pytree(last.state.x)[0], float) - before
    if not np.isfinite(moved).all():
        raise MixflError("the attacked run diverged: lower client_lr, or raise epsilon.")
    size = len(moved)
    scores = np.array([moved @ np.asarray(direction(key, i, size)) for i in range(len(coins))])
    return _judged(recipe.id, s, epsilon, scores, coins)


def _judged(algorithm: str, s: Settings, epsilon: float, scores, coins) -> Audit:
    from jax_privacy.auditing import CanaryScoreAuditor

    assert s.dp_delta is not None
    assert s.dp_noise_multiplier is not None
    inside, outside = scores[coins], scores[~coins]
    auditor = CanaryScoreAuditor(inside, outside)
    bound = auditor.epsilon_one_run_fdp(SIGNIFICANCE, delta=s.dp_delta)
    spread, center = float(np.std(outside)) or 1.0, float(np.mean(outside))
    return Audit(
        algorithm, epsilon, s.dp_delta, s.dp_noise_multiplier, s.rounds, float(bound),
        (inside - center) / spread, (outside - center) / spread,
    )  # fmt: skip


def direction(key, canary, size: int):
    """A canary's secret: a random direction."""
    drawn = jax.random.normal(jax.random.fold_in(key, canary), (size,))
    return drawn / jnp.linalg.norm(drawn)


def canary_problem(algorithm: str, key, there: np.ndarray, size: int) -> Problem:
    """Ordinary clients (canary = -1) with a small regression, and canaries."""

    def loss(params, batch):
        (canary,) = batch["canary"]  # one example is a batch
        w = params["w"]
        secret = direction(key, jnp.maximum(canary, 0), size)
        ordinary = jnp.square(jnp.dot(w[:4], batch["x"][0]) - batch["y"][0])
        return jnp.where(canary >= 0, -LOUD * jnp.dot(secret, w), ordinary)[None]

    def pull(params):
        return 0.5 * jnp.sum(jnp.square(params["w"] - 0.01))

    rng = np.random.default_rng(0)
    number = CLIENTS + len(there)
    data = {
        "canary": np.concatenate([np.full(CLIENTS, -1), there]).astype(np.int32),
        "x": rng.normal(size=(number, 4)).astype(np.float32),
        "y": rng.normal(size=number).astype(np.float32),
    }
    clients = ClientData.from_arrays(data, client=np.arange(number))
    terms = [Federated(loss, clients)]
    if algorithm not in ("fedavg",):
        terms.append(Central(pull, weight=0.1))  # type: ignore[arg-type]
    return Problem(lambda key: {"w": jnp.zeros(size)}, terms, name="audit")

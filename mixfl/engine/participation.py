"""Who takes part in a round of the simulator.

A client of the cohort is drawn from those that are available. It may then drop out, or be late:
such a client has got the broadcast, and nothing of it reaches the sums. A slow client makes only
the first of its steps.

Everything is drawn from the seed, the round and the client, so it is the same for every algorithm.
"""

import math
from typing import NamedTuple

import numpy as np

from mixfl.engine import cohort
from mixfl.engine.seeds import words_of
from mixfl.errors import MixflError
from mixfl.problem import Federated
from mixfl.settings import Settings

SPARE = 4  # standard deviations by which the cap of a Poisson cohort exceeds its expected size


class Joined(NamedTuple):
    """The clients of a round whose updates count, in the order in which they were drawn."""

    clients: np.ndarray  # positions in the population
    dropped: int = 0
    late: int = 0


class Participation:
    """Of one population, the `number`-th."""

    def __init__(self, term: Federated, number: int, s: Settings):
        self.term, self.number, self.s = term, number, s
        self.clients = len(term.clients)
        self.secret: int | None = None  # cohorts are drawn from it, if not from the seed
        if s.cohort_size > self.clients:
            raise MixflError(
                f"cohort_size = {s.cohort_size}, but the population '{term.name}' has "
                f"{self.clients} clients: lower it to at most {self.clients}."
            )
        if term.sampling is not None and s.sampling != "uniform":
            raise MixflError(
                f"sampling = {s.sampling}, but the population '{term.name}' has weights of its own "
                "(Federated(sampling=...)): leave one of them out."
            )

    @property
    def capacity(self) -> int:
        """The most clients of a cohort."""
        s = self.s
        if s.sampling != "poisson":
            return s.cohort_size
        if s.cohort_cap != "auto":
            return min(s.cohort_cap, self.clients)
        q = s.cohort_size / self.clients
        most = math.ceil(s.cohort_size + SPARE * math.sqrt(s.cohort_size * (1 - q)))
        return min(most, self.clients)

    @property
    def always_full(self) -> bool:
        """Does every cohort have as many clients as it can?"""
        s, term = self.s, self.term
        return (
            s.sampling != "poisson" and s.drop_rate == s.late_rate == 0
            and term.available is None and term.sampling is None
        )  # fmt: skip

    @property
    def weights(self) -> np.ndarray | None:
        """By which clients are drawn, if they are the same in all rounds."""
        if self.s.sampling == "examples":
            return self.term.clients.sizes().astype(np.float64)
        own = self.term.sampling
        return own.at(0) if own is not None and own.fixed else None

    def at(self, round: int) -> Joined:
        s, rng = self.s, cohort.generator(self._seed, round, cohort.COHORT, self.number)
        pool = self._available(round)
        n = self.clients if pool is None else len(pool)
        size = min(self.capacity, n)
        if s.sampling == "poisson":
            size = min(int(rng.binomial(n, s.cohort_size / self.clients)), size)
        weights = self._weights(round)
        if weights is None:
            chosen = rng.choice(n, size, replace=False)
        else:
            chosen = drawn_by_weight(rng, weights if pool is None else weights[pool], size)
        return self._arrived(round, chosen if pool is None else pool[chosen])

    def speeds(self, round: int, clients: np.ndarray) -> np.ndarray | None:
        """Of these clients: the share of its steps that each makes. None: all of them."""
        s, own = self.s, self.term.speeds
        if own is not None:
            return own.at(round)[clients]
        if s.min_speed == 1:
            return None
        (u,) = uniform([s.seed, cohort.SPEED, self.number, clients], 1)
        return s.min_speed + (1 - s.min_speed) * u

    @property
    def _seed(self) -> int:
        return self.s.seed if self.secret is None else self.secret

    def _available(self, round: int) -> np.ndarray | None:
        """Positions of the clients that can be drawn; None: all."""
        pool, rounds = self._there(round), self.s.dp_min_sep
        if rounds == 1:
            return pool
        turn = cohort.turn(self._seed, round, self.number, self.clients, rounds)
        return turn if pool is None else np.intersect1d(turn, pool)

    def _there(self, round: int) -> np.ndarray | None:
        if self.term.available is None:
            return None
        chances = self.term.available.at(round)
        rng = cohort.generator(self.s.seed, round, cohort.AVAILABLE, self.number)
        return np.flatnonzero(rng.random(self.clients) < chances)

    def _weights(self, round: int) -> np.ndarray | None:
        own = self.term.sampling
        return self.weights if own is None or own.fixed else own.at(round)

    def _arrived(self, round: int, chosen: np.ndarray) -> Joined:
        s = self.s
        if not s.drop_rate and not s.late_rate:
            return Joined(chosen)
        drop, late = uniform([s.seed, round, cohort.FATE, self.number, chosen], 2)
        dropped = drop < s.drop_rate
        too_late = ~dropped & (late < s.late_rate)
        return Joined(chosen[~dropped & ~too_late], int(dropped.sum()), int(too_late.sum()))


def drawn_by_weight(rng: np.random.Generator, weights: np.ndarray, size: int) -> np.ndarray:
    """Positions, without replacement: the next one always has a chance in proportion to its weight,
    among those that are left. Fewer than `size` if not enough weights are positive."""
    positive = np.flatnonzero(weights > 0)
    size = min(size, len(positive))
    if not size:
        return positive[:0]
    # The first arrivals of exponential clocks with these rates.
    arrival = rng.standard_exponential(len(positive)) / weights[positive]
    first = np.argpartition(arrival, size - 1)[:size]
    return positive[first[np.argsort(arrival[first])]]


def uniform(entropy: list, count: int) -> list[np.ndarray]:
    """`count` numbers in [0, 1) for each client, from its own words."""
    words = words_of(entropy, count)
    return [words[..., i] / 2.0**32 for i in range(count)]

"""One compiled program per round: the sums over the clients of each population (summing.py), and
the work at the server.

If there are several devices, each sums over its part of the cohort, and the sums are added up.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mixfl.aggregation import Chain
from mixfl.algorithms.contract import AfterChunk, Algorithm
from mixfl.algorithms.steps import add
from mixfl.engine import processes
from mixfl.engine.auto import Forms
from mixfl.engine.summing import Population, Summed, finite
from mixfl.problem import Problem
from mixfl.settings import Settings

AXIS = "clients"
DRAWN, CLIENTS = P(None, None, AXIS), P(AXIS)  # the axis that is split over devices


class State(NamedTuple):
    """What the next round needs."""

    algorithm: Any
    aggregation: tuple = ()  # per population, the state of its aggregation

    @property
    def x(self):
        return self.algorithm.x


class Carry(NamedTuple):
    """What is summed over clients."""

    sums: tuple  # per population
    rejected: Any  # clients left out because their update was not finite
    counts: dict[str, Any]  # what the aggregation counted


class Round:
    """The programs of one algorithm: `whole` for a round in one piece, and its three parts.

    `after_chunk`, if given, is called from the running program after each chunk of the batches
    drawn at the server. JAX's cache on disk does not keep such a program.
    """

    def __init__(
        self, algorithm: Algorithm, problem: Problem, s: Settings, aggregation: Chain,
        forms: Forms, devices: int = 1, after_chunk: Callable[[], None] | None = None,
        platform: str = "cpu",
    ):  # fmt: skip
        self.algorithm, self.problem, self.settings = algorithm, problem, s
        self.aggregation, self.forms, self.platform = aggregation, forms, platform
        self.after_chunk = AfterChunk(after_chunk) if after_chunk else None
        self.traces = 0
        self.shapes: Any = None  # of the sums
        self.mesh = Mesh(np.array(processes.devices(devices)), (AXIS,)) if devices > 1 else None
        self.whole = self._jit(self._whole, (None, DRAWN, CLIENTS), donate=0)
        self.begin = self._jit(self._begin, (None, DRAWN))
        self.accumulate = self._jit(self._accumulate, (None, None, CLIENTS, None), donate=0)
        self.finish = self._jit(self._finish, (None, DRAWN, None, None, None), donate=0)

    def _jit(self, function, specs, donate=None):
        shardings = {}
        if self.mesh is not None:
            shardings["in_shardings"] = tuple(NamedSharding(self.mesh, s or P()) for s in specs)
            shardings["out_shardings"] = NamedSharding(self.mesh, P())
        donated = () if donate is None else (donate,)
        return jax.jit(function, donate_argnums=donated, **shardings)

    def _whole(self, state, drawn, clients):
        self.traces += 1
        broadcasts = self._begin(state, drawn)
        carry, reports = self._sum(broadcasts, clients, state.aggregation)
        return self._finish(state, drawn, broadcasts, carry, [reports])

    def _begin(self, state, drawn):
        return self.algorithm.broadcast(state.algorithm, self._told(drawn))

    def _accumulate(self, carry, broadcasts, clients, aggregation):
        """Adds a chunk of the cohort to the sums; also returns the reports of its clients."""
        self.traces += 1
        more, reports = self._sum(broadcasts, clients, aggregation)
        return add(carry, more), reports

    def _finish(self, state, drawn, broadcasts, carry, reports):
        """`reports` has, per chunk and population, the reports of the clients."""
        central = self.algorithm.central(state.algorithm, self._told(drawn))
        after, info = self.algorithm.update(state.algorithm, broadcasts, carry.sums, central)
        info = {**info, **carry.counts, "clients/rejected": carry.rejected, "finite": finite(after)}
        if not self.algorithm.feed.clients:
            return State(after, state.aggregation), info
        aggregation = [
            self.aggregation.next(before, jax.tree.map(lambda *a: jnp.concatenate(a), *chunks))
            for before, *chunks in zip(state.aggregation, *reports, strict=True)
        ]
        return State(after, tuple(aggregation)), info

    def _told(self, drawn):
        return [d and d._replace(after_chunk=self.after_chunk) for d in drawn]

    def empty(self, broadcasts, clients, aggregation) -> Carry:
        if self.shapes is None:
            self.shapes = jax.eval_shape(self._sum, broadcasts, clients, aggregation)[0]
        return self.place(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self.shapes))

    def place(self, tree):
        """Puts a tree where the programs leave their results, so JAX need not compile again."""
        if self.mesh is None:
            return tree
        if jax.process_count() > 1:
            return self._joined(P(), jax.tree.map(np.asarray, tree))
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def joined(self, drawn, clients):
        """Joins what each process has read into arrays that are split over the processes."""
        if jax.process_count() == 1:
            return drawn, clients
        return self._joined(DRAWN, drawn), self._joined(CLIENTS, clients)

    def _joined(self, spec, tree):
        sharding = NamedSharding(self.mesh, spec)  # type: ignore[arg-type]
        return jax.tree.map(
            lambda part: jax.make_array_from_process_local_data(sharding, part), tree
        )

    def _sum(self, broadcasts, clients, aggregation) -> tuple[Carry, tuple]:
        """Sums over the cohort (or a chunk of it) of every population, and its clients' reports."""
        if self.mesh is not None and clients:

            def shard(broadcasts, clients, aggregation):
                carry, reports = self._sum_all(broadcasts, clients, aggregation)
                return jax.lax.psum(carry, AXIS), reports

            return jax.shard_map(
                shard, mesh=self.mesh, in_specs=(P(), P(AXIS), P()), out_specs=P(), check_vma=False
            )(broadcasts, clients, aggregation)
        return self._sum_all(broadcasts, clients, aggregation)

    def _sum_all(self, broadcasts, clients, aggregation) -> tuple[Carry, tuple]:
        if not clients:
            return Carry((), jnp.int32(0), {}), ()
        summed = [
            self._summed(*of_population)
            for of_population in zip(
                self.problem.populations, broadcasts, clients, aggregation, strict=True
            )
        ]
        rejected = sum(s.rejected for s in summed)
        counts = add(*(s.counts for s in summed))
        return Carry(tuple(s.sums for s in summed), rejected, counts), tuple(
            s.reports for s in summed
        )

    def _summed(self, term, broadcast, sizes, state) -> Summed:
        forms = self.forms.at(self.algorithm)
        population = Population(
            self.algorithm, self.settings, self.aggregation,
            [forms.sized(term.name, feeds.batches.mask.shape[1:]) for feeds in sizes],
            AXIS if self.mesh is not None else None, self.platform,
        )  # fmt: skip
        if self.settings.aggregation != "mean":
            (feeds,) = sizes
            return population.compared(term, broadcast, feeds, state)
        return population.sum(term, broadcast, sizes, state)

"""One compiled program per round: what the clients of each population sum up to (summing.py), and
the work at the server.

With several devices each sums over its part of the cohort, and the sums are added up.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mixfl.aggregation.clipping import Clipping, remember
from mixfl.algorithms.contract import Algorithm
from mixfl.algorithms.steps import add, after_each_chunk
from mixfl.engine import processes
from mixfl.engine.summing import Scan, Summed, finite, singly
from mixfl.forms.rows import Table
from mixfl.problem import Problem
from mixfl.settings import Settings

AXIS = "clients"
DRAWN, CLIENTS = P(None, None, AXIS), P(AXIS)  # the axes that the devices share


class State(NamedTuple):
    """What the next round needs."""

    algorithm: Any
    norms: tuple = ()  # per population, what its clients' norms have been, if they are clipped

    @property
    def x(self):
        return self.algorithm.x


class Carry(NamedTuple):
    """Per population, what is summed over clients."""

    sums: tuple
    rejected: Any  # clients left out because their update was not finite
    clipped: Any  # clients whose own part was shortened


class Round:
    """The programs of one algorithm: `whole` for a round in one piece, and its three parts.

    `after_chunk`, if given, is called from the running program after each chunk of the batches
    drawn at the server. JAX keeps no program that calls back in its cache on disk. `low_rank` has,
    by population, the weights that clients train in the low-rank form (see lowrank.py), `tables`
    those of which they have only their rows (see sparse.py).
    """

    def __init__(
        self, algorithm: Algorithm, problem: Problem, devices: int = 1, after_chunk: Any = None,
        low_rank: Mapping[str, Collection[str]] | None = None,
        tables: Mapping[str, Mapping[str, Table]] | None = None, settings: Settings | None = None,
    ):  # fmt: skip
        self.algorithm, self.problem, self.devices = algorithm, problem, devices
        self.settings = settings or Settings(clip="off")
        clips = algorithm.feed.clients and self.settings.clip != "off"
        self.clipping = Clipping(self.settings) if clips else None
        self.after_chunk, self.low_rank, self.tables = after_chunk, low_rank or {}, tables or {}
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
        messages = self._begin(state, drawn)
        carry, norms = self._sum(messages, clients, state.norms)
        return self._finish(state, drawn, messages, carry, [norms])

    def _begin(self, state, drawn):
        with after_each_chunk(self.after_chunk):
            return self.algorithm.broadcast(state.algorithm, drawn)

    def _accumulate(self, carry, messages, clients, norms):
        """A chunk of the cohort: the sums so far, and its clients' norms."""
        self.traces += 1
        more, norms = self._sum(messages, clients, norms)
        return add(carry, more), norms

    def _finish(self, state, drawn, messages, carry, norms):
        """`norms` has those of each chunk's clients, per population."""
        with after_each_chunk(self.after_chunk):
            central = self.algorithm.central(state.algorithm, drawn)
        after, info = self.algorithm.update(state.algorithm, messages, carry.sums, central)
        info = {**info, "clients/rejected": carry.rejected, "finite": finite(after)}
        if self.clipping is None:
            return State(after, state.norms), info
        kept = [
            remember(before, jnp.concatenate(chunks, axis=1))
            for before, *chunks in zip(state.norms, *norms, strict=True)
        ]
        return State(after, tuple(kept)), {**info, "clients/clipped": carry.clipped}

    def empty(self, messages, clients, norms) -> Carry:
        if self.shapes is None:
            self.shapes = jax.eval_shape(self._sum, messages, clients, norms)[0]
        return self.place(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self.shapes))

    def place(self, tree):
        """Where the programs leave their results: from elsewhere JAX would compile them again."""
        if self.mesh is None:
            return tree
        if jax.process_count() > 1:
            return self._joined(P(), jax.tree.map(np.asarray, tree))
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def joined(self, drawn, clients):
        """What each of several processes has read, as arrays of which it has its part."""
        if jax.process_count() == 1:
            return drawn, clients
        return self._joined(DRAWN, drawn), self._joined(CLIENTS, clients)

    def _joined(self, spec, tree):
        sharding = NamedSharding(self.mesh, spec)  # type: ignore[arg-type]
        return jax.tree.map(
            lambda part: jax.make_array_from_process_local_data(sharding, part), tree
        )

    def _sum(self, messages, clients, norms) -> tuple[Carry, tuple]:
        """Sums over the cohort (or a chunk of it) of every population, and its clients' norms."""
        if self.mesh is not None and clients:

            def shard(messages, clients, norms):
                carry, found = self._scan_all(messages, clients, norms)
                return jax.lax.psum(carry, AXIS), found

            return jax.shard_map(
                shard, mesh=self.mesh, in_specs=(P(), P(AXIS), P()), out_specs=P(), check_vma=False
            )(messages, clients, norms)
        return self._scan_all(messages, clients, norms)

    def _scan_all(self, messages, clients, norms) -> tuple[Carry, tuple]:
        sums, rejected, clipped, found = [], jnp.int32(0), jnp.int32(0), []
        for j, (term, message, feed) in enumerate(
            zip(self.problem.populations, messages, clients, strict=False)
        ):
            summed = self._summed(term, message, feed, norms[j] if norms else None)
            sums.append(summed.sums)
            found.append(summed.norms)
            rejected += summed.rejected
            clipped += summed.clipped
        return Carry(tuple(sums), rejected, clipped), tuple(found)

    def _summed(self, term, message, feed, before) -> Summed:
        """Over the clients of a population; `before` has the norms of the rounds before."""
        if self.settings.aggregation != "mean":
            return singly(self.algorithm, self.settings, self.clipping, term, message, feed, before)
        return Scan(
            self.algorithm, self.clipping, self.low_rank.get(term.name, ()),
            self.tables.get(term.name, {}), AXIS if self.mesh is not None else None,
        ).sum(term, message, feed, before)  # fmt: skip

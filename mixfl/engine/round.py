"""One compiled program per round.

Scan over the clients of a population with the sums in the carry: neither the clients' models
nor their changes are stacked (on a CPU, batched products of per-client weights are slow), but for
small ones, which train in groups.
With several devices each scans over its part of the cohort, and the sums are added up.

A client whose update is not finite must not reach the sums. Looking at every update costs a
pass over the model per client; so the scan runs without looking, and only if the sums turn out
not to be finite, a second one in the same program runs that looks.

Low-rank layers (see lowrank.py) are summed after the scan, in one product.
"""

import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mixfl.algorithm import Algorithm
from mixfl.engine import processes
from mixfl.lowrank import is_local, low_rank
from mixfl.problem import Problem
from mixfl.sparse import Rows, Table, add_rows, at_own_size, sum_of_group, zeros_for
from mixfl.steps import add, after_each_chunk
from mixfl.trees import name

AXIS = "clients"
SMALL_MODEL, GROUP = 2**14, 10  # so many clients of so few numbers each train at once
DRAWN, CLIENTS = P(None, None, AXIS), P(AXIS)  # the axes that the devices share


class Carry(NamedTuple):
    """Per population, what is summed over clients."""

    sums: tuple
    rejected: Any  # clients left out because their update was not finite


def finite(tree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


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
        tables: Mapping[str, Mapping[str, Table]] | None = None,
    ):  # fmt: skip
        self.algorithm, self.problem, self.devices = algorithm, problem, devices
        self.after_chunk, self.low_rank, self.tables = after_chunk, low_rank or {}, tables or {}
        self.traces = 0
        self.shapes: Any = None  # of the sums
        self.mesh = Mesh(np.array(processes.devices(devices)), (AXIS,)) if devices > 1 else None
        self.whole = self._jit(self._whole, (None, DRAWN, CLIENTS), donate=0)
        self.begin = self._jit(self._begin, (None, DRAWN))
        self.accumulate = self._jit(self._accumulate, (None, None, CLIENTS), donate=0)
        self.finish = self._jit(self._finish, (None, DRAWN, None, None), donate=0)

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
        carry = self._sum(messages, clients)
        return self._finish(state, drawn, messages, carry)

    def _begin(self, state, drawn):
        with after_each_chunk(self.after_chunk):
            return self.algorithm.broadcast(state, drawn)

    def _accumulate(self, carry, messages, clients):
        self.traces += 1
        return add(carry, self._sum(messages, clients))

    def _finish(self, state, drawn, messages, carry):
        with after_each_chunk(self.after_chunk):
            central = self.algorithm.central(state, drawn)
        state, info = self.algorithm.update(state, messages, carry.sums, central)
        info = {**info, "clients/rejected": carry.rejected, "finite": finite(state)}
        return state, info

    def empty(self, messages, clients) -> Carry:
        if self.shapes is None:
            self.shapes = jax.eval_shape(self._sum, messages, clients)
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

    def _sum(self, messages, clients) -> Carry:
        """Sums over the cohort (or a chunk of it) of every population."""
        if self.mesh is not None and clients:

            def shard(messages, clients):
                return jax.lax.psum(self._scan_all(messages, clients), AXIS)

            return jax.shard_map(
                shard, mesh=self.mesh, in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False
            )(messages, clients)
        return self._scan_all(messages, clients)

    def _scan_all(self, messages, clients) -> Carry:
        sums, rejected = [], jnp.zeros((), jnp.int32)
        for term, message, feed in zip(self.problem.populations, messages, clients, strict=False):
            s, r = self._scan(term, message, feed)
            sums.append(s)
            rejected += r
        return Carry(tuple(sums), rejected)

    def _scan(self, term, message, clients):
        """The sums over the clients of a population, and how many were left out."""
        cohort = None
        if self.low_rank.get(term.name):
            cohort = low_rank(term, message, clients, self.low_rank[term.name])
            term, message, clients = cohort[:3]
        marked = self.tables.get(term.name, {})
        count = len(clients.batches.mask)
        group = group_size(count, message.x, clients.rows)

        def summand(feed):
            return self.algorithm.summand(self.algorithm.client(term, message, feed))

        shapes = jax.eval_shape(lambda c: summand(jax.tree.map(lambda a: a[0], c)), clients)
        paths, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_whole)

        def client(look: bool, feed):
            """Of one client: what is added up, what is stacked, and whether it is left out."""
            found, bad = summand(feed), jnp.bool(False)
            if look:
                bad = ~finite(found)
                found = jax.tree.map(lambda u: jnp.where(bad, 0, u), found)
            leaves = tree.flatten_up_to(found)
            added = [None if is_local(leaf) else leaf for leaf in leaves]
            return added, ([leaf if is_local(leaf) else None for leaf in leaves], bad)

        def total(look: bool):
            def one(sums, feed):
                added, rest = client(look, feed)
                return add_rows(sums, added), rest

            def several(sums, feeds):
                added, rest = jax.vmap(functools.partial(client, look))(feeds)
                return add_rows(sums, sum_of_group(added)), rest

            step = at_own_size(
                several if group > 1 else one, {n: t.rows for n, t in marked.items()}
            )
            zero = zeros_for([None if is_local(leaf) else leaf for _, leaf in paths])
            groups = clients
            if group > 1:
                groups = jax.tree.map(
                    lambda a: a.reshape(count // group, group, *a.shape[1:]), clients
                )
            sums, rest = jax.lax.scan(step, zero, groups)
            if group > 1:
                rest = jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), rest)
            stacked, bad = rest
            without = bad if look else None
            leaves = [
                leaf if part is None else cohort.whole(name(path[1:]), part, without)
                for (path, _), leaf, part in zip(paths, sums, stacked, strict=True)
            ]  # a path begins with the field of Sums
            return tree.unflatten(leaves), jnp.sum(bad, dtype=jnp.int32)

        sums, rejected = total(look=False)
        return jax.lax.cond(finite(sums), lambda: (sums, rejected), lambda: total(look=True))


def is_whole(leaf) -> bool:
    return isinstance(leaf, Rows) or is_local(leaf)


def group_size(clients: int, x, rows) -> int:
    """How many clients train at once. A step of a small model costs mostly to begin it; products of
    large ones are slow in batches."""
    leaves = jax.tree_util.tree_leaves_with_path(x, is_leaf=is_local)
    own = {name(path): leaf for path, leaf in leaves if not is_local(leaf)}
    if not small_model(own, {n: ids.shape[-1] for n, ids in (rows or {}).items()}):
        return 1
    most = clients if len(own) < len(leaves) else GROUP
    return max(n for n in range(1, most + 1) if clients % n == 0)


def small_model(parameters: Mapping[str, Any], most_rows: Mapping[str, int]) -> bool:
    """Whether a client trains few numbers. Of a table it has at most so many rows, most have about
    a quarter of that."""
    numbers = sum(leaf.size for n, leaf in parameters.items() if n not in most_rows)
    for n, rows in most_rows.items():
        numbers += parameters[n].size // parameters[n].shape[0] * rows // 4
    return numbers <= SMALL_MODEL

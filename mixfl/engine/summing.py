"""The sums over a population's clients, inside the compiled round.

`Scan` scans over the clients with the sums in the carry: neither the clients' models nor their
changes are stacked (on a CPU, batched products of per-client weights are slow), but for small ones,
which train in groups.

A client whose update is not finite must not reach the sums. Looking at every update costs a
pass over the model per client; so the scan runs without looking, and only if the sums turn out
not to be finite, a second one in the same program runs that looks. It also runs where a client's
norm lies between the limit that the rounds before gave and the one that all norms give.

Low-rank layers (see lowrank.py) are summed after the scan, in one product.

`singly` holds all uploads at once, for aggregations that compare them.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from mixfl.aggregation.clipping import Clipping, Form
from mixfl.aggregation.robust import robust_sums
from mixfl.algorithms.contract import Algorithm, ClientFeed, Message
from mixfl.forms.low_rank import PRODUCTS, is_local, low_rank
from mixfl.forms.rows import Rows, Table, add_rows, at_own_size, sum_of_group, zeros_for
from mixfl.problem import Federated
from mixfl.settings import Settings
from mixfl.trees import name

SMALL_MODEL, GROUP = 2**14, 10  # so many clients of so few numbers each train at once


class Summed(NamedTuple):
    sums: Any
    rejected: Any  # clients left out because their update was not finite
    clipped: Any  # clients whose own part was shortened
    norms: Any  # of all clients, those of other devices too, [kinds, clients]; None if unclipped


def finite(tree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


@dataclass(frozen=True)
class Scan:
    """Over the clients of one population."""

    algorithm: Algorithm
    clipping: Clipping | None
    low_rank: Collection[str]  # weights in the low-rank form
    tables: Mapping[str, Table]  # of which clients have only their rows
    axis: str | None  # of the devices that share the cohort

    def sum(self, term: Federated, message: Message, clients: ClientFeed, before) -> Summed:
        """`before` has the norms of the rounds before (see clipping.py)."""
        cohort, clip = None, self.clipping
        if self.low_rank:
            cohort = low_rank(term, message, clients, self.low_rank, clip is not None)
            term, message, clients = cohort[:3]
        total = functools.partial(self._total, term, message, clients, cohort)
        if clip is None:
            sums, rejected, _ = total(False, None)
            sums, rejected = jax.lax.cond(
                finite(sums), lambda: (sums, rejected), lambda: total(True, None)[:2]
            )
            return Summed(sums, rejected, jnp.int32(0), None)
        limits = clip.limits(before)
        sums, rejected, norms = total(False, limits)
        again = ~finite(sums)
        norms = norms.T  # [kinds, clients]
        every = norms if self.axis is None else _gathered(norms, self.axis)
        # What the limits are, the round's own norms say too: a client may have been shortened in
        # vain, or in the first round not have been.
        assumed, limits = limits, clip.current(before, every)
        over = (norms > limits[:, None]) & jnp.isfinite(norms)
        other = (norms > jnp.minimum(assumed, limits)[:, None]) & (assumed != limits)[:, None]
        again |= jnp.any(other) | jnp.any(jnp.isinf(norms))
        sums, rejected = jax.lax.cond(
            again, lambda: total(True, limits)[:2], lambda: (sums, rejected)
        )
        return Summed(sums, rejected, jnp.sum(jnp.any(over, 0), dtype=jnp.int32), every)

    def _total(self, term, message, clients, cohort, look: bool, limits):
        """The sums, the number of clients left out (0 if they are not to be looked for), and all
        norms, [clients, kinds]."""
        count = len(clients.batches.mask)
        group = group_size(count, message.x, clients.rows)
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), clients)
        summand = functools.partial(self._summand, term, message, limits)
        shapes = jax.eval_shape(summand, one)[0]
        paths, tree = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=is_whole)
        tree = cast(Any, tree)

        def client(feed):
            """Of one client: what is added up, what is stacked, whether it is left out, and its
            norms."""
            (found, norms), bad = summand(feed), jnp.bool(False)
            if look:
                bad = ~finite(found)
                if norms is not None:  # or its square exceeds a 32-bit number
                    bad |= jnp.any(jnp.isinf(norms))
                found = jax.tree.map(lambda u: jnp.where(bad, 0, u), found)
            leaves = tree.flatten_up_to(found)
            added = [None if is_local(leaf) else leaf for leaf in leaves]
            return added, ([leaf if is_local(leaf) else None for leaf in leaves], bad, norms)

        def alone(sums, feed):
            added, rest = client(feed)
            return add_rows(sums, added), rest

        def several(sums, feeds):
            added, rest = jax.vmap(client)(feeds)
            return add_rows(sums, sum_of_group(added)), rest

        step = at_own_size(several if group > 1 else alone, self._rows_of)
        zero = zeros_for([None if is_local(leaf) else leaf for _, leaf in paths])
        groups = clients
        if group > 1:
            groups = jax.tree.map(lambda a: a.reshape(count // group, group, *a.shape[1:]), clients)
        sums, rest = jax.lax.scan(step, zero, groups)
        if group > 1:
            rest = jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), rest)
        stacked, bad, norms = rest
        without = bad if look else None
        leaves = [
            leaf if part is None else cohort.whole(name(path[1:]), part, without)
            for (path, _), leaf, part in zip(paths, sums, stacked, strict=True)
        ]  # a path begins with the field of Sums
        return tree.unflatten(leaves), jnp.sum(bad, dtype=jnp.int32), norms

    def _summand(self, term, message, limits, feed):
        """What is added up of a client, and its norms."""
        upload, clip = self.algorithm.client(term, message, feed), self.clipping
        if clip is None:
            return self.algorithm.summand(upload), None
        rows = {n: ids < self._rows_of[n] for n, ids in (upload.rows or {}).items()}
        products = feed.batches.data.get(PRODUCTS, {})
        form = Form(rows, {n: p.gram for n, p in products.items()})
        norms = clip.norms(upload, message, form)
        upload = clip.clipped(upload, message, norms, limits, form)
        return self.algorithm.summand(upload), norms

    @property
    def _rows_of(self) -> dict[str, int]:
        return {n: table.rows for n, table in self.tables.items()}


def _gathered(norms, axis: str):
    return jax.lax.all_gather(norms, axis, axis=1, tiled=True)


def singly(algorithm: Algorithm, s: Settings, clipping: Clipping | None, term: Federated,
           message: Message, clients: ClientFeed, before) -> Summed:  # fmt: skip
    """The sums where all uploads are held at once."""

    def one(_, feed):
        return None, algorithm.client(term, message, feed)

    uploads = jax.lax.scan(one, None, clients)[1]
    good, clipped, norms = jax.vmap(finite)(uploads), jnp.int32(0), None
    if clipping is not None:
        uploads, clipped, norms = clipping.all_clipped(uploads, message, before)
        good &= ~jnp.any(jnp.isinf(norms), axis=0)
    sums = robust_sums(s, algorithm.summand, uploads, message, good)
    return Summed(sums, jnp.sum(~good, dtype=jnp.int32), clipped, norms)


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

"""The sums over a population's clients, inside the compiled round.

`Population.sum` scans over the clients with the sums in the carry: neither the clients' models nor
their changes are stacked. (On a CPU, batched products of per-client weights are slow.) Small models
are the exception: their clients train in groups, as on accelerators (auto.clients_at_once).

If the clients have several sizes (sizes.py), there is a scan for each size. It ends with the last
client: places that stay empty cost nothing.

A client whose update is not finite must not reach the sums. Looking at every update would cost a
pass over the model per client, so the first scan does not look. Only if the sums are not finite, a
second scan does. It also runs if the aggregation, knowing the reports of all clients, would have
encoded them differently: twice, if the ranges of codes were not known, and clipping must then look
at what the codes mean. All are passes of one loop, so that the clients' steps are compiled once.

`Population.compared` holds all summands at once, for aggregations that compare them.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixfl.aggregation import Chain
from mixfl.aggregation.robust import robust_sums
from mixfl.algorithms.contract import Algorithm, Broadcast, ClientFeed
from mixfl.algorithms.loops import once_traced, scan, scan_first
from mixfl.algorithms.steps import add, with_drift
from mixfl.engine.auto import clients_at_once, native_group
from mixfl.forms.base import (
    Form,
    add_to,
    client_summand,
    is_part,
    map_parts,
    start,
    sum_of_group,
    zeros_for,
)
from mixfl.settings import Settings


class Summed(NamedTuple):
    sums: Any
    rejected: Any  # clients left out because their update was not finite
    counts: dict[str, Any]  # what the aggregation counted
    reports: Any  # of all clients, also those on other devices, [clients, ...]
    states: Any = ()  # per size, what the clients keep [clients, ...], and who has changed


class Pass(NamedTuple):
    """A scan over all clients."""

    left: Any  # passes that may follow
    second: Any  # looks at every update
    told: Any  # to the clients by the aggregation
    sums: Any
    rejected: Any
    reports: Any  # of the first pass; with codes, of the last one
    states: Any
    again: Any  # another pass must follow


def finite(tree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


@dataclass(frozen=True)
class Population:
    """Sums over the clients of one population."""

    algorithm: Algorithm
    settings: Settings
    aggregation: Chain
    forms: Sequence[Sequence[Form]]  # of each size
    axis: str | None  # of the devices that share the cohort
    platform: str
    threads: int | None = None  # of PyTorch, each with a client; None: JAX computes the gradients

    def sum(self, term, broadcast, sizes: Sequence[ClientFeed], state) -> Summed:
        """`sizes` has the clients of each size, `state` is the state of the aggregation."""
        chain = self.aggregation
        prepared = self.prepared(broadcast)
        parts: list[Any] = [
            (self._group(len(feeds.batches.mask), broadcast.x, forms),
             *start(forms, term, prepared, feeds))
            for forms, feeds in zip(self.forms, sizes, strict=True)
        ]  # fmt: skip

        def all_sizes(told, look):
            totals = [self._total(part, told, look, len(parts) > 1) for part in parts]
            sums, rejected, reports, states = zip(*totals, strict=True)
            return add(*sums), sum(rejected), _joined(reports), states

        told = chain.told(state)
        total, shapes, _ = once_traced(all_sizes, told, jnp.bool(False))

        def one(before: Pass) -> Pass:
            sums, rejected, reports, states = total(before.told, before.second)
            if chain.coder is None:
                reports = jax.tree.map(
                    lambda new, old: jnp.where(before.second, old, new), reports, before.reports
                )
            settled = chain.settled(state, told, self._of_all(reports))
            again = ~before.second & ~finite(sums)
            again = again | chain.changed(before.told, settled, reports)
            again = again & (before.left > 0)
            if self.axis is not None:  # all devices or none: they exchange reports
                again = jax.lax.pmax(again.astype(jnp.int32), self.axis) > 0
            left, look = before.left - 1, jnp.bool(True)
            return Pass(left, look, settled, sums, rejected, reports, states, again)

        empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        sums, rejected, reports, states = empty
        # Other steps can't judge before there are codes, and these need ranges.
        left = jnp.int32(1 if chain.coder is None else 2)
        first = Pass(left, jnp.bool(False), told, sums, rejected, reports, states, jnp.bool(True))
        last = jax.lax.while_loop(lambda p: p.again, one, first)
        sums = chain.decode(last.told, last.sums)
        counts = chain.counted(last.told, last.reports)
        return Summed(
            sums, last.rejected, counts, self._of_all(last.reports), self._of_all(last.states)
        )

    def _group(self, clients: int, x, forms) -> int:
        if self.threads is None:
            return clients_at_once(self.platform, clients, x, forms)
        return native_group(self.threads, clients, x)

    def _of_all(self, reports):
        """Also those of clients on other devices."""
        return reports if self.axis is None else _gathered(reports, self.axis)

    def prepared(self, broadcast):
        """With what is the same for all clients, and would otherwise be computed by each."""
        own = isinstance(broadcast, Broadcast)
        return with_drift(self.settings, broadcast) if own else broadcast

    def _total(self, part: tuple, told, look, skip: bool):
        """The sum of the codes, the number of clients left out (0 without `look`), and all
        reports. With `skip`, empty places at the end are skipped."""
        group, forms, term, broadcast, feeds = part
        count = len(feeds.batches.mask)
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), feeds)
        work = functools.partial(self._client, forms, term, broadcast, told, look)
        traced, shapes, _ = once_traced(work, one)

        def client(feed):  # a form may have cut it
            alike = jax.tree.map(lambda a, b: a.shape == b.shape, feed, one)
            return traced(feed) if all(jax.tree.leaves(alike)) else work(feed)

        def alone(sums, feed):
            added, rest = client(feed)
            return add_to(sums, added), rest

        def several(sums, feeds):
            added, rest = jax.vmap(client)(feeds)
            return add_to(sums, sum_of_group(added)), rest

        step = several if group > 1 else alone
        for form in forms:
            step = form.around(step)
        zero = zeros_for(shapes[0])
        if group > 1:
            feeds = jax.tree.map(lambda a: a.reshape(count // group, group, *a.shape[1:]), feeds)
        if skip:
            idle = self._idle(forms, term, broadcast, told, one)
            if group > 1:
                idle = jax.tree.map(lambda a: jnp.broadcast_to(a, (group, *a.shape)), idle)
            filled = jnp.any(feeds.batches.mask > 0, axis=range(1, feeds.batches.mask.ndim))
            sums, rest = scan_first(jnp.sum(filled), step, zero, feeds, idle)
        else:
            sums, rest = scan(step, zero, feeds)
        if group > 1:
            rest = jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), rest)
        kept, bad, reports, states = rest
        sums = jax.tree.map(
            lambda s, k: s if k is None else k, sums, kept, is_leaf=lambda a: a is None
        )
        for form in forms:
            sums = form.widen(sums, bad)
        return sums, jnp.sum(bad, dtype=jnp.int32), reports, states

    def _client(self, forms, term, broadcast, told, look, feed):
        """For one client: what it adds to the sums; then what is kept until all have trained,
        whether the client is left out, its report, and its state and whether that has changed."""
        summand, state = client_summand(self.algorithm, forms, term, broadcast, feed)
        code, report = self.aggregation.encode(told, summand, feed.key)
        code = map_parts(lambda a: a.to_keep() if is_kept(a) else a, code)
        bad = self._bad(look, code, report)
        code = jax.tree.map(lambda a: jnp.where(bad, 0, a), code)
        added = map_parts(lambda a: None if is_kept(a) else a, code)
        changed = None if state is None else (state, ~bad & (summand.steps > 0))
        return added, (kept_parts(code), bad, report, changed)

    def _idle(self, forms, term, broadcast, told, feed):
        """What `_client` returns, beside what it adds, for a client that takes no step: its summand
        is 0."""

        def nothing(tree):
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)

        summand, state = nothing(
            jax.eval_shape(
                lambda f: client_summand(self.algorithm, forms, term, broadcast, f), feed
            )
        )
        code, report = self.aggregation.encode(told, summand, nothing(feed.key))
        changed = None if state is None else (state, jnp.bool(False))
        return kept_parts(nothing(code)), jnp.bool(False), report, changed

    def _bad(self, look, code, report):
        known = self.aggregation.finite(report)
        if known is None:
            return jax.lax.cond(
                look, lambda: ~finite(code) | self.aggregation.bad(report), lambda: jnp.bool(False)
            )
        # The report tells of the arrays.
        rest = finite(code._replace(weighted=None, unweighted=None, grads=None))
        return look & (~known | ~rest | self.aggregation.bad(report))

    def compared(self, term, broadcast, feeds, state) -> Summed:
        """The sums for aggregations that hold all summands at once."""
        chain, prepared, (forms,) = self.aggregation, self.prepared(broadcast), self.forms

        def one(feed):
            return client_summand(self.algorithm, forms, term, prepared, feed)[0]

        if self.platform == "cpu":  # the summands are held at once, but not computed at once
            summands = scan(lambda _, feed: (None, one(feed)), None, feeds)[1]
        else:
            group = clients_at_once(self.platform, len(feeds.batches.mask), broadcast.x, forms)
            summands = jax.lax.map(one, feeds, batch_size=group)
        return compared(self.settings, chain, summands, feeds.key, state)


def compared(s: Settings, chain: Chain, summands, keys, state) -> Summed:
    """The sums of stacked summands [clients, ...]."""
    encode = jax.vmap(chain.encode, in_axes=(None, 0, 0))
    told = chain.told(state)
    _, reports = encode(told, summands, keys)
    settled = chain.settled(state, told, reports)
    if chain.coder is not None:  # the others judge what is made of codes
        _, reports = encode(settled, summands, keys)
        settled = chain.settled(state, told, reports)
    codes, _ = encode(settled, summands, keys)
    good = jax.vmap(lambda a, report: finite(a) & ~chain.bad(report))(summands, reports)
    sums = chain.decode(settled, robust_sums(s, codes, good))
    rejected = jnp.sum(~good, dtype=jnp.int32)
    return Summed(sums, rejected, chain.counted(settled, reports), reports)


def is_kept(leaf) -> bool:
    return is_part(leaf) and leaf.kept


def kept_parts(code):
    return map_parts(lambda a: a.to_keep() if is_kept(a) else None, code)


def _joined(trees):
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *trees)


def _gathered(reports, axis: str):
    return jax.tree.map(lambda a: jax.lax.all_gather(a, axis, axis=0, tiled=True), reports)

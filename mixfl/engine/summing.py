"""The sums over a population's clients, inside the compiled round.

`Population.sum` scans over the clients with the sums in the carry: neither the clients' models nor
their changes are stacked. (On a CPU, batched products of per-client weights are slow.) Small models
are the exception: their clients train in groups.

A client whose update is not finite must not reach the sums. Looking at every update would cost a
pass over the model per client, so the first scan does not look. Only if the sums are not finite, a
second scan in the same program does. It also runs if the aggregation, knowing the reports of all
clients, would have encoded them differently.

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
from mixfl.algorithms.steps import loop, with_drift
from mixfl.engine.auto import trains_few_numbers
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
from mixfl.problem import Federated
from mixfl.settings import Settings

GROUP = 10  # clients that train at once, if they train few numbers


class Summed(NamedTuple):
    sums: Any
    rejected: Any  # clients left out because their update was not finite
    counts: dict[str, Any]  # what the aggregation counted
    reports: Any  # of all clients, also those on other devices, [clients, ...]


def finite(tree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


@dataclass(frozen=True)
class Population:
    """Sums over the clients of one population."""

    algorithm: Algorithm
    settings: Settings
    aggregation: Chain
    forms: Sequence[Form]
    axis: str | None  # of the devices that share the cohort

    def sum(self, term: Federated, broadcast: Broadcast, feeds: ClientFeed, state) -> Summed:
        """`state` is the state of the aggregation."""
        chain = self.aggregation
        group = group_size(len(feeds.batches.mask), broadcast.x, self.forms)
        broadcast = self.prepared(broadcast)
        forms, term, broadcast, feeds = start(self.forms, term, broadcast, feeds)

        def total(told, look: bool):
            return self._total(group, forms, term, broadcast, feeds, told, look)

        told = chain.told(state)
        sums, rejected, reports = total(told, look=False)
        every = reports if self.axis is None else _gathered(reports, self.axis)
        settled = chain.settled(state, told, every)
        sums, rejected = jax.lax.cond(
            ~finite(sums) | chain.changed(told, settled, reports),
            lambda: total(settled, look=True)[:2],
            lambda: (sums, rejected),
        )
        sums = chain.decode(settled, sums)
        return Summed(sums, rejected, chain.counted(settled, reports), every)

    def prepared(self, broadcast):
        """With what is the same for all clients, and would otherwise be computed by each."""
        own = isinstance(broadcast, Broadcast)
        return with_drift(self.settings, broadcast) if own else broadcast

    def _total(self, group: int, forms, term, broadcast, feeds, told, look: bool):
        """The sum of the codes, the number of clients left out (0 without `look`), and all
        reports."""
        count = len(feeds.batches.mask)
        client = functools.partial(self._client, forms, term, broadcast, told, look)

        def alone(sums, feed):
            added, rest = client(feed)
            return add_to(sums, added), rest

        def several(sums, feeds):
            added, rest = jax.vmap(client)(feeds)
            return add_to(sums, sum_of_group(added)), rest

        step = several if group > 1 else alone
        for form in forms:
            step = form.around(step)
        one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), feeds)
        zero = zeros_for(jax.eval_shape(client, one)[0])
        if group > 1:
            feeds = jax.tree.map(lambda a: a.reshape(count // group, group, *a.shape[1:]), feeds)
        sums, rest = loop(step, zero, feeds)
        if group > 1:
            rest = jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), rest)
        kept, bad, reports = rest
        sums = jax.tree.map(
            lambda s, k: s if k is None else k, sums, kept, is_leaf=lambda a: a is None
        )
        for form in forms:
            sums = form.widen(sums, bad if look else None)
        return sums, jnp.sum(bad, dtype=jnp.int32), reports

    def _client(self, forms, term, broadcast, told, look: bool, feed):
        """For one client: what it adds to the sums; then what is kept until all have trained,
        whether the client is left out, and its report."""
        summand = client_summand(self.algorithm, forms, term, broadcast, feed)
        code, report = self.aggregation.encode(told, summand, feed.key)
        code = map_parts(lambda a: a.to_keep() if is_kept(a) else a, code)
        bad = jnp.bool(False)
        if look:
            bad = ~finite(code) | self.aggregation.bad(report)
            code = jax.tree.map(lambda a: jnp.where(bad, 0, a), code)
        added = map_parts(lambda a: None if is_kept(a) else a, code)
        kept = map_parts(lambda a: a if is_kept(a) else None, code)
        return added, (kept, bad, report)

    def compared(self, term, broadcast, feeds, state) -> Summed:
        """The sums for aggregations that hold all summands at once."""
        chain, broadcast = self.aggregation, self.prepared(broadcast)

        def one(_, feed):
            return None, client_summand(self.algorithm, self.forms, term, broadcast, feed)

        summands = loop(one, None, feeds)[1]
        return compared(self.settings, chain, summands, feeds.key, state)


def compared(s: Settings, chain: Chain, summands, keys, state) -> Summed:
    """The sums of stacked summands [clients, ...]."""
    encode = jax.vmap(chain.encode, in_axes=(None, 0, 0))
    told = chain.told(state)
    _, reports = encode(told, summands, keys)
    settled = chain.settled(state, told, reports)
    codes, _ = encode(settled, summands, keys)
    good = jax.vmap(lambda a, report: finite(a) & ~chain.bad(report))(summands, reports)
    sums = chain.decode(settled, robust_sums(s, codes, good))
    rejected = jnp.sum(~good, dtype=jnp.int32)
    return Summed(sums, rejected, chain.counted(settled, reports), reports)


def is_kept(leaf) -> bool:
    return is_part(leaf) and leaf.kept


def _gathered(reports, axis: str):
    return jax.tree.map(lambda a: jax.lax.all_gather(a, axis, axis=0, tiled=True), reports)


def group_size(clients: int, x, forms: Sequence[Form]) -> int:
    """How many clients train at once. In small models, starting a step is most of its cost. In
    large ones, batched products are slow."""
    if not trains_few_numbers(x, tuple(forms)):
        return 1
    most = clients if any(form.large_groups for form in forms) else GROUP
    return max(n for n in range(1, most + 1) if clients % n == 0)

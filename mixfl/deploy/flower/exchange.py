"""One round's messages and replies: who was asked, what came back, and how it was counted."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flwr.app import RecordDict

from mixfl.aggregation.wire import Sent
from mixfl.deploy.flower.asking import Asked, Asking
from mixfl.deploy.flower.messages import NONE, cut_shapes, parsed_upload, task
from mixfl.deploy.flower.nodes import Node, Nodes
from mixfl.deploy.flower.reply_limits import Bounds, upload_bounds
from mixfl.engine.base import RoundBytes
from mixfl.forms.rows import Table
from mixfl.trees import on_named


class Exchange(Asking):
    """One round's messages and replies. `like` has, per population, the shapes of a reply, and
    `bits` the size of its codes."""

    def __init__(
        self, nodes: Nodes, t: int, cohorts: list[list[Node]], like: list[Sent],
        bits: Sequence[int | None] = (),
    ):  # fmt: skip
        super().__init__(nodes, t)
        self.cohorts, self.like = cohorts, like
        self.bits = bits or [None] * len(cohorts)  # of codes
        self.uploads: list[dict[int, Sent]] = [{} for _ in cohorts]  # by place in the cohort

    def push(self, broadcasts, told, rates: Mapping[str, float] = NONE) -> None:
        """Sends each population its broadcast, what the aggregation tells, and the round's rates.
        Flower drops a message, and its reply, after the round's deadline."""
        self.begin(self.nodes.d.round_deadline)
        for j, nodes in enumerate(self.cohorts):
            broadcast, told_j = jax.tree.map(np.asarray, (broadcasts[j], told[j]))
            shared = self.nodes.tables[self.name(j)] == {}
            name = self.nodes.frozen
            one = task(self.t, broadcast, {}, told_j, rates, name) if shared else None
            for place, node in enumerate(nodes):
                what = one or task(self.t, broadcast, node.rows, told_j, rates, name)
                self.ask(Asked(node, j, place, self._like(j, node.rows)), "train", what)

    def _like(self, j: int, rows: Mapping[str, np.ndarray]) -> Sent:
        like = self.like[j]
        return like._replace(weighted=cut_shapes(like.weighted, rows))

    def complete(self) -> bool:
        return all(len(got) >= n for got, n in zip(self.uploads, self.nodes.wanted, strict=True))

    def full(self, asked: Asked) -> bool:
        return len(self.uploads[asked.population]) >= self.nodes.wanted[asked.population]

    def any_good(self) -> bool:
        return any(self.uploads)

    def bounds(self, asked: Asked) -> Bounds:
        return upload_bounds(asked.like)

    def accept(self, asked: Asked, content: RecordDict) -> None:
        n = self.nodes
        s = n.s.of(n.problem.populations[asked.population])
        bits = self.bits[asked.population]
        upload = parsed_upload(content, asked.like, s, n.d.max_update_norm, bits)
        self.uploads[asked.population][asked.place] = upload
        self.count["clients/accepted"] += 1
        n.good(asked.node)

    def counted(self) -> dict[str, int]:
        return {
            "clients/asked": sum(map(len, self.cohorts)), "clients/accepted": 0,
            "clients/rejected": 0, "clients/quarantined": self.nodes.quarantined, **self.count,
            **self.nodes.frozen_bytes_sent(),
        }  # fmt: skip

    def bytes(self) -> RoundBytes:
        asked = sum(map(len, self.cohorts))
        return RoundBytes(self.down / max(asked, 1), self.up / max(self.received, 1))

    def short(self, least: list[int]) -> list[str]:
        """The populations with fewer than `least` good replies each, in words."""
        return [
            f"{len(got)} of {len(asked)} clients of '{self.name(j)}'"
            for j, (got, asked) in enumerate(zip(self.uploads, self.cohorts, strict=True))
            if len(got) < least[j]
        ]

    def ordered(self) -> list[list[tuple[Mapping[str, np.ndarray], Sent]]]:
        """Per population, in the order of the cohort: a client's rows and what it sent."""
        return [
            [(nodes[place].rows, got[place]) for place in sorted(got)]
            for nodes, got in zip(self.cohorts, self.uploads, strict=True)
        ]


def padded(
    sent: Sent, rows: Mapping[str, np.ndarray], tables: Mapping[str, Table]
) -> tuple[Sent, dict[str, Any]]:
    """What a client sent for its table rows, and these rows, padded to a power of two, because each
    size is compiled."""
    whole = {name: table.rows for name, table in tables.items()}
    size = {name: min(1 << (len(ids) - 1).bit_length(), whole[name]) for name, ids in rows.items()}
    ids = {
        n: np.concatenate([held, np.full(size[n] - len(held), whole[n], np.int32)])
        for n, held in rows.items()
    }

    def longer(a, k):
        return np.concatenate([a, np.zeros((k - len(a), *a.shape[1:]), a.dtype)])

    return sent._replace(weighted=on_named(longer, size, sent.weighted)), ids

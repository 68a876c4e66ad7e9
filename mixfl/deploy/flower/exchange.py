"""One round's messages and replies: who was asked, what came back, and how it was counted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import Message

from mixfl.aggregation.wire import Sent
from mixfl.deploy.flower.link import Unreachable
from mixfl.deploy.flower.messages import (
    NONE,
    Rejected,
    cut_shapes,
    parsed_upload,
    task,
)
from mixfl.deploy.flower.nodes import Node, Nodes
from mixfl.deploy.flower.replies import content, pause, sent_bytes
from mixfl.deploy.flower.reply_limits import upload_bounds
from mixfl.engine.base import RoundBytes
from mixfl.forms.rows import Table
from mixfl.trees import on_named


class Asked(NamedTuple):
    node: Node
    population: int
    place: int  # in the cohort
    like: Sent  # the shapes of its reply


# Reasons that may not be the node's fault, but the network's or the task's.
SILENT = frozenset({"late", "failed", "crashed", "not_loaded"})


class Exchange:
    """One round's messages and replies. `like` has, per population, the shapes of a reply, and
    `bits` the size of its codes."""

    def __init__(
        self, nodes: Nodes, t: int, cohorts: list[list[Node]], like: list[Sent],
        bits: Sequence[int | None] = (),
    ):  # fmt: skip
        self.nodes, self.t, self.cohorts, self.like = nodes, t, cohorts, like
        self.bits = bits or [None] * len(cohorts)  # of codes
        self.asked: dict[str, Asked] = {}
        self.outstanding: dict[str, Asked] = {}
        self.uploads: list[dict[int, Sent]] = [{} for _ in cohorts]  # by place in the cohort
        self.down, self.up, self.received = 0, 0, 0
        self.count: Counter[str] = Counter()
        self.away = False  # the SuperLink could not be reached for a while
        self.offences: list[tuple[Node, str]] = []

    def push(self, broadcasts, told, rates: Mapping[str, float] = NONE) -> None:
        """Sends each population its broadcast, what the aggregation tells, and the round's rates.
        Flower drops a message, and its reply, after the round's deadline."""
        ttl = self.nodes.d.round_deadline
        self.until = self.nodes.clock.monotonic() + ttl
        for j, nodes in enumerate(self.cohorts):
            broadcast, told_j = jax.tree.map(np.asarray, (broadcasts[j], told[j]))
            shared = self.nodes.tables[self.name(j)] == {}
            name = self.nodes.frozen
            one = task(self.t, broadcast, {}, told_j, rates, name) if shared else None
            for place, node in enumerate(nodes):
                what = one or task(self.t, broadcast, node.rows, told_j, rates, name)
                sent = Message(what, node.id, "train", ttl=ttl, group_id=str(self.t))
                self.down += sent_bytes(sent)
                message_id = self.nodes.link.push(sent, self.until)  # one at a time, to save memory
                asked = Asked(node, j, place, self._like(j, node.rows))
                if message_id:
                    self.asked[message_id] = asked
                else:
                    self.reject(asked, Rejected("unsent", "the message could not be sent"))
        self.outstanding = dict(self.asked)

    def _like(self, j: int, rows: Mapping[str, np.ndarray]) -> Sent:
        like = self.like[j]
        return like._replace(weighted=cut_shapes(like.weighted, rows))

    def name(self, j: int) -> str:
        return self.nodes.problem.populations[j].name

    def pull(self) -> None:
        """Waits until all replies have arrived, or enough, or the deadline has passed."""
        clock, wanted = self.nodes.clock, self.nodes.wanted
        while self.outstanding:
            self._look()
            if all(len(got) >= n for got, n in zip(self.uploads, wanted, strict=True)):
                break
            if self.outstanding:
                if clock.monotonic() >= self.until:
                    break
                left = max(0.0, self.until - clock.monotonic())
                clock.sleep(min(pause(len(self.outstanding)), left))
        for message, asked in self.outstanding.items():
            self.nodes.link.abandon(message)
            if len(self.uploads[asked.population]) >= wanted[asked.population]:
                self.count["clients/surplus"] += 1
            else:
                self.reject(asked, Rejected("late", "no reply before the deadline"))
        self._judge()
        self.nodes.link.sweep()

    def _look(self) -> None:
        """Takes the replies that have arrived, each up to its allowed size."""
        link = self.nodes.link
        try:
            link.drain(self.until)
        except Unreachable:
            self.away = True
            return
        for message, asked in list(self.outstanding.items()):
            if self.nodes.clock.monotonic() >= self.until:
                return
            try:
                for reply in link.pull(message, upload_bounds(asked.like), self.until):
                    self.take(reply)
            except Unreachable:
                self.away = True
                return
            except Rejected as rejected:  # too large, or not readable
                if self.outstanding.pop(message, None):
                    link.abandon(message)
                    self.reject(asked, rejected)

    def take(self, reply: Message) -> None:
        answered = reply.metadata.reply_to_message_id
        asked = self.asked.get(answered)
        forged = asked and reply.has_content() and reply.metadata.src_node_id != asked.node.id
        if asked is None or forged:
            self.count["replies/unknown"] += 1
            return
        if answered not in self.outstanding:
            self.count["replies/duplicate"] += 1
            return
        del self.outstanding[answered]
        if reply.has_content():
            self.up += sent_bytes(reply)
            self.received += 1
        got = self.uploads[asked.population]
        if len(got) >= self.nodes.wanted[asked.population]:
            self.count["clients/surplus"] += 1
            return
        try:
            n = self.nodes
            s = n.s.of(n.problem.populations[asked.population])
            got[asked.place] = parsed_upload(
                content(reply), asked.like, s, n.d.max_update_norm, self.bits[asked.population]
            )
            self.count["clients/accepted"] += 1
            n.good(asked.node)
        except Rejected as rejected:
            self.reject(asked, rejected)

    def reject(self, asked: Asked, rejected: Rejected) -> None:
        if rejected.reason == "stale":
            self.nodes.forget(asked.node)
        self.count["clients/rejected"] += 1
        self.count[f"clients/rejected/{rejected.reason}"] += 1
        self.nodes.note(
            f"round {self.t + 1}: client {asked.node.number} (node {asked.node.id}) of "
            f"'{self.name(asked.population)}' is left out ({rejected.reason}): {rejected}"
        )
        self.offences.append((asked.node, rejected.reason))

    def _judge(self) -> None:
        """Holds failures against nodes, but not silence if the SuperLink was away or all failed."""
        for node, reason in self.offences:
            if not (reason in SILENT and (self.away or not any(self.uploads))):
                self.nodes.failed(node, self.t, reason)

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

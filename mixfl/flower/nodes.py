"""Which clients there are: nodes that are connected, each asked once who it is.

A node says of which population it is, its number, and which rows of the tables its data names; so
a round needs one exchange. It is asked again when it comes back, or when its rows have changed.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from mixfl.engine.cohort import cohort
from mixfl.flower.config import Deployment
from mixfl.flower.messages import Rejected, parsed_hello
from mixfl.flower.replies import Clock, content, pause, pull
from mixfl.problem import Problem
from mixfl.settings import Settings
from mixfl.sparse import Table

LONGEST_PAUSE = 60.0  # seconds between two looks for clients
ASK_AGAIN = 60.0  # seconds until a node that gave no good answer is asked again


class Node(NamedTuple):
    id: int
    population: str
    number: int
    rows: Mapping[str, np.ndarray]  # per row-sparse table, those that its data names


class Nodes:
    def __init__(
        self, grid: Grid, problem: Problem, s: Settings, d: Deployment,
        tables: Mapping[str, Mapping[str, Table]], clock: Clock, note: Callable[[str], None],
    ):  # fmt: skip
        self.grid, self.problem, self.s, self.d = grid, problem, s, d
        self.tables = {p.name: tables.get(p.name, {}) for p in problem.populations}
        self.clock, self.note = clock, note
        self.known: dict[int, Node] = {}
        self.asked: dict[str, tuple[int, float]] = {}  # message -> node, until when
        self.silent: dict[int, float] = {}  # nodes without a good answer, and when to ask again
        self.least = max(1, math.ceil(d.min_replies * s.cohort_size))
        self.first = max(s.cohort_size, d.min_clients)  # to begin with
        self.begun = False

    def cohorts(self, round: int) -> list[list[Node]]:
        """Per population, the clients of a round. They depend on the seed, the round and on who
        is connected; with all clients there, they are the simulator's."""
        self._wait()
        most = math.ceil(self.d.over_select * self.s.cohort_size)
        found = []
        for j, nodes in enumerate(self._connected()):
            size = min(most, len(nodes))
            chosen = cohort(self.s.seed, round, j, len(nodes), size)
            found.append([nodes[i] for i in chosen])
        return found

    def forget(self, node: Node) -> None:
        self.known.pop(node.id, None)

    def _connected(self) -> list[list[Node]]:
        """Per population, its nodes in order of their numbers."""
        every = sorted(self.known.values(), key=lambda node: (node.number, node.id))
        return [[n for n in every if n.population == p.name] for p in self.problem.populations]

    def _wait(self) -> None:
        """Until there are enough clients. In the beginning it waits for a whole cohort, or for
        min_clients, for a while, as nodes take their time to connect."""
        begun, seconds, looked = self.clock.monotonic(), 1.0, 0
        while True:
            self._refresh()
            counts = [len(nodes) for nodes in self._connected()]
            patient = not self.begun and self.clock.monotonic() - begun < self.d.round_deadline
            if min(counts) >= (self.first if patient else self.least):
                self.begun = True
                return
            if self.asked:
                self.clock.sleep(pause(len(self.asked)))
                continue
            looked += 1
            if looked > 1 or self.begun:  # in the beginning, not at once
                have = ", ".join(
                    f"{count} of '{p.name}'"
                    for p, count in zip(self.problem.populations, counts, strict=True)
                )
                wanted = self.first if patient else self.least
                self.note(
                    f"waiting for clients: {have} connected, {wanted} wanted; looking again in "
                    f"{seconds:.0f} s"
                )
            self.clock.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_PAUSE)

    def _refresh(self) -> None:
        """Forgets who is gone, asks who is new, and reads the answers that are there."""
        connected, now = set(self.grid.get_node_ids()), self.clock.monotonic()
        self.known = {i: node for i, node in self.known.items() if i in connected}
        self.silent = {i: t for i, t in self.silent.items() if i in connected and t > now}
        under_way = {node for node, _ in self.asked.values()}
        new = sorted(connected - self.known.keys() - self.silent.keys() - under_way)
        ttl = self.d.round_deadline
        sent = self.grid.push_messages(
            [Message(RecordDict(), node, "query", ttl=ttl, group_id="hello") for node in new]
        )
        for node, message in zip(new, sent, strict=False):
            if message:
                self.asked[message] = (node, now + ttl)
        for message, (node, until) in list(self.asked.items()):
            try:
                for reply in pull(self.grid, message):
                    self._take(message, node, reply)
                if message in self.asked and (now > until or node not in connected):
                    raise Rejected("late", "it has not said who it is")
            except Rejected as rejected:
                self.asked.pop(message, None)
                self.silent[node] = now + ASK_AGAIN
                self.note(f"node {node} does not take part for now: {rejected}")

    def _take(self, message: str, node: int, reply: Message) -> None:
        meta = reply.metadata
        forged = reply.has_content() and meta.src_node_id != node
        if meta.reply_to_message_id != message or message not in self.asked or forged:
            return
        population, number, rows = parsed_hello(content(reply), self.tables)
        self.known[node] = Node(node, population, number, rows)
        del self.asked[message]

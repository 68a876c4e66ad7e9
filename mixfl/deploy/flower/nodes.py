"""Which clients there are: nodes that are connected, each asked once who it is.

A node says of which population it is, its number, and which rows of the tables its data names; so
a round needs one exchange. It is asked again when it comes back, or when its rows have changed.
What it says is compared with what belongs to its key (members.py).
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from flwr.app import Message, RecordDict

from mixfl.deploy.flower.config import Deployment
from mixfl.deploy.flower.link import Link, Unreachable
from mixfl.deploy.flower.members import Members, fingerprint
from mixfl.deploy.flower.messages import Rejected, parsed_hello
from mixfl.deploy.flower.quarantine import SEVERE
from mixfl.deploy.flower.replies import Clock, content, pause
from mixfl.deploy.flower.reply_limits import hello_bounds
from mixfl.engine.cohort import cohort
from mixfl.errors import MixflError
from mixfl.forms.rows import Table
from mixfl.problem import Problem
from mixfl.settings import Settings

LONGEST_PAUSE = 60.0  # seconds between two looks for clients
ASK_AGAIN = 60.0  # seconds until a node that gave no good answer is asked again; they double
LONGEST_SILENCE = 3600.0  # seconds


class Node(NamedTuple):
    id: int
    population: str
    number: int
    rows: Mapping[str, np.ndarray]  # per row-sparse table, those that its data names
    who: str = ""  # its key's fingerprint


class Nodes:
    def __init__(
        self, link: Link, problem: Problem, s: Settings, d: Deployment,
        tables: Mapping[str, Mapping[str, Table]], members: Members, clock: Clock,
        note: Callable[[str], None],
    ):  # fmt: skip
        self.link, self.problem, self.s, self.d, self.members = link, problem, s, d, members
        self.tables = {p.name: tables.get(p.name, {}) for p in problem.populations}
        self.clock, self.note = clock, note
        self.bounds = hello_bounds(self.tables)
        self.known: dict[int, Node] = {}
        self.keys: dict[int, str] = {}  # fingerprints of the connected nodes' keys
        self.asked: dict[str, tuple[int, float]] = {}  # message -> node, until when
        self.silent: dict[int, float] = {}  # nodes without a good answer, and when to ask again
        self.refused: Counter[str] = Counter()  # times in a row
        self.least = max(1, math.ceil(d.min_replies * s.cohort_size))
        self.first = max(s.cohort_size, d.min_clients)  # to begin with
        self.begun = False
        self.quarantined = 0  # nodes that the last cohorts were drawn without

    def cohorts(self, round: int) -> list[list[Node]]:
        """Per population, the clients of a round. Drawn from `seed` and with all clients there,
        they are the simulator's; drawn from the server's secret, nobody can foresee them."""
        self.members.begin()
        self._wait()
        most, found, self.quarantined = math.ceil(self.d.over_select * self.s.cohort_size), [], 0
        for j, connected in enumerate(self._connected()):
            nodes = self._free(connected, round)
            self.quarantined += len(connected) - len(nodes)
            size = min(most, len(nodes))
            seed = self.s.seed if self.d.cohorts == "seed" else self.members.seed(round, j)
            chosen = cohort(seed, round, j, len(nodes), size)
            found.append([nodes[i] for i in chosen])
        return found

    def _free(self, nodes: list[Node], round: int) -> list[Node]:
        """Without those in quarantine; but so many that a round can succeed, those with the
        shortest pause first."""
        pause = {n.id: self.members.quarantine.remaining(n.who, round) for n in nodes}
        first = sorted(nodes, key=lambda n: pause[n.id])
        free = {n.id for i, n in enumerate(first) if i < self.least or not pause[n.id]}
        return [n for n in nodes if n.id in free]

    def failed(self, node: Node, round: int, reason: str) -> None:
        """A bad reply of it, or none."""
        rounds = self.members.quarantine.offence(node.who, round, reason)
        if rounds:
            self.note(
                f"node {node.id} is in quarantine for {rounds} round{'s' if rounds > 1 else ''}: "
                "it has failed again, or badly"
            )

    def good(self, node: Node) -> None:
        self.members.quarantine.good(node.who)

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
        self.keys, now = self._nodes(), self.clock.monotonic()
        connected = self.keys.keys()
        self.known = {i: node for i, node in self.known.items() if i in connected}
        self.silent = {i: t for i, t in self.silent.items() if i in connected and t > now}
        under_way = {node for node, _ in self.asked.values()}
        for node in sorted(connected - self.known.keys() - self.silent.keys() - under_way):
            self._ask(node, now + self.d.round_deadline)
        if self.asked:
            with contextlib.suppress(Unreachable):
                self.link.drain(now + self.d.round_deadline)
                self._hear(now)

    def _hear(self, now: float) -> None:
        for message, (node, until) in list(self.asked.items()):
            try:
                for reply in self.link.pull(message, self.bounds, until):
                    self._take(message, node, reply)
                if message in self.asked and (now > until or node not in self.keys):
                    raise Rejected("late", "it has not said who it is")
            except Rejected as rejected:
                del self.asked[message]
                self.link.abandon(message)
                self._silence(node, rejected)

    def _nodes(self) -> dict[int, str]:
        """The connected nodes' keys, however often the SuperLink has to be asked for them."""
        until, seconds = self.clock.monotonic() + self.d.round_deadline, 1.0
        while True:
            try:
                return {i: fingerprint(i, key) for i, key in self.link.nodes().items()}
            except Unreachable as error:
                if self.clock.monotonic() + seconds > until:
                    raise MixflError(
                        f"the SuperLink could not be reached for {self.d.round_deadline:.0f} s "
                        f"({error}). Start it, and run the same again to go on."
                    ) from None
                self.note(f"the SuperLink can't be reached; trying again in {seconds:.0f} s")
            self.clock.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_PAUSE)

    def _ask(self, node: int, until: float) -> None:
        ttl = self.d.round_deadline
        query = Message(RecordDict(), node, "query", ttl=ttl, group_id="hello")
        message = self.link.push(query, until)
        if message:
            self.asked[message] = (node, until)

    def _silence(self, node: int, rejected: Rejected) -> None:
        """It is asked again later, and later each time."""
        who = self.keys.get(node, "")
        seconds = min(ASK_AGAIN * 2.0 ** min(self.refused[who], 16), LONGEST_SILENCE)
        if rejected.reason in SEVERE:
            seconds = LONGEST_SILENCE
        self.refused[who] += 1
        self.silent[node] = self.clock.monotonic() + seconds
        self.note(
            f"node {node} does not take part for now: {rejected}; it is asked again in "
            f"{seconds:.0f} s"
        )

    def _take(self, message: str, node: int, reply: Message) -> None:
        meta = reply.metadata
        forged = reply.has_content() and meta.src_node_id != node
        if meta.reply_to_message_id != message or message not in self.asked or forged:
            return
        population, number, rows = parsed_hello(content(reply), self.tables)
        who = self.keys.get(node) or fingerprint(node, b"")
        self.members.check(who, population, number, self.keys.values())
        self.refused.pop(who, None)
        self.known[node] = Node(node, population, number, rows, who)
        del self.asked[message]

"""The clients: connected nodes, each asked once to identify itself.

A node answers with its population, its number and the table rows that its data uses, so that a
round needs only one exchange. It is asked again when it reconnects or its rows have changed. Its
answer is compared with what its key may claim (members.py).
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from flwr.app import Message, RecordDict

from mixfl.deploy.flower import frozen
from mixfl.deploy.flower.config import Deployment
from mixfl.deploy.flower.link import Link, Unreachable
from mixfl.deploy.flower.members import Members, fingerprint
from mixfl.deploy.flower.messages import Rejected, parsed_hello
from mixfl.deploy.flower.quarantine import SEVERE
from mixfl.deploy.flower.replies import Clock, content, pause, sent_bytes
from mixfl.deploy.flower.reply_limits import hello_bounds
from mixfl.engine.cohort import cohort
from mixfl.errors import MixflError
from mixfl.forms.rows import Table
from mixfl.problem import Problem
from mixfl.settings import Settings

LONGEST_PAUSE = 60.0  # seconds between two looks for clients
ASK_AGAIN = 60.0  # seconds until a node without a good answer is asked again; doubles each time
LONGEST_SILENCE = 3600.0  # seconds


class Node(NamedTuple):
    id: int
    population: str
    number: int
    rows: Mapping[str, np.ndarray]  # per row-sparse table, the rows that its data uses
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
        # Per population: the clients of a cohort, those that must reply, and those to wait for at
        # the start.
        self.wanted = [s.of(p).cohort_size for p in problem.populations]
        self.least = [max(1, math.ceil(d.min_replies * size)) for size in self.wanted]
        self.first = [max(size, d.min_clients) for size in self.wanted]
        self.begun = False
        self.quarantined = 0  # nodes left out when the last cohorts were drawn
        self.frozen = frozen.name(problem)  # in every message to a node
        self.delivered: set[int] = set()  # nodes that were sent the frozen arrays
        self.frozen_bytes = 0  # sent since the last round

    def cohorts(self, round: int) -> list[list[Node]]:
        """The clients of a round, per population. With `cohorts = "seed"` and all clients
        connected, they are the simulator's. Otherwise they are drawn from the server's secret, and
        nobody can predict them."""
        self.members.begin()
        self._wait()
        drawn, self.quarantined = [], 0
        for j, connected in enumerate(self._connected()):
            nodes = self._free(self._turn(connected, round), round, self.least[j])
            self.quarantined += len(connected) - len(nodes)
            size = min(math.ceil(self.d.over_select * self.wanted[j]), len(nodes))
            seed = self.s.seed if self.d.cohorts == "seed" else self.members.seed(round, j)
            chosen = cohort(seed, round, j, len(nodes), size)
            drawn.append([nodes[i] for i in chosen])
        return drawn

    def _turn(self, nodes: list[Node], round: int) -> list[Node]:
        """Those that may take part, if a client waits dp_min_sep rounds."""
        rounds = self.s.dp_min_sep
        return [n for n in nodes if self.members.place(n.who) % rounds == round % rounds]

    def _free(self, nodes: list[Node], round: int, least: int) -> list[Node]:
        """The nodes that are not in quarantine. If a round could not succeed with these alone,
        those with the shortest pause are added."""
        pause = {n.id: self.members.quarantine.remaining(n.who, round) for n in nodes}
        first = sorted(nodes, key=lambda n: pause[n.id])
        free = {n.id for i, n in enumerate(first) if i < least or not pause[n.id]}
        return [n for n in nodes if n.id in free]

    def failed(self, node: Node, round: int, reason: str) -> None:
        """Records that a node sent a bad reply, or none."""
        rounds = self.members.quarantine.failed(node.who, round, reason)
        if rounds:
            self.note(
                f"node {node.id} is in quarantine for {rounds} round{'s' if rounds > 1 else ''}: "
                "it failed repeatedly, or sent an oversized reply"
            )

    def good(self, node: Node) -> None:
        self.members.quarantine.good(node.who)

    def forget(self, node: Node) -> None:
        self.known.pop(node.id, None)

    def _connected(self) -> list[list[Node]]:
        """The nodes of each population, in order of their numbers."""
        every = sorted(self.known.values(), key=lambda node: (node.number, node.id))
        return [[n for n in every if n.population == p.name] for p in self.problem.populations]

    def _wait(self) -> None:
        """Waits until there are enough clients. At the start, nodes need time to connect: it waits
        up to round_deadline for a whole cohort, or for min_clients."""
        begun, seconds, looked = self.clock.monotonic(), 1.0, 0
        while True:
            self._refresh()
            counts = [len(nodes) for nodes in self._connected()]
            patient = not self.begun and self.clock.monotonic() - begun < self.d.round_deadline
            needed = self.first if patient else self.least
            if all(count >= n for count, n in zip(counts, needed, strict=True)):
                self.begun = True
                return
            if self.asked:
                self.clock.sleep(pause(len(self.asked)))
                continue
            looked += 1
            if looked > 1 or self.begun:  # at the start, not the first time
                have = ", ".join(
                    f"{count} of '{p.name}'"
                    for p, count in zip(self.problem.populations, counts, strict=True)
                )
                wanted = ", ".join(map(str, dict.fromkeys(needed)))
                self.note(
                    f"waiting for clients: {have} connected, {wanted} needed; checking again in "
                    f"{seconds:.0f} s"
                )
            self.clock.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_PAUSE)

    def _refresh(self) -> None:
        """Forgets nodes that are gone, asks new ones, and reads the answers that have arrived."""
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
                    raise Rejected("late", "it did not identify itself in time")
            except Rejected as rejected:
                del self.asked[message]
                self.link.abandon(message)
                self._silence(node, rejected)

    def _nodes(self) -> dict[int, str]:
        """The connected nodes' keys. Retries while the SuperLink is down."""
        until, seconds = self.clock.monotonic() + self.d.round_deadline, 1.0
        while True:
            try:
                return {i: fingerprint(i, key) for i, key in self.link.nodes().items()}
            except Unreachable as error:
                if self.clock.monotonic() + seconds > until:
                    raise MixflError(
                        f"the SuperLink could not be reached for {self.d.round_deadline:.0f} s "
                        f"({error}). Start it, and repeat the same command to continue."
                    ) from None
                self.note(f"the SuperLink can't be reached; trying again in {seconds:.0f} s")
            self.clock.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_PAUSE)

    def _ask(self, node: int, until: float, content: RecordDict | None = None) -> int:
        """Returns the bytes that were sent."""
        ttl = self.d.round_deadline
        if content is None:
            content = RecordDict({"frozen": self.frozen} if self.frozen else {})
        query = Message(content, node, "query", ttl=ttl, group_id="hello")
        message = self.link.push(query, until)
        if message:
            self.asked[message] = (node, until)
        return sent_bytes(query) if message else 0

    def _deliver(self, node: int) -> None:
        """Sends a node the frozen arrays. It then identifies itself."""
        if node in self.delivered or not frozen.is_sent(self.problem):
            self.delivered.discard(node)
            raise Rejected("frozen", "it does not keep the frozen arrays that it is sent")
        self.delivered.add(node)
        until = self.clock.monotonic() + self.d.round_deadline
        self.frozen_bytes += self._ask(node, until, frozen.delivery(self.problem))

    def frozen_bytes_sent(self) -> dict[str, int]:
        """To all nodes, since the last call."""
        sent, self.frozen_bytes = self.frozen_bytes, 0
        return {"comm/frozen_bytes": sent} if frozen.is_sent(self.problem) else {}

    def _silence(self, node: int, rejected: Rejected) -> None:
        """Asks the node again later, after a longer pause each time."""
        who = self.keys.get(node, "")
        seconds = min(ASK_AGAIN * 2.0 ** min(self.refused[who], 16), LONGEST_SILENCE)
        if rejected.reason in SEVERE:
            seconds = LONGEST_SILENCE
        self.refused[who] += 1
        self.silent[node] = self.clock.monotonic() + seconds
        self.note(
            f"node {node} does not take part for now: {rejected}; asking it again in "
            f"{seconds:.0f} s"
        )

    def _take(self, message: str, node: int, reply: Message) -> None:
        meta = reply.metadata
        forged = reply.has_content() and meta.src_node_id != node
        if meta.reply_to_message_id != message or message not in self.asked or forged:
            return
        answer = content(reply)
        if "lacks" in answer:
            self._deliver(node)
            del self.asked[message]
            return
        digest = str(self.frozen["digest"]) if self.frozen else ""
        population, number, rows = parsed_hello(answer, self.tables, digest)
        self.delivered.discard(node)
        who = self.keys.get(node) or fingerprint(node, b"")
        self.members.check(who, population, number, self.keys.values())
        self.refused.pop(who, None)
        self.known[node] = Node(node, population, number, rows, who)
        del self.asked[message]

"""Messages to nodes, and their replies: who was asked, what came back, and how it was counted."""

from collections import Counter
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, RecordDict

from mixfl.deploy.flower.lingering import LINGER
from mixfl.deploy.flower.link import Unreachable
from mixfl.deploy.flower.messages import Rejected
from mixfl.deploy.flower.nodes import Node, Nodes
from mixfl.deploy.flower.replies import content, pause, sent_bytes
from mixfl.deploy.flower.reply_limits import Bounds


class Asked(NamedTuple):
    node: Node
    population: int
    place: int  # in the cohort
    like: Any  # what its reply should be like


# Reasons that may not be the node's fault, but the network's or the task's.
SILENT = frozenset({"late", "failed", "crashed", "not_loaded"})


class Asking:
    """Messages of a round, and their replies. Who makes use of it says what to do with a reply."""

    def __init__(self, nodes: Nodes, t: int):
        self.nodes, self.t = nodes, t
        self.asked: dict[str, Asked] = {}
        self.outstanding: dict[str, Asked] = {}
        self.down, self.up, self.received = 0, 0, 0
        self.count: Counter[str] = Counter()
        self.away = False  # the SuperLink could not be reached for a while
        self.offences: list[tuple[Node, str]] = []
        self.until = 0.0

    def begin(self, seconds: float) -> None:
        self.until = self.nodes.clock.monotonic() + seconds

    def ask(self, asked: Asked, kind: str, content: RecordDict) -> None:
        """Flower drops a message, and its reply, after the deadline."""
        ttl = self.until - self.nodes.clock.monotonic()
        sent = Message(content, asked.node.id, kind, ttl=ttl, group_id=str(self.t))
        self.down += sent_bytes(sent)
        message_id = self.nodes.link.push(sent, self.until)  # one at a time, to save memory
        if message_id:
            self.asked[message_id] = self.outstanding[message_id] = asked
            self._linger(asked.node)
        else:
            self.reject(asked, Rejected("unsent", "the message could not be sent"))

    def _linger(self, node: Node) -> None:
        """A SuperNode that finds no message sleeps for 3 s. One that has just answered finds these
        first, and after them the next task, if that is there by then."""
        ttl = self.until - self.nodes.clock.monotonic()
        for i in range(self.nodes.d.linger):
            group = f"linger {self.t} {i}"
            empty = Message(RecordDict({LINGER: ConfigRecord({})}), node.id, "query", ttl=ttl,
                            group_id=group)  # fmt: skip
            self.down += sent_bytes(empty)
            if message_id := self.nodes.link.push(empty, self.until):
                self.nodes.link.abandon(message_id)  # nobody waits for the answer

    def complete(self) -> bool:
        """Are there enough replies?"""
        return False

    def full(self, asked: Asked) -> bool:
        """Is a reply no longer needed?"""
        return False

    def bounds(self, asked: Asked) -> Bounds:
        raise NotImplementedError

    def accept(self, asked: Asked, content: RecordDict) -> None:
        raise NotImplementedError

    def any_good(self) -> bool:
        """Was there a good reply?"""
        return True

    def name(self, j: int) -> str:
        return self.nodes.problem.populations[j].name

    def pull(self) -> None:
        """Waits until all replies have arrived, or enough, or the deadline has passed."""
        clock = self.nodes.clock
        while self.outstanding:
            self._look()
            if self.complete():
                break
            if self.outstanding:
                if clock.monotonic() >= self.until:
                    break
                left = max(0.0, self.until - clock.monotonic())
                clock.sleep(min(pause(len(self.outstanding)), left))
        for message, asked in self.outstanding.items():
            self.nodes.link.abandon(message)
            self.missing(asked)
        self._judge()
        self.nodes.link.sweep()

    def missing(self, asked: Asked) -> None:
        """No reply came from it."""
        if self.full(asked):
            self.count["clients/surplus"] += 1
        else:
            self.reject(asked, Rejected("late", "no reply before the deadline"))

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
                for reply in link.pull(message, self.bounds(asked), self.until):
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
        if self.full(asked):
            self.count["clients/surplus"] += 1
            return
        try:
            self.accept(asked, content(reply))
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
            if not (reason in SILENT and (self.away or not self.any_good())):
                self.nodes.failed(node, self.t, reason)
        self.offences = []

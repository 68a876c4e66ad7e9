"""Flower's grid in one process: the unchanged apps, every message through Flower's own form on the
wire, a clock of its own, and failures as wanted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # of every message here
FIRST_NODE = 1000
# A fault makes of a message and its good reply what really comes: (seconds later, reply) each.
Fault = Callable[[Message, Callable[[], Message]], list[tuple[float, Message]]]


class Clock:
    """Time passes when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@dataclass
class InProcess(Grid):
    app: ClientApp
    nodes: Sequence[Mapping]  # their configurations
    run_config: Mapping
    clock: Clock = field(default_factory=Clock)
    faults: Mapping[tuple[str, int], Fault] = field(default_factory=dict)  # (group, node's place)
    gone: Callable[[float], set[int]] = lambda now: set()  # places of nodes without connection
    events: list = field(default_factory=list)
    sent: dict[str, Message] = field(default_factory=dict)
    under_way: dict[str, list] = field(default_factory=dict)  # message -> (when, reply)
    states: dict[int, RecordDict] = field(default_factory=dict)  # of nodes, by place

    def set_run(self, run): ...

    @property
    def run(self):
        return SimpleNamespace(run_id=1)

    def create_message(self, *args, **more): ...

    def send_and_receive(self, messages, *, timeout=None): ...

    def get_node_ids(self):
        return [
            FIRST_NODE + i
            for i in range(len(self.nodes))
            if i not in self.gone(self.clock.monotonic())
        ]

    def get_nodes(self):
        return [NodeInfo(node_id=i, public_key=self.key(i)) for i in self.get_node_ids()]

    @staticmethod
    def key(node):
        return b"key of node %d" % node

    def push_messages(self, messages):
        ids = []
        for message in messages:
            delivered = wired(message)
            ids.append(delivered.metadata.message_id)
            self.sent[ids[-1]] = delivered
            self.events.append(("push", delivered.metadata.group_id))
        return ids

    def pull_messages(self, message_ids):
        replies = []
        for message in message_ids:
            if message in self.sent:
                self._run(self.sent.pop(message))
            due = [r for r in self.under_way.get(message, []) if r[0] <= self.clock.monotonic()]
            replies += [wired(reply) for _, reply in due]
            self.under_way[message] = [r for r in self.under_way[message] if r not in due]
            self.events += [("reply", message)] * len(due)
        return replies

    def _run(self, message):
        """The node's part, with what goes wrong there."""
        place = message.metadata.dst_node_id - FIRST_NODE
        state = self.states.setdefault(place, RecordDict())  # kept between messages, as Flower does
        context = Context(1, FIRST_NODE + place, dict(self.nodes[place]), state,
                          dict(self.run_config))  # fmt: skip

        def reply() -> Message:
            try:
                return self.app(message, context)
            except Exception as error:
                return failed(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION, repr(error))

        fault = self.faults.get((message.metadata.group_id, place), on_time)
        replies = fault(message, reply)
        self.under_way[message.metadata.message_id] = [
            (self.clock.monotonic() + s, r) for s, r in replies
        ]


def wired(message: Message) -> Message:
    """As it comes out at the other end."""
    with no_object_id_recompute():
        root = message.object_id
        contents = {i: part.deflate() for i, part in get_all_nested_objects(message).items()}
    delivered = inflate_object_from_contents(root, contents)
    delivered.metadata.__dict__["_message_id"] = root
    return delivered


def failed(message: Message, code: int, reason: str = "") -> Message:
    """By the node, or by the SuperLink where only that can know."""
    reply = Message(Error(code, reason), reply_to=message)
    if code == ErrorCode.NODE_UNAVAILABLE:
        reply.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
    return reply


# Faults


def on_time(message, reply):
    return [(0.0, reply())]


def hang(message, reply):
    return []


def twice(message, reply):
    return [(0.0, reply()), (0.0, reply())]


def late(seconds: float) -> Fault:
    return lambda message, reply: [(seconds, reply())]


def crash(code: int) -> Fault:
    return lambda message, reply: [(0.0, failed(message, code))]


def changed(change: Callable[[RecordDict], None]) -> Fault:
    """A reply whose content was changed on the way."""

    def fault(message, reply):
        answer = reply()
        change(answer.content)
        return [(0.0, answer)]

    return fault

"""A SuperLink in one process: Flower's own handlers and database, reached without HTTP, with nodes
that may send whatever they like, and faults where wanted."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
from flower_grid import Clock
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.clientapp import ClientApp
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto import fleet_pb2, message_pb2
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    iterate_object_tree,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers as fleet
from flwr.superlink.servicer.runtime import runtime_handlers as runtime

from mixfl.deploy.flower.link import OTHER_ANSWER, RuntimeLink, TooLong

HANDLERS = {
    "GetNodes": runtime.get_nodes, "PushMessages": runtime.push_messages,
    "PushObject": runtime.push_object, "PullMessages": runtime.pull_messages,
    "PullObject": runtime.pull_object, "ConfirmMessageReceived": runtime.confirm_message_received,
}  # fmt: skip
# What a node really sends of a reply: its objects, and those of them that come.
Sent = tuple[Message, ObjectTree, Mapping[str, bytes]]
Forge = Callable[[Message], Sent]


class SuperLink:
    """`forged` has, by (group, node's place), what becomes of a good reply; `broken` is asked
    before and after each call of the server's, and may raise."""

    def __init__(
        self, app: ClientApp, nodes: Sequence[Mapping], run_config: Mapping, database: str = "",
        forged: Mapping[tuple[str, int], Forge] | None = None,
    ):  # fmt: skip
        name = database or ":flwr-in-memory:"
        stores = ObjectStoreFactory(name)
        self.state = LinkStateFactory(name, NoOpFederationManager(), stores).state()
        self.app, self.configs, self.run_config = app, nodes, run_config
        self.forged, self.broken = forged or {}, lambda call, request, after: None
        self.clock, self.most = Clock(), OTHER_ANSWER
        self.ids = [self._node(i) for i in range(len(nodes))]
        self.run = self._started()

    def _node(self, i: int) -> int:
        key = b"key of node %d" % i
        node = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 3600)
        assert self.state.activate_node(node, 3600)
        return node

    def _started(self):
        run = self.state.create_run(
            "id", "1", "hash", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        (info,) = self.state.get_run_info(run_ids=[run])
        self.state.claim_task(info.primary_task_id)
        assert self.state.activate_task(info.primary_task_id)
        TaskIdentity.run_id, TaskIdentity.node_id = run, SUPERLINK_NODE_ID
        TaskIdentity.task_id = info.primary_task_id
        return info

    def link(self) -> RuntimeLink:
        grid = HttpGrid(token="none")
        grid.set_run(self.run)
        grid._client = self
        return RuntimeLink(grid, self.clock)

    # What the run's server calls

    def limit(self, most: int, seconds: float) -> None:
        """Of the next answer's bytes; there is no HTTP whose time could be limited."""
        self.most = most

    def __getattr__(self, method: str):
        """The Runtime API's methods."""
        if method not in HANDLERS:
            raise AttributeError(method)
        return functools.partial(self._call, HANDLERS[method])

    def _call(self, handler, request):
        if handler is runtime.pull_messages:
            self.nodes_work()
        self.broken(handler.__name__, request, False)
        task = SimpleNamespace(run_id=self.run.run_id, task_id=self.run.primary_task_id)
        answer = handler(request, self.state, task)
        self.broken(handler.__name__, request, True)
        if answer.ByteSize() > self.most:
            raise TooLong
        return answer

    # What nodes do

    def nodes_work(self) -> None:
        for place, node in enumerate(self.ids):
            told = fleet.pull_messages(
                fleet_pb2.PullMessagesRequest(node=Node(node_id=node)), self.state,
                self.state.object_store,
            )  # fmt: skip
            for proto, tree in zip(told.messages_list, told.message_object_trees, strict=True):
                self._answer(place, self._fetched(node, proto, tree))

    def _fetched(self, node: int, proto: Any, tree: ObjectTree) -> Message:
        run, which = self.run.run_id, Node(node_id=node)
        contents = {}
        for part in iterate_object_tree(tree):
            request = message_pb2.PullObjectRequest(
                node=which, run_id=run, object_id=part.object_id
            )
            contents[part.object_id] = fleet.pull_object(request, self.state).object_content
        root = proto.metadata.message_id
        done = message_pb2.ConfirmMessageReceivedRequest(
            node=which, run_id=run, message_object_id=root
        )
        fleet.confirm_message_received(done, self.state, self.state.object_store)
        message: Any = inflate_object_from_contents(root, contents)
        message.metadata.__dict__["_message_id"] = root
        return message

    def _answer(self, place: int, message: Message) -> None:
        node = self.ids[place]
        context = Context(self.run.run_id, node, dict(self.configs[place]), RecordDict(),
                          dict(self.run_config))  # fmt: skip
        forge = self.forged.get((message.metadata.group_id, place), honest)
        if forge is silent:
            return
        reply, tree, contents = forge(self.app(message, context))
        self.send(node, reply, tree, contents)

    def send(self, node: int, reply: Message, tree: ObjectTree, contents: Mapping[str, bytes]):
        which, run = Node(node_id=node), self.run.run_id
        reply.metadata.__dict__["_message_id"] = tree.object_id
        proto = message_to_proto(remove_content_from_message(reply))
        told = fleet.push_messages(
            fleet_pb2.PushMessagesRequest(
                node=which, messages_list=[proto], message_object_trees=[tree]
            ),
            self.state,
        )
        for object_id in told.objects_to_push:
            if object_id in contents:
                request = message_pb2.PushObjectRequest(
                    node=which, run_id=run, object_id=object_id, session_id=told.session_id,
                    object_content=contents[object_id],
                )  # fmt: skip
                assert fleet.push_object(request, self.state).stored


# What a node makes of its good reply


def honest(reply: Message) -> Sent:
    parts = get_all_nested_objects(reply)
    return reply, get_object_tree(reply), {i: part.deflate() for i, part in parts.items()}


def silent(reply: Message) -> Sent:
    raise AssertionError("it sends nothing")


def announced_only(reply: Message) -> Sent:
    message, tree, _ = honest(reply)
    return message, tree, {}


def without_last(reply: Message) -> Sent:
    message, tree, contents = honest(reply)
    return message, tree, {i: c for i, c in contents.items() if i != tree.object_id}


def repeated(times: int, chunk: bytes) -> Forge:
    """One chunk, listed many times in the array that has it."""

    def forge(reply: Message) -> Sent:
        chunks = [ArrayChunk(data=memoryview(chunk))]
        small = chunks[0].deflate()
        chunk_id = get_object_id(small)
        body = json.dumps(
            {"dtype": "float32", "shape": [3], "stype": "mixfl.little-endian",
             "arraychunk_ids": [0] * times}
        ).encode()  # fmt: skip
        array = b"Array %s %d\x00" % (chunk_id.encode(), len(body)) + body
        array_id = get_object_id(array)
        body = json.dumps({"w": array_id}).encode()
        record = b"ArrayRecord %s %d\x00" % (array_id.encode(), len(body)) + body
        record_id = get_object_id(record)
        body = json.dumps({"weighted": record_id}).encode()
        records = b"RecordDict %s %d\x00" % (record_id.encode(), len(body)) + body
        records_id = get_object_id(records)
        good = honest(reply)[2][get_object_tree(reply).object_id]
        body = good[good.index(b"\x00") + 1 :]
        root = b"Message %s %d\x00" % (records_id.encode(), len(body)) + body
        tree = None
        contents = {}
        for content in (small, array, record, records, root):
            contents[get_object_id(content)] = content
            tree = ObjectTree(object_id=get_object_id(content), children=[tree] if tree else [])
        return reply, tree, contents

    return forge


def wide(count: int) -> Forge:
    """A tree of many announced objects."""

    def forge(reply: Message) -> Sent:
        leaves = [ObjectTree(object_id=get_object_id(b"%d" % i)) for i in range(count)]
        return reply, ObjectTree(object_id=get_object_id(b"root"), children=leaves), {}

    return forge


def long_array(size: int) -> Forge:
    def forge(reply: Message) -> Sent:
        reply.content["weighted"] = ArrayRecord({"w": Array("float32", (3,), "x", bytes(size))})
        return honest(reply)

    return forge


def once(call: str, when: Callable[[int], bool]):
    """The SuperLink ends after it has done what it was told, and before it says so."""
    seen = [0]

    def broken(name, request, after):
        if name == call and after:
            seen[0] += 1
            if when(seen[0]):
                raise httpx.ReadError("gone")

    return broken

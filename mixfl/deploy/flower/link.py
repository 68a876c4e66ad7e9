"""The way to Flower's nodes: who is connected, sending messages, fetching replies.

`Link` works with any grid of Flower's. `RuntimeLink` is for the one that a run's server gets in a
deployment (HttpGrid). It asks the SuperLink itself, for three reasons: Flower waits without end
for what a node has announced, inflates what it gets whatever its size, and tries again without
end while the SuperLink is away. What comes from flwr's inner modules is here and in bounds.py.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import httpx
from flwr.app import Message
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

from mixfl.deploy.flower.messages import Rejected
from mixfl.deploy.flower.replies import Clock
from mixfl.deploy.flower.reply_limits import Bounds, Reply, too_long, unreadable
from mixfl.errors import MixflError

LONGEST_CALL = 30.0  # seconds
LONGEST_PAUSE = 20.0  # seconds between two tries
REFUSED = 5  # times that the SuperLink may refuse a message
OTHER_ANSWER = 1 << 26  # bytes of an answer of the SuperLink's, if not of a reply's object
MOST_DELETED = 1000  # messages that nobody asked for, per sweep; the others go with the run


class Unreachable(Exception):
    """The SuperLink does not answer, or not well, for now."""


class Refused(Unreachable):
    """It answers that it can't do it."""


class TooLong(Exception):
    """An answer of the SuperLink's."""


class Link:
    """Over any grid of Flower's."""

    def __init__(self, grid: Grid, clock: Clock):
        self.grid, self.clock = grid, clock

    def nodes(self) -> dict[int, bytes]:
        """The connected nodes, each with its public key, or nothing where Flower has none."""
        if not hasattr(self.grid, "get_nodes"):
            return dict.fromkeys(self.call(self.grid.get_node_ids), b"")
        return {node.node_id: node.public_key for node in self.call(self.grid.get_nodes)}

    def push(self, message: Message, until: float) -> str | None:
        """Sends a message; its id, or None if it could not be sent.

        Flower's PushObject can't be repeated: where the SuperLink has ended after it took an
        object and before it said so, the second time is refused. The same message can be pushed
        again as a whole: its id is a digest, and only what is missing is sent.
        """
        refused, seconds = 0, 1.0
        while True:
            try:
                return next(iter(self.call(self.grid.push_messages, [message])), None) or None
            except (ObjectPushError, Refused):
                refused += 1
            except Unreachable:
                pass
            if refused >= REFUSED or self.clock.monotonic() + seconds > until:
                return None
            self.clock.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_PAUSE)

    def pull(self, message_id: str, bounds: Bounds, until: float) -> Iterable[Message]:
        """The replies to one message that are there. One message at a time: a reply that Flower
        can't even read is an error of the whole call."""
        try:
            return self.call(self.grid.pull_messages, [message_id])
        except (Unreachable, MixflError):
            raise
        except Exception as error:
            raise unreadable(error) from None

    def drain(self, until: float) -> None:
        """Takes the messages out of the way that nobody asked for."""

    def abandon(self, message_id: str) -> None:
        """Nobody waits for the reply to it any more."""

    def sweep(self) -> None:
        """Has the SuperLink delete what is left of abandoned messages."""

    def call(self, what, *given) -> Any:
        try:
            return what(*given)
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                raise ended() from None
            raise Refused(f"status {error.response.status_code}") from None
        except RunNotRunningException:
            raise ended() from None
        except (httpx.HTTPError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from None


class RuntimeLink(Link):
    """Over the SuperLink's Runtime API."""

    def __init__(self, grid: HttpGrid, clock: Clock):
        super().__init__(grid, clock)
        self.client: Any = grid._runtime_client
        self.node, self.run = grid.node, grid.run.run_id
        self.announced: dict[str, tuple[Any, Reply]] = {}
        self.abandoned: dict[str, None] = {}
        self.unasked: dict[str, None] = {}
        self.unread: set[str] = set()  # messages of which an answer could not be read

    def pull(self, message_id: str, bounds: Bounds, until: float) -> Iterable[Message]:
        """Nothing while a part is missing: it goes on with the next call."""
        try:
            if message_id not in self.announced and not self._announced(message_id, bounds, until):
                return []
            metadata, reply = self.announced[message_id]
            for object_id in list(reply.missing):
                if self.clock.monotonic() >= until:
                    return []
                request = PullObjectRequest(node=self.node, run_id=self.run, object_id=object_id)
                answer = self._ask("PullObject", request, reply.left + 1024, until)
                if not answer.object_found:
                    raise Rejected("late", "it has announced a reply and not sent it")
                if not answer.object_available:
                    return []
                reply.add(object_id, answer.object_content)
            told = reply.message()
        except TooLong:
            self._forget(message_id)
            raise too_long(bounds) from None
        except Rejected:
            self._forget(message_id)
            raise
        lost = message_id in self.unread and metadata.src_node_id == SUPERLINK_NODE_ID
        self._forget(message_id)
        if lost:
            raise Rejected("lost", "its reply came with others that could not be read")
        # Who sent it and what it answers is the SuperLink's to say, not the reply's.
        if told.has_error():
            return [make_message(metadata=metadata, error=told.error)]
        return [make_message(metadata=metadata, content=told.content)]

    def _announced(self, message_id: str, bounds: Bounds, until: float) -> bool:
        """Is there a reply? The SuperLink tells it once, and with it all that any node has sent
        unasked. Where such an answer can't be read, the next one shows whether a reply was in it:
        then the SuperLink knows the message no more."""
        found = None
        try:
            for proto, tree in self._pulled([message_id], until):
                if proto.metadata.reply_to_message_id == message_id:
                    found = proto.metadata, tree
                else:
                    self.unasked[proto.metadata.message_id] = None
        except (TooLong, ValueError):  # or of a depth that can't be parsed
            self.unread.add(message_id)
        if found is None:
            return False
        metadata, tree = found
        try:
            reply = Reply(metadata.message_id, tree, bounds)
        except Rejected:
            self._delete(metadata.message_id)
            raise
        self.announced[message_id] = metadata_from_proto(metadata), reply
        return True

    def drain(self, until: float) -> None:
        """Flower adds them to every answer: a reply that comes with too many of them is lost."""
        with contextlib.suppress(TooLong, ValueError):
            for proto, _ in self._pulled([], until):
                self.unasked[proto.metadata.message_id] = None

    def _pulled(self, message_ids: list[str], until: float | None = None) -> list[tuple[Any, Any]]:
        request = PullAppMessagesRequest(message_ids=message_ids)
        answer = self._ask("PullMessages", request, OTHER_ANSWER, until)
        return list(zip(answer.messages_list, answer.message_object_trees, strict=True))

    def abandon(self, message_id: str) -> None:
        self._forget(message_id)
        self.abandoned[message_id] = None

    def sweep(self) -> None:
        for message_id in list(self.abandoned):
            try:
                pulled = self._pulled([message_id])
            except Unreachable:
                return
            except (TooLong, ValueError):  # its objects go with the run
                del self.abandoned[message_id]
                continue
            roots = {p.metadata.message_id: p.metadata.reply_to_message_id for p, _ in pulled}
            self.unasked |= {root: None for root, to in roots.items() if to != message_id}
            if message_id in roots.values():  # a reply, or the word that it is too old for one
                del self.abandoned[message_id]
                for root in [root for root, to in roots.items() if to == message_id]:
                    self._delete(root)
                self._delete(message_id)
        unasked, self.unasked = list(self.unasked)[:MOST_DELETED], {}
        for root in unasked:
            if not self._delete(root):
                return

    def _forget(self, message_id: str) -> None:
        self.unread.discard(message_id)
        _, reply = self.announced.pop(message_id, (None, None))
        if reply is not None:
            self._delete(reply.root)

    def _delete(self, object_id: str) -> bool:
        """And all of which it alone consists."""
        request = ConfirmMessageReceivedRequest(
            node=self.node, run_id=self.run, message_object_id=object_id
        )
        try:
            self._ask("ConfirmMessageReceived", request, OTHER_ANSWER)
        except Unreachable:  # it goes with the run
            return False
        return True

    def _ask(self, method: str, request: Any, most: int, until: float | None = None) -> Any:
        left = LONGEST_CALL if until is None else until - self.clock.monotonic()
        self.client.limit(most, min(LONGEST_CALL, max(left, 1.0)))
        try:
            return self.call(getattr(self.client, method), request)
        finally:
            self.client.limit(OTHER_ANSWER, LONGEST_CALL)


class Client(RuntimeHttpClient):
    """One try per call, and limits for an answer's length and time."""

    most = OTHER_ANSWER

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self._client.headers["accept-encoding"] = "identity"
        self._client.event_hooks = {"response": [self._check]}  # called before the body is read

    def limit(self, most: int, seconds: float) -> None:
        self.most, self._client.timeout = most, httpx.Timeout(seconds)

    def _check(self, response: httpx.Response) -> None:
        if int(response.headers.get("content-length", 0)) > self.most:
            raise TooLong


def link_to(grid: Grid | Link, clock: Clock) -> Link:
    if isinstance(grid, Link):
        return grid
    if not isinstance(grid, HttpGrid):
        return Link(grid, clock)
    own = HttpGrid(grid._addr, grid._insecure, grid._cert, token=grid._token)
    own.set_run(grid.run)
    own._client = Client.from_server_address(
        server_address=grid._addr,
        insecure=grid._insecure,
        root_certificates=grid._cert,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr-serverapp"),
            RuntimeTokenHttpInterceptor(token=grid._token),
        ],
    )
    return RuntimeLink(own, clock)


def ended() -> MixflError:
    return MixflError(
        "Flower has ended this run: it was stopped, or the SuperLink was away for longer than it "
        "keeps a run without a sign of life. The same `flwr run` goes on from the last round."
    )

"""The server's connection to the nodes: who is connected, sending messages, fetching replies.

`Link` works with any Flower grid. `RuntimeLink` is for HttpGrid, the grid that a run's server gets
in a deployment. It calls the SuperLink directly, for three reasons. Flower waits forever for a
reply that a node has announced. It inflates replies of any size. It retries forever while the
SuperLink is down. For this it uses internal modules of flwr 1.41, as do reply_limits.py, worker.py
and superexec.py.
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
OTHER_ANSWER = 1 << 26  # bytes that a SuperLink answer may have, unless it is a reply's object
MOST_DELETED = 1000  # unrequested messages deleted per sweep; the rest is deleted with the run


class Unreachable(Exception):
    """The SuperLink does not answer, or answers with an error."""


class Refused(Unreachable):
    """The SuperLink answered with an HTTP error."""


class TooLong(Exception):
    """The SuperLink's answer is longer than allowed."""


class Link:
    """A connection over any Flower grid."""

    def __init__(self, grid: Grid, clock: Clock):
        self.grid, self.clock = grid, clock

    def nodes(self) -> dict[int, bytes]:
        """The connected nodes, each with its public key (empty if Flower has none)."""
        if not hasattr(self.grid, "get_nodes"):
            return dict.fromkeys(self.call(self.grid.get_node_ids), b"")
        return {node.node_id: node.public_key for node in self.call(self.grid.get_nodes)}

    def run_id(self) -> int:
        """Flower's number of the run, as nodes know it."""
        return getattr(self.grid.run, "run_id", 0)

    def push(self, message: Message, until: float) -> str | None:
        """Sends a message. Returns its id, or None if it could not be sent.

        Flower's PushObject can't be repeated: if the SuperLink dies after storing an object but
        before confirming it, it refuses the object the second time. The whole message can be pushed
        again: its id is a digest, and only missing objects are sent.
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
        """The replies to one message so far. One message at a time, because a reply that Flower
        can't parse makes the whole call fail."""
        try:
            return self.call(self.grid.pull_messages, [message_id])
        except (Unreachable, MixflError):
            raise
        except Exception as error:
            raise unreadable(error) from None

    def drain(self, until: float) -> None:
        """Fetches unrequested messages, so that they don't come with a reply."""

    def abandon(self, message_id: str) -> None:
        """Stops waiting for the reply to a message."""

    def sweep(self) -> None:
        """Makes the SuperLink delete what is left of abandoned messages."""

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
    """A connection over the SuperLink's Runtime API."""

    def __init__(self, grid: HttpGrid, clock: Clock):
        super().__init__(grid, clock)
        self.client: Any = grid._runtime_client
        self.node, self.run = grid.node, grid.run.run_id
        self.announced: dict[str, tuple[Any, Reply]] = {}
        self.abandoned: dict[str, None] = {}
        self.unasked: dict[str, None] = {}
        self.unread: set[str] = set()  # messages for which an answer could not be read

    def pull(self, message_id: str, bounds: Bounds, until: float) -> Iterable[Message]:
        """The complete reply, or nothing while a part is missing; the next call continues."""
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
                    raise Rejected("late", "it announced a reply but did not send it")
                if not answer.object_available:
                    return []
                reply.add(object_id, answer.object_content)
            message = reply.message()
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
        # The SuperLink's metadata counts, not the reply's own: who sent it and what it answers.
        if message.has_error():
            return [make_message(metadata=metadata, error=message.error)]
        return [make_message(metadata=metadata, content=message.content)]

    def _announced(self, message_id: str, bounds: Bounds, until: float) -> bool:
        """Whether a reply has been announced. The SuperLink announces it once, together with
        everything that nodes sent unasked. If that answer can't be read, the next one shows
        whether it contained the reply: then the SuperLink no longer knows the message."""
        announced = None
        try:
            for proto, tree in self._pulled([message_id], until):
                if proto.metadata.reply_to_message_id == message_id:
                    announced = proto.metadata, tree
                else:
                    self.unasked[proto.metadata.message_id] = None
        except (TooLong, ValueError):  # too long, or nested too deeply to be parsed
            self.unread.add(message_id)
        if announced is None:
            return False
        metadata, tree = announced
        try:
            reply = Reply(metadata.message_id, tree, bounds)
        except Rejected:
            self._delete(metadata.message_id)
            raise
        self.announced[message_id] = metadata_from_proto(metadata), reply
        return True

    def drain(self, until: float) -> None:
        """Flower adds unrequested messages to every answer, and a reply that comes with too many of
        them is lost."""
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
            except (TooLong, ValueError):  # its objects are deleted with the run
                del self.abandoned[message_id]
                continue
            roots = {p.metadata.message_id: p.metadata.reply_to_message_id for p, _ in pulled}
            self.unasked |= {root: None for root, to in roots.items() if to != message_id}
            if message_id in roots.values():  # a reply, or the note that it is too old for one
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
        """Deletes an object and the objects that only it refers to."""
        request = ConfirmMessageReceivedRequest(
            node=self.node, run_id=self.run, message_object_id=object_id
        )
        try:
            self._ask("ConfirmMessageReceived", request, OTHER_ANSWER)
        except Unreachable:  # it is deleted with the run
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
    """Makes one attempt per call, with limits on the length and time of an answer."""

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
        "Flower has ended this run: it was stopped, or the SuperLink was down for longer than "
        "Flower keeps a run that sends no heartbeat. Repeat the same `flwr run` to continue from "
        "the last round."
    )

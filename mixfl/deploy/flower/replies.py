"""Reading a reply's content, or why it has none; how often to check for replies; the bytes of a
message."""

from typing import Protocol

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    no_object_id_recompute,
)

from mixfl.deploy.flower.messages import Rejected

REASONS = {  # Flower's error codes, as names for the metrics
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "not_loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "failed",
    ErrorCode.MESSAGE_UNAVAILABLE: "late",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "late",
    ErrorCode.NODE_UNAVAILABLE: "gone",
    ErrorCode.CLIENT_APP_CRASHED: "crashed",
}
SUPERLINKS_OWN = frozenset({"gone", "late"})  # only the SuperLink can say so, not a node


class Clock(Protocol):
    """The module `time`, or a test's clock."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


def pause(outstanding: int) -> float:
    """Seconds between two checks for replies."""
    return min(3.0, max(0.1, 0.02 * outstanding))


def content(reply: Message) -> RecordDict:
    """A reply's content. Raises Rejected, with the reason, if it has none. The text of a client's
    error is not repeated, because it may contain the client's data."""
    if reply.has_error():
        code = reply.error.code
        reason = REASONS.get(code, "error")
        if reason in SUPERLINKS_OWN and reply.metadata.src_node_id != SUPERLINK_NODE_ID:
            reason = "failed"
        raise Rejected(reason, f"it failed (Flower's error code {code})")
    return reply.content


def sent_bytes(message: Message) -> int:
    """The bytes that are sent for a message: its own and those of all objects in it."""
    with no_object_id_recompute():
        return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())

"""What became of a reply, and when to look again."""

from typing import Protocol

from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode

from mixfl.deploy.flower.messages import Rejected

REASONS = {  # Flower's error codes, as words for the metrics
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "not_loaded",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "failed",
    ErrorCode.MESSAGE_UNAVAILABLE: "late",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "late",
    ErrorCode.NODE_UNAVAILABLE: "gone",
    ErrorCode.CLIENT_APP_CRASHED: "crashed",
}
SUPERLINKS_OWN = frozenset({"gone", "late"})  # no node can say that of itself


class Clock(Protocol):
    """The module `time`, or a test's own."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


def pause(outstanding: int) -> float:
    """Seconds between two looks for replies."""
    return min(3.0, max(0.1, 0.02 * outstanding))


def content(reply: Message) -> RecordDict:
    """A reply's content, or Rejected with the reason for there being none. What a client's error
    says is not repeated: its data may be in it."""
    if reply.has_error():
        code = reply.error.code
        reason = REASONS.get(code, "error")
        if reason in SUPERLINKS_OWN and reply.metadata.src_node_id != SUPERLINK_NODE_ID:
            reason = "failed"
        raise Rejected(reason, f"it failed (code {code} of Flower's)")
    return reply.content

"""Leaves out nodes that keep failing, for a pause that doubles each time.

The first two bad or late replies in a row cost nothing: a killed process, and the messages that
Flower lost with it, may take two rounds. The third costs one round, the next ones two, four, up to
LONGEST. A good reply halves the count.
"""

from typing import Any

LONGEST = 64  # rounds
FREE = 2  # failures that cost nothing
# The node may not be to blame.
EXCUSED = frozenset({"gone", "lost", "unsent"})
# No honest mistake produces such a reply: the longest pause at once.
SEVERE = frozenset({"oversized"})
WORST = FREE + LONGEST.bit_length()  # number of failures at which the pause is LONGEST


class Quarantine:
    """Identifies nodes by their keys, so reconnecting does not help a node."""

    def __init__(self, kept: Any = ()):
        self.failures: dict[str, int] = {}
        self.until: dict[str, int] = {}  # the round in which a node may be asked again
        self.stale: set[str] = set()  # nodes whose last reply was stale
        for who, failures, until in kept:
            self.failures[who], self.until[who] = failures, until

    def kept(self) -> list[tuple[str, int, int]]:
        """The state, for `Quarantine(kept)`."""
        return [(who, n, self.until.get(who, 0)) for who, n in sorted(self.failures.items())]

    def remaining(self, who: str, round: int) -> int:
        """For how many rounds a node is left out, including this one."""
        if who in self.until:  # a run may go back to an earlier round
            self.until[who] = min(self.until[who], round + 1 + LONGEST)
        return max(0, self.until.get(who, 0) - round)

    def failed(self, who: str, round: int, reason: str) -> int:
        """Records a bad reply. Returns for how many rounds the node is left out."""
        if reason in EXCUSED:
            return 0
        if reason != "stale":
            self.stale.discard(who)
        elif who not in self.stale:  # data may change, but not in every round
            self.stale.add(who)
            return 0
        count = WORST if reason in SEVERE else min(self.failures.get(who, 0) + 1, WORST)
        self.failures[who] = count
        pause = 2 ** (count - FREE - 1) if count > FREE else 0
        self.until[who] = round + 1 + pause
        return pause

    def good(self, who: str) -> None:
        self.stale.discard(who)
        left = self.failures.pop(who, 0) // 2
        self.until.pop(who, None)
        if left:
            self.failures[who] = left

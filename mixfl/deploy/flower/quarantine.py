"""Nodes that fail again and again are left out for a while: the pause doubles each time.

The first two bad or late replies in a row cost nothing: a process that was killed, and what Flower
lost with it, may take two rounds. The third costs one round, the next two, four, up to LONGEST. A
good reply halves what is held against a node.
"""

from typing import Any

LONGEST = 64  # rounds
FREE = 2  # offences that cost nothing
# The node is not to blame, or not for sure.
EXCUSED = frozenset({"gone", "lost", "unsent"})
# No mistake makes such a reply: the longest pause at once.
SEVERE = frozenset({"oversized"})
WORST = FREE + LONGEST.bit_length()  # offences by which the pause is LONGEST


class Quarantine:
    """Nodes are known by their keys, so that a new connection changes nothing."""

    def __init__(self, kept: Any = ()):
        self.offences: dict[str, int] = {}
        self.until: dict[str, int] = {}  # the round in which a node may be asked again
        self.stale: set[str] = set()  # whose last reply was
        for who, offences, until in kept:
            self.offences[who], self.until[who] = offences, until

    def kept(self) -> list[tuple[str, int, int]]:
        """For `Quarantine(kept)`."""
        return [(who, n, self.until.get(who, 0)) for who, n in sorted(self.offences.items())]

    def remaining(self, who: str, round: int) -> int:
        """Rounds for which a node is left out, this one included."""
        if who in self.until:  # a run may go back to an earlier round
            self.until[who] = min(self.until[who], round + 1 + LONGEST)
        return max(0, self.until.get(who, 0) - round)

    def offence(self, who: str, round: int, reason: str) -> int:
        """Rounds for which the node is left out from now on."""
        if reason in EXCUSED:
            return 0
        if reason != "stale":
            self.stale.discard(who)
        elif who not in self.stale:  # data may change, but not with each round
            self.stale.add(who)
            return 0
        count = WORST if reason in SEVERE else min(self.offences.get(who, 0) + 1, WORST)
        self.offences[who] = count
        pause = 2 ** (count - FREE - 1) if count > FREE else 0
        self.until[who] = round + 1 + pause
        return pause

    def good(self, who: str) -> None:
        self.stale.discard(who)
        left = self.offences.pop(who, 0) // 2
        self.until.pop(who, None)
        if left:
            self.offences[who] = left

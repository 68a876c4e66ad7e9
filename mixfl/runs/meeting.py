"""When several processes that train one model agree to stop or to save."""

import time

import jax

from mixfl.engine import processes

MEETING_SECONDS = 1.0  # between two moments at which they ask each other


class Meetings:
    """They do what one of them wants. They ask each other about once a second, by process 0's
    clock, and whenever they wait for each other anyway."""

    def __init__(self) -> None:
        self.last = (0, time.perf_counter())  # round and time
        self.next = 0  # round

    def agreed(self, round: int, meet: bool, stop: bool, overdue: bool) -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint is overdue."""
        if jax.process_count() == 1:
            return stop, overdue
        if round < self.next and not meet:
            return False, False
        now = time.perf_counter()
        rounds = (round - self.last[0]) / max(now - self.last[1], 1e-3) * MEETING_SECONDS
        wishes = processes.gather([stop, overdue, max(1, int(rounds))])
        self.last, self.next = (round, now), round + wishes[0][2]
        return any(w[0] for w in wishes), any(w[1] for w in wishes)

"""The time that measurements may take."""

import time
from collections.abc import Callable

Report = Callable[[int, int, str], None]


class Clock:
    """Keeps track of the time budget."""

    def __init__(self, budget: float, report: Report):
        self.begun, self.budget, self.report = time.perf_counter(), budget, report

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.begun

    def repeat(self, what: str, times: int, until: float, least: int = 1):
        """Yields 0, 1, ... up to `times`, until the share `until` of the budget is spent, but at
        least `least` times."""
        for i in range(times):
            if i >= least and self.spent > until * self.budget:
                return
            self.report(i, times, what)
            yield i

    def left(self, until: float) -> bool:
        """Whether less than this share of the budget is spent."""
        return self.spent < until * self.budget

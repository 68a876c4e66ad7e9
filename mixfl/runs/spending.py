"""What a private run has spent so far, and whether another round is within its budget."""

import math

from mixfl.runs.plan import Plan
from mixfl.runs.sinks.base import Row


class Spending:
    """`repeated`: rounds that count twice, because the server died in them (Engine.repeated). They
    are not in the plan: with them, a run may have to end early."""

    def __init__(self, plan: Plan, repeated: int):
        self.budget, self.s, self.repeated = plan.budget, plan.settings, repeated

    def row(self, t: int) -> Row:
        """After round t."""
        if self.budget is None:
            return {}
        spent = self.spent(t)
        return {
            "privacy/epsilon": spent if math.isfinite(spent) else None,
            "privacy/delta": self.budget.delta,
        }

    def spent(self, t: int) -> float:
        assert self.budget is not None
        return self.budget.spent(self.s.dp_noise_multiplier or 0.0, t, self.repeated)

    def ends(self, t: int) -> str:
        """Why the run ends after round t; "" if it does not."""
        most = self.s.dp_epsilon
        if not self.repeated or most is None or self.spent(t + 1) <= most:
            return ""
        return (
            f"the budget of epsilon = {most:g} is spent; {self.said()} in which a round may have "
            "been made twice"
        )

    def said(self) -> str:
        return f"{self.repeated} restart{'s' if self.repeated > 1 else ''}"

"""Plans runs to count their costs, for `mixfl costs` and the paper's tables."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from mixfl.measure.costs import Costs
from mixfl.measure.costs import costs as count
from mixfl.runs.plan import plan
from mixfl.tasks import find

ALGORITHMS = ("baseline", "pt", "1wgt", "2wgt")


def costs(
    task: str, preset: str | None, data: str | None, given: Mapping[str, Any],
    report=lambda *_: None, algorithms: Sequence[str] = ALGORITHMS,
) -> Costs:  # fmt: skip
    """The costs of algorithms, by default of the paper's four, those that the task allows."""
    if preset is None and "paper" in find(task).presets:
        preset = "paper"
    problems: dict = {}
    plans = [
        plan(
            task, algorithm, preset=preset, data=data, given=given, shared_with=algorithms,
            problems=problems,
        )
        for algorithm in algorithms
    ]  # fmt: skip
    return count(plans, report)


@functools.cache
def paper_costs(task: str, data: str | None) -> Costs:
    """The costs at the paper's settings."""
    return costs(task, "paper", data, {})

"""Plans the runs whose costs `mixfl costs` and the paper's tables show."""

import functools
from collections.abc import Mapping
from typing import Any

from mixfl.measure.costs import Costs
from mixfl.measure.costs import costs as count
from mixfl.runs.plan import plan
from mixfl.tasks import find

ALGORITHMS = ("baseline", "pt", "1wgt", "2wgt")


def costs(
    task: str, preset: str | None, data: str | None, given: Mapping[str, Any],
    report=lambda *_: None,
) -> Costs:  # fmt: skip
    """Of the paper's four algorithms, as far as the task has them."""
    if preset is None and "paper" in find(task).presets:
        preset = "paper"
    problems: dict = {}
    plans = [
        plan(
            task, algorithm, preset=preset, data=data, given=given, shared_with=ALGORITHMS,
            problems=problems,
        )
        for algorithm in ALGORITHMS
    ]  # fmt: skip
    return count(plans, report)


@functools.cache
def paper_costs(task: str, data: str | None) -> Costs:
    """At the paper's settings."""
    return costs(task, "paper", data, {})

"""Several algorithms on the same cohorts and seeds, and a table of how they ended."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.engine import processes
from mixfl.engine.preflight import preflight
from mixfl.errors import Diverged
from mixfl.intervals import half_width
from mixfl.runs.config import Plan
from mixfl.runs.progress import SHOWN, Quiet, number
from mixfl.runs.training import run

PLOT = "comparison.png"


@dataclass
class Outcome:
    """How an algorithm's trials ended."""

    algorithm: str
    trials: list[list[dict[str, Any]]] = field(default_factory=list)  # rows of metrics
    diverged: list[int] = field(default_factory=list)  # rounds

    def final(self, metric: str) -> np.ndarray:
        values = [t[-1].get(metric) for t in self.trials if t]
        return np.array([v for v in values if v is not None], float)


def compare(
    plans: Sequence[Plan], out: Path, trials: int, resume: bool, report: Quiet
) -> list[Outcome]:
    """Trial k has the seed of the settings plus k, the same for every algorithm."""
    with processes.Together():
        for plan in plans:  # every mistake shows before the first run begins
            preflight(plan.problem, plan.settings, bool(plan.simulator().tables))
    outcomes = []
    for plan in plans:
        outcome = Outcome(plan.recipe.id)
        for k in range(trials):
            seed = plan.settings.seed + k
            trial = dataclasses.replace(
                plan, settings=dataclasses.replace(plan.settings, seed=seed)
            )
            where = out / plan.recipe.id
            label = plan.recipe.id
            if trials > 1:
                where, label = where / f"seed{seed}", f"{label} {k + 1}/{trials}"
            try:
                outcome.trials.append(run(trial, where, resume, report, label).metrics)
            except Diverged as error:
                outcome.diverged.append(error.round)
                report.note(str(error))
        outcomes.append(outcome)
    return outcomes


def shown_metrics(outcomes: Sequence[Outcome]) -> list[str]:
    """The metrics worth a column: the best known ones, or the first few that there are."""
    found = [k for o in outcomes for t in o.trials if t for k in t[-1]]
    known = [k for k in SHOWN if k in found]
    return known or list(dict.fromkeys(k for k in found if k.startswith(("eval/", "train/"))))[:3]


def rows(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table."""
    metrics = shown_metrics(outcomes)
    header = [
        "algorithm",
        *(m.removeprefix("eval/") for m in metrics),
        "ms/round",
        "KB down",
        "KB up",
    ]
    cells = []
    for o in outcomes:
        row = [o.algorithm]
        for m in metrics:
            values = o.final(m)
            if o.diverged:
                row.append(f"diverged at round {min(o.diverged)}")
            elif not len(values):
                row.append("-")
            elif len(values) == 1:
                row.append(number(values[0]))
            else:
                row.append(f"{number(values.mean())} ± {number(half_width(values))}")
        for key, scale in (("time/round_ms", 1), ("comm/down_bytes", 1e3), ("comm/up_bytes", 1e3)):
            values = o.final(key)
            row.append(f"{values.mean() / scale:.3g}" if len(values) else "-")
        cells.append(row)
    return header, cells

"""Runs several algorithms on the same cohorts and seeds, and tabulates the results."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.engine import processes
from mixfl.engine.preflight import preflight
from mixfl.errors import Diverged, MixflError
from mixfl.report.over_clients import of_clients, worst
from mixfl.report.style import metric_title
from mixfl.runs.plan import Plan
from mixfl.runs.sinks.base import Quiet
from mixfl.runs.training import run
from mixfl.runs.wording import SHOWN, number
from mixfl.studies.trials import Done, Trial
from mixfl.theory.intervals import half_width

PLOT = "comparison.png"


@dataclass
class Outcome:
    """How an algorithm's trials ended."""

    algorithm: str
    trials: list[list[dict[str, Any]]] = field(default_factory=list)  # rows of metrics
    diverged: list[int] = field(default_factory=list)  # rounds
    failed: int = 0  # trials whose process died

    def add(self, done: Done) -> None:
        if done.status == "diverged":
            self.diverged.append(done.round)
        elif done.status == "failed":
            self.failed += 1
        else:
            self.trials.append(done.rows)

    def cell(self, metric: str) -> str:
        """A table cell: mean ± half of the 95 % interval, or that trials diverged or failed."""
        values, diverged = self.final(metric), self.diverged
        count = len(diverged) + len(self.trials) + self.failed
        if diverged:
            several = f"{len(diverged)} of {count} " if len(diverged) < count else ""
            return f"{several}diverged at round {min(diverged)}"
        if self.failed:
            return f"{self.failed} of {count} failed"
        if not len(values):
            return "-"
        half = f" ± {number(half_width(values))}" if len(values) > 1 else ""
        return number(values.mean()) + half

    def final(self, metric: str) -> np.ndarray:
        values = [t[-1].get(metric) for t in self.trials if t]
        return np.array([v for v in values if v is not None], float)


def outcomes(ended: Sequence[Done]) -> list[Outcome]:
    """The outcomes of finished trials, by algorithm."""
    by_algorithm: dict[str, Outcome] = {}
    for one in ended:
        outcome = by_algorithm.setdefault(one.trial.id, Outcome(one.trial.id))
        outcome.add(one)
    return list(by_algorithm.values())


def planned_trials(
    plans: Sequence[Plan], trials: int, given: dict[str, Any], **more
) -> list[Trial]:
    """The runs of a comparison, one folder each. The seed of trial k is the settings' seed plus k,
    for every algorithm."""
    planned = []
    for plan in plans:
        for k in range(trials):
            seed = plan.settings.seed + k
            folder, label = plan.recipe.id, plan.recipe.id
            if trials > 1:
                folder, label = f"{folder}/seed{seed}", f"{label} {k + 1}/{trials}"
            keys = {a: v for a, v in given.items() if a in {*plan.recipe.uses, *plan.options}}
            planned.append(
                Trial(
                    plan.task, plan.recipe.name, folder, label, plan.preset, plan.data,
                    {**keys, "seed": seed}, **more,
                )
            )  # fmt: skip
    return planned


def check_ids(plans: Sequence[Plan]) -> None:
    """Algorithms are told apart by their ids, also by those of own ones."""
    ids = [plan.recipe.id for plan in plans]
    for plan in plans:
        if ids.count(plan.recipe.id) > 1:
            raise MixflError(
                f"two of the algorithms have the id '{plan.recipe.id}': give one another id."
            )


def check(plans: Sequence[Plan]) -> None:
    """Report mistakes before the first run begins."""
    with processes.Together():
        for plan in plans:
            preflight(plan.problem, plan.settings, bool(plan.simulator().forms.tables))


def compare(
    plans: Sequence[Plan], out: Path, trials: int, resume: bool, report: Quiet,
    track: str | None = None,
) -> list[Outcome]:  # fmt: skip
    """One run after the other, in this process. Seeds as in `planned_trials`."""
    check(plans)
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
                outcome.trials.append(run(trial, where, resume, report, label, track).metrics)
            except Diverged as error:
                outcome.diverged.append(error.round)
                report.note(str(error))
        outcomes.append(outcome)
    return outcomes


def shown_metrics(outcomes: Sequence[Outcome]) -> list[str]:
    """The metrics worth a column: the best-known ones, or else the first few."""
    metrics = [k for o in outcomes for t in o.trials if t for k in t[-1]]
    known = [k for k in SHOWN if k in metrics]
    others = [k for k in metrics if k.startswith(("eval/", "train/")) and not of_clients(k)]
    return [*(known or list(dict.fromkeys(others))[:3]), *worst(metrics)]


def rows(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table."""
    metrics = shown_metrics(outcomes)
    header = [
        "algorithm",
        *(metric_title(m) if of_clients(m) else m.removeprefix("eval/") for m in metrics),
        "ms/round",
        "KB down",
        "KB up",
    ]
    cells = []
    for o in outcomes:
        row = [o.algorithm, *(o.cell(m) for m in metrics)]
        for key, scale in (("time/round_ms", 1), ("comm/down_bytes", 1e3), ("comm/up_bytes", 1e3)):
            values = o.final(key)
            row.append(f"{values.mean() / scale:.3g}" if len(values) else "-")
        cells.append(row)
    return header, cells

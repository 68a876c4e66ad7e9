"""`mixfl sweep`: tries settings, chooses on validation data and reports on test data."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.errors import MixflError
from mixfl.metrics import lower_is_better
from mixfl.runs.folder import write_whole
from mixfl.studies.compare import Outcome, shown_metrics
from mixfl.studies.trials import Done, Trial
from mixfl.theory.intervals import half_width

RESULTS = "sweep.json"
CHOSEN_BY = ("auc", "accuracy", "recall@10", "loss")  # without --by, the first of these that exists


@dataclass
class Setting:
    algorithm: str
    keys: Mapping[str, Any]
    outcome: Outcome

    @property
    def name(self) -> str:
        return f"{self.algorithm}, " + ", ".join(f"{k} = {v}" for k, v in self.keys.items())


def grid(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def folder_name(keys: Mapping[str, Any]) -> str:
    return re.sub(r"[^\w.=,+@-]", "_", ",".join(f"{k}={v}" for k, v in keys.items()))


def planned_trials(
    task: str, algorithms: Mapping[str, str], over: Mapping[str, Sequence[Any]], trials: int,
    seed: int, given: Mapping[str, Any], **more: Any,
) -> list[Trial]:  # fmt: skip
    """`algorithms`: what finds each, and its id. Every setting has the same seeds, so that settings
    are compared on the same cohorts. All settings get their first trial before any gets its
    second."""
    planned = []
    for k in range(trials):
        for algorithm, id in algorithms.items():
            for keys in grid(over):
                name = folder_name(keys)
                planned.append(
                    Trial(
                        task, algorithm, f"{id}/{name}/seed{seed + k}",
                        f"{id} {name} {k + 1}/{trials}",
                        keys={**given, **keys, "seed": seed + k}, **more,
                    )
                )  # fmt: skip
    return planned


def settings(ended: Sequence[Done], over: Mapping[str, Sequence[Any]]) -> list[Setting]:
    by_place: dict[tuple, Setting] = {}
    for done in ended:
        keys = {k: done.trial.keys[k] for k in over}
        place = (done.trial.algorithm, *keys.values())
        if place not in by_place:
            by_place[place] = Setting(done.trial.id, keys, Outcome(done.trial.id))
        by_place[place].outcome.add(done)
    return list(by_place.values())


@dataclass
class Choice:
    metric: str  # that decided
    validated: bool  # on validation data, or on the test data itself
    best: Setting | None  # None: all diverged


def choose(settings: Sequence[Setting], by: str | None) -> Choice:
    """The setting with the best mean after training, among those whose trials all finished."""
    keys = {k for s in settings for t in s.outcome.trials if t for k in t[-1]}
    prefix = "valid/" if any(k.startswith("valid/") for k in keys) else "eval/"
    wanted = [by.removeprefix("valid/").removeprefix("eval/")] if by else CHOSEN_BY
    metric = next((prefix + m for m in wanted if prefix + m in keys), None)
    if metric is None:
        if not keys:
            return Choice(prefix + wanted[0], prefix == "valid/", None)
        known = sorted(k.removeprefix(prefix) for k in keys if k.startswith(prefix))
        raise MixflError(f"--by {by}: no such metric. There are: {', '.join(known) or 'none'}.")
    good = [s for s in settings if not s.outcome.diverged and not s.outcome.failed]
    whole = [s for s in good if len(s.outcome.final(metric))]
    sign = -1 if lower_is_better(metric) else 1
    best = max(whole, key=lambda s: sign * s.outcome.final(metric).mean(), default=None)
    return Choice(metric, prefix == "valid/", best)


def table(settings: Sequence[Setting], choice: Choice) -> tuple[list[str], list[list[str]]]:
    tested = shown_metrics([s.outcome for s in settings])
    metrics = ([choice.metric] if choice.validated else []) + tested
    header = [
        "setting",
        *(m.replace("eval/", "test ").replace("valid/", "valid ") for m in metrics),
    ]
    rows = [
        [("* " if s is choice.best else "  ") + s.name, *(s.outcome.cell(m) for m in metrics)]
        for s in settings
    ]
    return header, rows


def verdict(settings: Sequence[Setting], choice: Choice) -> list[str]:
    if choice.best is None:
        if any(s.outcome.failed for s in settings):
            return ["No setting was finished and finite in all trials."]
        return ["No setting was finite in all trials: lower client_lr."]
    on = "validation data" if choice.validated else "the test data itself (there is no other)"
    best = choice.best
    tested = shown_metrics([best.outcome])
    figures = ", ".join(f"{m.removeprefix('eval/')} {best.outcome.cell(m)}" for m in tested)
    return [f"* chosen on {on}, by {choice.metric}: {best.name}", f"  on test data: {figures}"]


def save(settings: Sequence[Setting], choice: Choice, out: Path) -> None:
    rows = []
    for s in settings:
        ends = [t[-1] for t in s.outcome.trials if t]
        metrics = sorted({k for end in ends for k in end if k.startswith(("eval/", "valid/"))})
        values = {m: s.outcome.final(m) for m in metrics}
        rows.append({
            "algorithm": s.algorithm, "keys": dict(s.keys), "trials": len(s.outcome.trials),
            "diverged_at": s.outcome.diverged, "failed": s.outcome.failed,
            "chosen": s is choice.best,
            "metrics": {
                m: {"mean": float(v.mean()), "half_width_95": none_if_nan(half_width(v))}
                for m, v in values.items() if len(v)
            },
        })  # fmt: skip
    content = {"chosen_by": choice.metric, "settings": rows}
    write_whole(out / RESULTS, (json.dumps(content, indent=1) + "\n").encode())


def none_if_nan(value: float) -> float | None:
    return None if np.isnan(value) else value

"""A study is a short TOML file: the runs to make, what to show of them under the paper's labels,
and the claims that they decide. docs/experiments.md explains how to write one.

    title, task, text
    [quick], [full]       preset, trials, keys; round_ms on one core, for the estimate
    [quick.real]          changes if --data has the task's data
    [[series]]            algorithms, keys, over (values to try), zip; more under quick, full
    [[show]]              label, kind (curves, final, table, costs, bounds), and its content
    [[claim]]             number, says, checks (claims.py)

A run that several studies show is made once: its folder is named by all that it depends on.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mixfl.algorithms import recipe
from mixfl.errors import MixflError, unknown
from mixfl.runs.plan import chosen_keys
from mixfl.settings import KEYS
from mixfl.studies.schema import check
from mixfl.studies.trials import Trial
from mixfl.tasks import find, read_toml

STUDIES = Path(__file__).parent / "toml"
SCALES = ("quick", "full")
FOLDERS = {"smile": ("smile", "celeba"), "text": ("text",), "movie": ("movie", "movielens")}
COMPILE_SECONDS = 4  # of a setting's first run on one core, for the estimate


@dataclass(frozen=True)
class Setting:
    """One line of a study: an algorithm with its keys."""

    name: str  # the algorithm and the values tried: "1wgt central_batch=25"
    algorithm: str
    keys: Mapping[str, Any]
    trials: Sequence[Trial]


@dataclass(frozen=True)
class Study:
    """A study file, at a scale and on a data set."""

    id: str
    title: str
    text: str
    task: str
    data: str  # shown to the reader: "smile, synthetic"
    settings: Sequence[Setting]
    shows: Sequence[Mapping[str, Any]]
    claims: Sequence[Mapping[str, Any]]
    round_ms: float = 0.0
    bounds: Mapping[str, Any] = field(default_factory=dict)
    real: str | None = None  # the task's data, if not synthetic
    alone: bool = False  # made only if it is asked for

    def costs(self) -> Any:
        """What `mixfl costs` says about the task at the paper's settings."""
        from mixfl.studies.costs import paper_costs

        return paper_costs(self.task, self.real)

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(show["label"] for show in self.shows))

    def trials(self) -> list[Trial]:
        return [t for s in self.settings for t in s.trials]

    def named(self, patterns: str | Sequence[str] | None) -> list[Setting]:
        """The settings whose names match; all if None."""
        if patterns is None:
            return list(self.settings)
        wanted = [patterns] if isinstance(patterns, str) else patterns
        matches = [s for p in wanted for s in self.settings if fnmatchcase(s.name, p)]
        for pattern in wanted:
            if not any(fnmatchcase(s.name, pattern) for s in self.settings):
                raise unknown(f"series of the study {self.id}", pattern, self.names())
        return matches

    def names(self) -> list[str]:
        return [s.name for s in self.settings]


def seconds(trial: Trial, round_ms: float) -> float:
    return trial.rounds() * round_ms / 1000


def files() -> list[Path]:
    """The studies in the paper's order: file names begin with a number."""
    return sorted(STUDIES.glob("*.toml"))


def read(path: Path, scale: str, data: Path | None) -> Study:
    content = read_toml(path)
    check(content, path)
    task = place(content.get("task", ""), path)
    real = real_data(task, data)
    at = scaled(content, scale, real)
    settings = [
        setting
        for series in content.get("series", [])
        for setting in expand(
            with_places(series, path) | scaled(series, scale, real),
            at,
            place(series.get("task", task), path),
            real,
        )
    ]
    names = [s.name for s in settings]
    if len(set(names)) < len(names):
        raise MixflError(f"{path}: two series have the same name: give one of them a `name`.")
    title = content.get("data", task)
    return Study(
        path.stem.lstrip("0123456789_"), content["title"], content.get("text", ""), task,
        f"{title}, {'real' if real else 'synthetic'}" if title else "theory",
        settings, content.get("show", []), content.get("claim", []), at.get("round_ms", 0.0),
        content.get("bounds", {}), real, content.get("alone", False),
    )  # fmt: skip


def scaled(table: Mapping[str, Any], scale: str, real: str | None) -> dict[str, Any]:
    """The changes for the scale, and for real data if there is any."""
    at = dict(table.get(scale, {}))
    more = at.pop("real", {})
    return at | more if real is not None else at


def place(name: str, study: Path) -> str:
    """A task or an algorithm, with the path of a user's file taken relative to the study's."""
    return str(study.parent / name) if ".py" in name else name


def with_places(series: Mapping[str, Any], study: Path) -> dict[str, Any]:
    return {**series, "algorithms": [place(a, study) for a in series["algorithms"]]}


def real_data(task: str, data: Path | None) -> str | None:
    """The task's folder in --data, if there is one."""
    if data is None:
        return None
    for name in FOLDERS.get(task, ()):
        if (data / name).is_dir():
            return str(data / name)
    return None


def expand(
    series: Mapping[str, Any], at: Mapping[str, Any], task: str, real: str | None
) -> list[Setting]:
    """One setting for each algorithm and each value tried."""
    over = series.get("over", {})
    several = (
        zip(*over.values(), strict=True) if series.get("zip") else itertools.product(*over.values())
    )
    settings = []
    for values in several:
        tried = dict(zip(over, values, strict=True))
        for algorithm in series["algorithms"]:
            id = recipe(algorithm).id
            shown = " ".join(f"{k}={plain(v)}" for k, v in tried.items())
            name = " ".join(filter(None, [id, series.get("name", ""), shown]))
            keys = {**at.get("keys", {}), **series.get("keys", {}), **tried}
            trials = series.get("trials", at.get("trials", 3))
            settings.append(
                Setting(
                    name, id, keys,
                    made_trials(task, algorithm, at.get("preset"), real, keys, name, trials),
                )
            )  # fmt: skip
    return settings


def plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def made_trials(task, algorithm, preset, data, keys, name, count) -> list[Trial]:
    id = recipe(algorithm).id
    used = {*recipe(algorithm).uses, *find(task).options}
    known = {*KEYS, *used}
    for key in keys:
        if key not in known:
            raise unknown("key", key, known, f"`mixfl keys {task}`")
    keys = {k: v for k, v in keys.items() if k in used}
    every = chosen_keys(task, algorithm, preset, {}, keys)
    spec = json.dumps([task, data, {k: every[k] for k in every if k in used}], sort_keys=True)
    digest = hashlib.sha256(spec.encode()).hexdigest()[:8]
    short = Path(task.split(":")[-1]).name
    return [
        Trial(
            task, algorithm, f"{short}-{id}-{digest}/seed{seed}",
            f"{short} {name} {seed + 1}/{count}", preset, data, {**keys, "seed": seed},
        )
        for seed in range(count)
    ]  # fmt: skip


def estimate(studies: Sequence[Study], jobs: int, over: Collection[str] = ()) -> float:
    """Seconds for the runs of all studies, each counted once, without the folders in `over`."""
    runs = {
        t.folder: seconds(t, s.round_ms)
        for s in studies
        for t in s.trials()
        if t.folder not in over
    }
    settings = {folder.split("/")[0] for folder in runs}
    return (sum(runs.values()) + COMPILE_SECONDS * len(settings)) / jobs


def words(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{math.ceil(seconds / 86400)} days"

"""A study is a short TOML file: the runs to make, what to show of them under the paper's labels,
and the claims that they decide. docs/experiments.md explains how to write one.

    title, task, text
    version               of the protocol: what is run and judged (protocol.py)
    new_data              true: every trial draws its own synthetic data
    [quick], [full]       preset, trials, keys; round_ms on one core, for the estimate
    [quick.real]          changes if --data has the task's data
    [[series]]            algorithms, keys, over (values to try), zip, preset; quick, full: more
    [[show]]              label, kind (curves, final, table, costs, bounds), and its content
    [[claim]]             number, says, checks (claims.py)

`trials` is a number, or the looks at which more trials may be added ([5, 10, 15, 20]). A run that
several studies show is made once: its folder is named by all that it depends on. Another version of
a study has other seeds, so results that were seen before can't decide it.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from mixfl.algorithms import recipe
from mixfl.errors import MixflError, unknown
from mixfl.runs.plan import chosen_keys
from mixfl.settings import KEYS
from mixfl.studies.protocol import digest, study_id
from mixfl.studies.schema import check
from mixfl.studies.setting import departures, scaled
from mixfl.studies.trials import Trial
from mixfl.tasks import find, read_toml

STUDIES = Path(__file__).parent / "toml"
SCALES = ("quick", "full")
FOLDERS = {"smile": ("smile", "celeba"), "text": ("text",), "movie": ("movie", "movielens")}
SEEDS = 1000  # for each version of a study
COMPILE_SECONDS = 4  # of a setting's first run on one core, for the estimate


@dataclass(frozen=True)
class Setting:
    """One line of a study: an algorithm with its keys."""

    name: str  # the algorithm and the values tried: "1wgt central_batch=25"
    algorithm: str
    keys: Mapping[str, Any]
    trials: Sequence[Trial]  # that are wanted now
    every: Sequence[Trial] = ()  # up to the last look
    data: str = ""  # if its series has a task of its own: "movie, synthetic"
    departs: Sequence[str] = ()  # from the paper's settings


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
    version: int = 1
    digest: str = ""  # of what is run and judged
    looks: Sequence[int] = ()  # numbers of trials at which claims are judged; (): all at once

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

    def grown(self, names: Collection[str]) -> "Study":
        """With the trials up to the next look, for the settings of these names."""

        def more(setting: Setting) -> Setting:
            count = next((n for n in self.looks if n > len(setting.trials)), None)
            if count is None or setting.name not in names:
                return setting
            return replace(setting, trials=setting.every[:count])

        return replace(self, settings=[more(s) for s in self.settings])


def seconds(trial: Trial, round_ms: float) -> float:
    return trial.rounds() * round_ms / 1000


def files() -> list[Path]:
    """The studies in the paper's order: file names begin with a number."""
    return sorted(STUDIES.glob("*.toml"))


def read(path: Path, scale: str, data: Path | None, trials: int | None = None) -> Study:
    """With a number of `trials`, that many for every series, and one look."""
    content = read_toml(path)
    check(content, path)
    version = content.get("version", 1)
    task = place(content.get("task", ""), path)
    real = real_data(task, data)
    fixed = {"trials": trials} if trials else {}
    more = {"first": SEEDS * (version - 1), "new_data": content.get("new_data", False)}
    real_of = partial(real_data, data=data)
    settings = []
    for series in content.get("series", []):
        own = place(series.get("task", task), path)
        found = real_data(own, data)
        whole = with_places(series, path) | scaled(series, scale, found) | fixed
        departs = partial(departures, content, series, scale=scale, real=real_of)
        settings += expand(
            whole, scaled(content, scale, found) | fixed | more, own, found,
            departs if scale in content else None,
        )  # fmt: skip
    at = {"trials": 3} | scaled(content, scale, real) | fixed
    names = [s.name for s in settings]
    if len(set(names)) < len(names):
        raise MixflError(f"{path}: two series have the same name: give one of them a `name`.")
    title = content.get("data", task)
    return Study(
        study_id(path), content["title"], content.get("text", ""), task,
        f"{title}, {'real' if real else 'synthetic'}" if title else "theory",
        settings, content.get("show", []), content.get("claim", []), at.get("round_ms", 0.0),
        content.get("bounds", {}), real, content.get("alone", False), version,
        digest(content, path), at["trials"] if isinstance(at["trials"], list) else (),
    )  # fmt: skip


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
    series: Mapping[str, Any], at: Mapping[str, Any], task: str, real: str | None,
    departs: Callable[[str], list[str]] | None,
) -> list[Setting]:  # fmt: skip
    """One setting for each algorithm and each value tried."""
    over = series.get("over", {})
    label = f"{task}, {'real' if real else 'synthetic'}" if series.get("task") in FOLDERS else ""
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
            counts = series.get("trials", at.get("trials", 3))
            first, last = (counts[0], counts[-1]) if isinstance(counts, list) else [counts] * 2
            every = made_trials(
                task, algorithm, series.get("preset", at.get("preset")), real, keys, name,
                range(at["first"], at["first"] + last), at["new_data"],
            )  # fmt: skip
            other = departs(algorithm) if departs else ()
            settings.append(Setting(name, id, keys, every[:first], every, label, other))
    return settings


def plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def made_trials(task, algorithm, preset, data, keys, name, seeds, new_data=False) -> list[Trial]:
    id = recipe(algorithm).id
    used = {*recipe(algorithm).uses, *find(task).options}
    known = {*KEYS, *used}
    for key in keys:
        if key not in known and "." not in key:  # one with a dot is a population's: the run checks
            raise unknown("key", key, known, f"`mixfl keys {task}`")
    keys = {k: v for k, v in keys.items() if k in used or "." in k}
    every = chosen_keys(task, algorithm, preset, {}, keys)
    # Wherever the data and the problem's file are: folders may move to another machine.
    counted = {k: every[k] for k in every if k in used or "." in k}
    spec: list[Any] = [Path(task).name, "real" if data else None, counted]
    varied = new_data and data is None and "data_seed" in used - set(keys)
    spec += ["new data"] if varied else []
    idle = find(task).synthetic if data else frozenset()  # they count, for the folder's name alone
    keys = {k: v for k, v in keys.items() if k not in idle}
    hashed = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:8]
    short = Path(task.split(":")[-1]).name

    def seeded(seed: int) -> dict[str, int]:
        return {"seed": seed, "data_seed": seed} if varied else {"seed": seed}

    return [
        Trial(
            task, algorithm, f"{short}-{id}-{hashed}/seed{seed}",
            f"{short} {name} {i + 1}/{len(seeds)}", preset, data, {**keys, **seeded(seed)},
        )
        for i, seed in enumerate(seeds)
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

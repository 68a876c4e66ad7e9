"""A document about the runs in some folders, whichever command made them."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mixfl
from mixfl.errors import MixflError, unknown
from mixfl.report.document import Curves, Document, Section, Series, Trial
from mixfl.report.means import final_table, value
from mixfl.report.over_clients import of_clients, worst
from mixfl.report.over_clients import parts as over_clients
from mixfl.report.spent import parts as spent
from mixfl.report.style import NAMES
from mixfl.runs.folder import read_metrics, read_status
from mixfl.runs.wording import SHOWN
from mixfl.tasks import PYTHON, read_toml

# Keys that decide how a run is computed, not what: trials of one setting may differ in them.
MACHINE = ("version", "format", "devices", "cohort_chunk", "central_chunk", "checkpoint_every")
APART = ("seed", "algorithm_from", *MACHINE)
MOST = 6  # panels in a chart
REPRODUCED = "reproduce.json"  # marks a folder of `mixfl reproduce`


def document(folders: Sequence[Path]) -> Document:
    trials, notes = [], []
    for folder in folders:
        paths = _below(folder)
        if not paths:
            raise MixflError(
                f"{folder} holds no run (no config.toml in it or below): give a run folder or the "
                "folder of a comparison, such as runs/smile-2wgt-seed0."
            )
        for path in paths:
            try:
                trials.append(_trial(path))
            except (MixflError, OSError) as error:
                notes.append(f"{path}: damaged and left out. {error}")
    if not trials:
        raise MixflError(f"no run can be read. {' '.join(notes)}")
    trials, repeated = _once(trials)
    notes += repeated
    counts = Counter(t.status.split(" at ")[0] for t in trials)
    facts = [
        ("folders", ", ".join(map(str, folders))),
        ("runs", f"{len(trials)} ({', '.join(f'{n} {s}' for s, n in counts.items())})"),
        ("made by", f"mixfl {mixfl.__version__}"),
    ]
    places: dict[tuple[str, str], list[Trial]] = {}
    for t in trials:
        places.setdefault((t.config["task"], str(t.config.get("data", ""))), []).append(t)
    sections = [_section(task, data, group) for (task, data), group in places.items()]
    title = f"Runs of {', '.join(dict.fromkeys(_short(task) for task, _ in places))}"
    return Document(title, facts, [], sections, notes)


def curves(folders: Sequence[Path], metrics: Sequence[str] = ()) -> Curves:
    """A chart of the runs of one task, with these metrics or the best-known ones."""
    report = document(folders)
    if len(report.sections) > 1:
        titles = ", ".join(s.title for s in report.sections)
        raise MixflError(f"these folders hold runs of {titles}: give folders of one task.")
    (section,) = report.sections
    charts = [part for part in section.parts if isinstance(part, Curves)]
    if not charts:
        raise MixflError("these runs have no metrics yet, so there is nothing to draw.")
    rows = [row for t in report.trials() for row in t.rows]
    known = {k for row in rows for k in row if k != "round" and value(row, k) is not None}
    for metric in metrics:
        if metric not in known:
            raise unknown("metric", metric, known)
    return Curves("", metrics or charts[0].metrics, charts[0].series)


def _below(folder: Path) -> list[Path]:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise MixflError(f"{folder} {what}: give a folder with runs.")
    return sorted(p.parent for p in folder.rglob("config.toml") if p.is_file())


def _trial(path: Path) -> Trial:
    config = read_toml(path / "config.toml")
    for key in ("task", "algorithm"):
        if not isinstance(config.get(key), str):
            raise MixflError(f"Its config.toml names no {key}.")
    status = read_status(path)
    said = str(status.get("status", "unknown"))
    if said == "diverged" and "round" in status:
        said += f" at round {status['round']}"
    rows = {row["round"]: row for row in read_metrics(path)}
    own = ["path.py:problem"] if config["task"].startswith(PYTHON) else []
    command = ["mixfl", "run", *own, "--config", str(path / "config.toml"), "--out", "NEW_FOLDER"]
    return Trial(str(path), config, shlex.join(command), [rows[r] for r in sorted(rows)], said)


def _once(trials: Sequence[Trial]) -> tuple[list[Trial], list[str]]:
    """Drop repeated runs: the same numbers counted twice would make intervals too narrow."""
    kept: dict[str, Trial] = {}
    notes = []
    for t in sorted(trials, key=lambda t: len(t.rows), reverse=True):
        first = kept.setdefault(_key(t.config, MACHINE), t)
        if first is not t and Path(first.name).resolve() != Path(t.name).resolve():
            notes.append(f"{t.name}: the same configuration and seed as {first.name}, left out.")
    return sorted(kept.values(), key=lambda t: t.name), notes


def _key(config: Any, without: Iterable[str]) -> str:
    return json.dumps({k: config[k] for k in sorted(set(config) - set(without))}, default=str)


def _section(task: str, data: str, trials: Sequence[Trial]) -> Section:
    series = _series(trials)
    keys = dict.fromkeys(k for t in trials for row in t.rows for k in row)
    known = [k for k in keys if any(value(row, k) is not None for t in trials for row in t.rows)]
    main = [k for k in SHOWN if k in known]
    main = main or [k for k in known if k.startswith(("eval/", "train/"))][:3]
    others = [k for k in known if k.startswith("eval/") and k not in main and not of_clients(k)]
    parts: list[Any] = [Curves("Over rounds", main, series)] if main else []
    for i in range(0, len(others), MOST):
        title = "Parts of the evaluation" + (f" ({i // MOST + 1})" if len(others) > MOST else "")
        parts.append(Curves(title, others[i : i + MOST], series))
    title = _short(task) + (f", {data}" if data else "")
    parts += over_clients(series, known)
    parts += spent(series)
    return Section(title, [*parts, final_table("After training", series, [*main, *worst(known)])])


def _series(trials: Sequence[Trial]) -> list[Series]:
    """Ordered by algorithm, and named by the keys in which runs of one algorithm differ."""
    groups: dict[str, list[Trial]] = {}
    for t in trials:
        groups.setdefault(_key(t.config, APART), []).append(t)
    order = [*NAMES, *sorted({t.config["algorithm"] for t in trials} - set(NAMES))]
    series = []
    for algorithm in order:
        of_it = [g for g in groups.values() if g[0].config["algorithm"] == algorithm]
        configs = [g[0].config for g in of_it]
        differ = [
            k
            for k in dict.fromkeys(k for c in configs for k in c if k not in APART)
            if len({_key({k: c.get(k)}, ()) for c in configs}) > 1
        ]
        of_it.sort(key=lambda g: [_rank(g[0].config.get(k)) for k in differ])
        for group in of_it:
            said = [f"{k} = {group[0].config.get(k, 'unset')}" for k in differ]
            name = ", ".join([NAMES.get(algorithm, algorithm), *said])
            series.append(Series(name, algorithm, sorted(group, key=lambda t: _seed(t))))
    return series


def _rank(value: Any) -> tuple[bool, float, str]:
    """A sort key: numbers by size, then the rest by name."""
    if isinstance(value, int | float):
        return (False, float(value), "")
    return (True, 0.0, str(value))


def _seed(trial: Trial) -> tuple[bool, float, str]:
    return _rank(trial.config.get("seed"))


def _short(task: str) -> str:
    """The name of path.py:problem without its folders."""
    return task.rsplit("/", 1)[-1].removeprefix(PYTHON)

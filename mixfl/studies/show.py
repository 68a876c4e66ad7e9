"""Turns each [[show]] of a study into parts of the report: charts and tables."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.report.document import Curves, Line, Point, Series, Sweep, Table
from mixfl.report.document import Trial as Shown
from mixfl.report.means import final_table
from mixfl.report.style import NAMES, metric_title
from mixfl.studies.dissimilarity import FIRST, PAPER, SUMMARY
from mixfl.studies.results import Results
from mixfl.studies.study import Setting, Study, plain
from mixfl.studies.trials import Done
from mixfl.tasks import read_toml
from mixfl.theory.intervals import interval


def shown(study: Study, show: Mapping[str, Any], ended: Mapping[str, Done], out: Path) -> list:
    kinds: dict[str, Callable[..., list]] = {
        "curves": curves, "maxima": maxima, "final": final, "table": table, "largest": largest,
        "costs": costs, "bounds": bounds,
    }  # fmt: skip
    return kinds[show["kind"]](study, show, ended, out)


def head(study: Study, show: Mapping[str, Any]) -> dict[str, Any]:
    title = f"{show.get('title', study.title)} ({study.data})"
    return {"title": title, "label": show["label"], "text": show.get("text", "")}


def curves(study, show, ended, out) -> list[Curves]:
    settings = study.named(show.get("series"))
    split = show.get("panel_per")  # one chart per algorithm, as in the paper
    groups = [settings]
    if split == "algorithm":
        ids = dict.fromkeys(s.algorithm for s in settings)
        groups = [[s for s in settings if s.algorithm == a] for a in ids]
    charts = []
    for group in groups:
        about = head(study, show)
        if len(groups) > 1:
            about["title"] += f": {NAMES[group[0].algorithm]}"
        lines = [series(s, ended, out) for s in group]
        charts.append(
            Curves(metrics=show["metrics"], series=lines, log=show.get("log", False), **about)
        )
    return charts


def series(setting: Setting, ended: Mapping[str, Done], out: Path) -> Series:
    trials = []
    for trial in setting.trials:
        done = ended[trial.folder]
        status = f"diverged at round {done.round}" if done.status == "diverged" else done.status
        config = shlex.quote(str(done.folder / "config.toml"))
        command = f"mixfl run --config {config} --out NEW_FOLDER"
        name = str(done.folder.relative_to(out))
        trials.append(
            Shown(name, read_toml(done.folder / "config.toml"), command, done.rows, status)
        )
    return Series(spelt(setting.name, setting.algorithm), setting.algorithm, trials)


def maxima(study, show, ended, out) -> list[Curves]:
    """In every round the largest of all trials: a line for each setting, all in one picture."""
    lines = []
    for setting in study.named(show.get("series")):
        one = series(setting, ended, out)
        name = f"{len(one.trials)} trials of {setting.name}: the largest"
        rows = largest_rows([t.rows for t in one.trials], show["metrics"])
        first = replace(one.trials[0], name=name, rows=rows)
        lines.append(Series(one.name, one.algorithm, [first]))
    about = head(study, show)
    return [Curves(metrics=show["metrics"], series=lines, log=show.get("log", False), **about)]


def largest_rows(trials, metrics) -> list[dict[str, float]]:
    """Of the rounds that all trials have."""
    each = [{row["round"]: row for row in rows} for rows in trials]
    shared = sorted(set.intersection(*map(set, each)))
    known = [r for r in shared if all(t[r].get(m) is not None for t in each for m in metrics)]
    return [{"round": r, **{m: max(t[r][m] for t in each) for m in metrics}} for r in known]


def spelt(name: str, algorithm: str) -> str:
    """A setting's name with the algorithm spelled out."""
    return name.replace(algorithm, NAMES.get(algorithm, algorithm), 1)


def final(study, show, ended, out) -> list[Sweep]:
    """A metric after training against a key, or against another metric, such as comm/up_bytes.
    Series of `flat`, without the key, go across."""
    results, key = Results(study, ended), show["key"]
    measured = "/" in key
    settings = study.named(show.get("series"))
    flat = study.named(show["flat"]) if "flat" in show else []

    def place(setting) -> float:
        if measured:
            return float(np.nanmean(results.values(setting, key, "end")))
        return float(setting.keys[key])

    def line(setting) -> str:
        if measured:
            return re.sub(r" \w+=\S+", "", setting.name)
        return setting.name.replace(f" {key}={plain(setting.keys[key])}", "")

    values = [place(s) for s in settings]
    lines: dict[tuple[str, str], list[Point]] = {}
    for setting, x in zip(settings, values, strict=True):
        at = lines.setdefault((line(setting), setting.algorithm), [])
        at.append(point(results, setting, show, x))
    for setting in flat:
        ends = min(values), max(values)
        lines[setting.name, setting.algorithm] = [point(results, setting, show, x) for x in ends]
    settings = [*settings, *flat]
    drawn = [Line(spelt(n, a), a, sorted(p, key=lambda p: p.x)) for (n, a), p in lines.items()]
    behind = [series(s, ended, out) for s in settings]
    more = dict(log=show.get("log", False), series=behind, **head(study, show))
    return [Sweep(x=key, y=show["metric"], lines=drawn, **more)]


def point(results: Results, setting: Setting, show: Mapping[str, Any], x: float) -> Point:
    values = results.values(setting, show["metric"], show.get("at", "end"))
    good = values[~np.isnan(values)]
    gone = len(values) - len(good)
    note = f"{gone} of {len(values)} trials diverged" if gone else ""
    mean, low, high = interval(good) if len(good) else (None, None, None)
    if len(good) < 2:
        low = high = None
    return Point(x, mean, low, high, note)


def table(study, show, ended, out) -> list[Table]:
    """Values after training, and costs per round."""
    lines = [series(s, ended, out) for s in study.named(show.get("series"))]
    about = head(study, show)
    return [final_table(about.pop("title"), lines, show["metrics"], **about)]


def largest(study, show, ended, out) -> list[Table]:
    """The paper's Table 2, a column for each setting: what was trained, and the largest values over
    rounds and trials, with the paper's for comparison."""
    results = Results(study, ended)
    settings = study.named(show.get("series"))
    columns = []
    for setting in settings:
        first = setting.trials[0]
        config = read_toml(ended[first.folder].folder / "config.toml")
        model, *terms = SUMMARY.get(first.task, ("-",) * 5)
        w_f, w_c = (str(config.get(key, "-")) for key in ("w_f", "w_c"))
        column = [model, *terms[:2], w_f, *terms[2:], w_c]
        theirs = dict(zip(("theory/g2", "theory/b2"), PAPER.get(first.task, ()), strict=False))
        for metric in show["metrics"]:
            ours = results.values(setting, metric, "largest").max()
            column += [f"{ours:.4g}", f"{theirs[metric]:g}" if metric in theirs else "-"]
        columns.append(column)
    names = ["model", "federated data", "federated loss", "w_f", "central data", "central loss"]
    names.append("w_c")
    for metric in show["metrics"]:
        names += [f"largest {metric_title(metric)}, from round {FIRST}", "the paper's"]
    header = ["", *(spelt(s.name, s.algorithm) for s in settings)]
    rows = [list(row) for row in zip(names, *columns, strict=True)]
    return [Table(header=header, rows=rows, **head(study, show))]


def costs(study, show, ended, out) -> list[Table]:
    from mixfl.measure import costs as counting

    counted = study.costs()
    every = counting.tables(counted)
    about = head(study, show)
    picked = [every[i] for i in show["tables"]]
    text = " ".join([about.pop("text"), *counting.notes(counted)]).strip()
    label = about["label"]
    return [
        Table(title=title, header=header, rows=rows, label=label, text=text if i == 0 else "")
        for i, (title, header, rows) in enumerate(picked)
    ]


def bounds(study, show, ended, out) -> list[Table]:
    from mixfl.theory import tables as theory

    symbols = dict(sigma_f2=0.0, mu=0.0, G2=0.0, B2=1.0, D2=None, F=None, eta_s=1.0, eta_m=1.0)
    entries = theory.bounds(**{**symbols, **study.bounds})
    title, header, rows = theory.tables(entries)[show["table"]]
    columns = [header.index(c) for c in show["columns"]]
    about = head(study, show) | {"title": show.get("title", title)}
    given = ", ".join(f"{k} = {v:g}" for k, v in study.bounds.items())
    about["text"] = f"{about['text']} For {given}.".strip()
    cells = [[row[c] for c in columns] for row in rows]
    return [Table(header=[header[c] for c in columns], rows=cells, **about)]

"""`mixfl reproduce`: the paper's tables, figures and claims, from the runs of studies."""

import datetime
import json
import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import mixfl
from mixfl.errors import MixflError, unknown
from mixfl.report.document import (
    Curves,
    Document,
    Finding,
    Line,
    Point,
    Section,
    Series,
    Sweep,
    Table,
)
from mixfl.report.document import Trial as Shown
from mixfl.report.from_runs import REPRODUCED
from mixfl.report.means import final_table
from mixfl.report.style import NAMES, metric_title
from mixfl.runs.folder import write_whole
from mixfl.studies import study as studies
from mixfl.studies.claims import Results, decide
from mixfl.studies.dissimilarity import FIRST, PAPER
from mixfl.studies.progress import Board
from mixfl.studies.study import Setting, Study
from mixfl.studies.trials import Crew, Done, Trial, done
from mixfl.tasks import read_toml
from mixfl.theory.intervals import interval

RUNS = "runs"


def is_file(id: str) -> bool:
    """Whether the id is the path of a user's study file."""
    return id.endswith(".toml")


def chosen(ids: Sequence[str], scale: str, data: Path | None) -> list[Study]:
    """The studies with these labels, names or files; without ids, all of the paper's."""
    if scale not in studies.SCALES:
        raise unknown("scale", scale, studies.SCALES)
    every = [studies.read(path, scale, data) for path in studies.files()]
    own = [studies.read(Path(i), scale, data) for i in ids if is_file(i)]
    known = {s.id for s in every} | {label for s in every for label in s.labels}
    for given in ids:
        if given not in known and not is_file(given):
            raise unknown("table or figure", given, [*known, "path.toml"])
    wanted = [s for s in every if not ids or {s.id, *s.labels} & set(ids)] + own
    if data is not None and not any(s.real for s in wanted):
        folders = ", ".join(name for names in studies.FOLDERS.values() for name in names)
        raise MixflError(
            f"--data {data} has none of the folders {folders}: make them with `mixfl data prepare`."
        )
    return wanted


def listed(scale: str, data: Path | None, jobs: int) -> list[list[str]]:
    """Rows of label, title, study and estimated time."""
    every = chosen([], scale, data)
    labels = dict.fromkeys(label for s in every for label in s.labels)
    rows = []
    for label in labels:
        shown = [s for s in every if label in s.labels]
        time = (
            studies.words(studies.estimate(shown, jobs)) if any(s.settings for s in shown) else "-"
        )
        rows.append(
            [label, "; ".join(s.title for s in shown), ", ".join(s.id for s in shown), time]
        )
    return rows


def reproduce(wanted: Sequence[Study], out: Path, crew: Crew, board: Board) -> dict[str, Done]:
    """Make the runs of the studies, each once. Returns them by folder."""
    trials: dict[str, Trial] = {t.folder: t for s in wanted for t in s.trials()}
    # The first trial of every setting, then the second: an early look shows all settings.
    order = sorted(trials.values(), key=lambda t: t.keys["seed"])
    ended = crew.make(order, out / RUNS, board)
    return {d.trial.folder: d for d in ended}


def over(wanted: Sequence[Study], out: Path) -> set[str]:
    """The folders of runs that are done."""
    return {t.folder for s in wanted for t in s.trials() if done(t, out / RUNS)}


def remember(out: Path, ids: Sequence[str], scale: str, data: Path | None) -> None:
    """Save the request, so that `mixfl report` can show the results again."""
    out.mkdir(parents=True, exist_ok=True)
    kept = [os.path.abspath(i) if is_file(i) else i for i in ids]
    file, asked = out / REPRODUCED, {"ids": kept, "scale": scale}
    if data is not None:
        asked["data"] = os.path.abspath(data)
    if file.exists():
        before = json.loads(file.read_bytes())
        for key in ("scale", "data"):
            if before.get(key) != asked.get(key):
                raise MixflError(
                    f"{out} was made with {key} = {before.get(key)}, not {asked.get(key)}: choose "
                    "another --out."
                )
    write_whole(file, (json.dumps(asked) + "\n").encode())


def made(folders: Sequence[Path]) -> Document:
    """A document about the finished studies in a folder of `mixfl reproduce`."""
    (folder,) = folders
    asked = json.loads((folder / REPRODUCED).read_bytes())
    data = Path(asked["data"]) if "data" in asked else None
    wanted = chosen(asked["ids"], asked["scale"], data)
    ended = {t.folder: done(t, folder / RUNS) for s in wanted for t in s.trials()}
    whole = [s for s in wanted if all(ended[t.folder] for t in s.trials())]
    command = ["mixfl", "reproduce", *asked["ids"], "--scale", asked["scale"]]
    command += ["--data", asked["data"]] if data else []
    over = {folder: one for folder, one in ended.items() if one is not None}
    left = [s.title for s in wanted if s not in whole]
    so_far = document(whole, over, folder, shlex.join([*command, "--out", str(folder)]))
    return replace(so_far, notes=[f"Not finished yet: {title}" for title in left])


def document(
    wanted: Sequence[Study], ended: Mapping[str, Done], out: Path, command: str
) -> Document:
    findings: list[Finding] = []
    sections = []
    for study in wanted:
        findings += decide(study, ended)
        parts = [part for show in study.shows for part in shown(study, show, ended, out)]
        sections.append(Section(study.title, parts, study.text))
    facts = [
        ("command", command),
        ("date", datetime.date.today().isoformat()),
        ("machine", f"{processor()}, {os.cpu_count()} cores"),
        ("versions", f"mixfl {mixfl.__version__}, Python {platform.python_version()}"),
        ("runs", str(len(ended))),
    ]
    findings.sort(
        key=lambda f: (not f.number.isdigit(), int(f.number) if f.number.isdigit() else 0)
    )
    return Document("Mixed Federated Learning: the paper's tables and figures", facts, findings,
                    sections)  # fmt: skip


def draw(document: Document, folder: Path) -> None:
    """Save the charts as files for a paper, named by their labels."""
    from mixfl.report.save import save_plot

    parts = [p for s in document.sections for p in s.parts if isinstance(p, Curves) and p.label]
    for part in parts:
        same = [p for p in parts if p.label == part.label]
        number = f"-{same.index(part) + 1}" if len(same) > 1 else ""
        save_plot(part, folder / f"{part.label}{number}.pdf")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def shown(study: Study, show: Mapping[str, Any], ended: Mapping[str, Done], out: Path) -> list:
    kinds: dict[str, Callable[..., list]] = {
        "curves": curves, "final": final, "table": table, "largest": largest, "costs": costs,
        "bounds": bounds,
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


def spelt(name: str, algorithm: str) -> str:
    """A setting's name with the algorithm spelled out."""
    return name.replace(algorithm, NAMES[algorithm], 1)


def final(study, show, ended, out) -> list[Sweep]:
    """A metric after training against a key."""
    results, key, metric = Results(study, ended), show["key"], show["metric"]
    settings = study.named(show.get("series"))
    lines: dict[tuple[str, str], list[Point]] = {}
    for setting in settings:
        values = results.values(setting, metric, show.get("at", "end"))
        name = setting.name.replace(f" {key}={studies.plain(setting.keys[key])}", "")
        good = values[~np.isnan(values)]
        note = f"{len(values) - len(good)} of {len(values)} trials diverged" * (
            len(good) < len(values)
        )
        mean, low, high = interval(good) if len(good) else (None, None, None)
        if len(good) < 2:
            low = high = None
        point = Point(float(setting.keys[key]), mean, low, high, note)
        lines.setdefault((name, setting.algorithm), []).append(point)
    drawn = [Line(spelt(n, a), a, sorted(p, key=lambda p: p.x)) for (n, a), p in lines.items()]
    behind = [series(s, ended, out) for s in settings]
    more = dict(log=show.get("log", False), series=behind, **head(study, show))
    return [Sweep(x=key, y=metric, lines=drawn, **more)]


def table(study, show, ended, out) -> list[Table]:
    """Values after training, and costs per round."""
    lines = [series(s, ended, out) for s in study.named(show.get("series"))]
    about = head(study, show)
    return [final_table(about.pop("title"), lines, show["metrics"], **about)]


def largest(study, show, ended, out) -> list[Table]:
    """The largest values over rounds and trials, with the paper's for comparison."""
    results = Results(study, ended)
    rows = []
    for setting in study.named(show.get("series")):
        values = [results.values(setting, m, "largest").max() for m in show["metrics"]]
        name = spelt(setting.name, setting.algorithm)
        rows.append([f"{name}, from round {FIRST}", *(f"{v:.4g}" for v in values)])
    if study.task in PAPER:
        rows.append(["the paper", *(f"{v:g}" for v in PAPER[study.task])])
    header = ["", *(f"largest {metric_title(m)}" for m in show["metrics"])]
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

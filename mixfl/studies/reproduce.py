"""`mixfl reproduce`: the paper's tables, figures and claims, from the runs of studies."""

import datetime
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mixfl
from mixfl.errors import MixflError, unknown
from mixfl.report.document import Curves, Document, Finding, Section, Sweep
from mixfl.report.from_runs import REPRODUCED
from mixfl.runs.folder import write_whole
from mixfl.studies import study as studies
from mixfl.studies.claims import decide, undecided
from mixfl.studies.progress import Board
from mixfl.studies.protocol import changed
from mixfl.studies.show import shown
from mixfl.studies.study import Study
from mixfl.studies.trials import Crew, Done, Trial, done
from mixfl.studies.verdicts import earlier, keep

RUNS = "runs"


def is_file(id: str) -> bool:
    """Whether the id is the path of a user's study file."""
    return id.endswith(".toml")


def chosen(
    ids: Sequence[str], scale: str, data: Path | None, trials: int | None = None
) -> list[Study]:
    """The studies with these labels, names or files; without ids, all of the paper's. With a number
    of `trials`, that many in place of what the studies say."""
    if scale not in studies.SCALES:
        raise unknown("scale", scale, studies.SCALES)
    files = [] if ids and all(map(is_file, ids)) else studies.files()
    every = [studies.read(path, scale, data, trials) for path in files]
    own = [studies.read(Path(i), scale, data, trials) for i in ids if is_file(i)]
    known = {s.id for s in every} | {label for s in every for label in s.labels}
    for given in ids:
        if given not in known and not is_file(given):
            raise unknown("table or figure", given, [*known, "path.toml"])
    wanted = [s for s in every if (not ids and not s.alone) or {s.id, *s.labels} & set(ids)] + own
    real = [s.real for s in wanted] + [t.data for s in wanted for t in s.trials()]
    if data is not None and not any(real):
        folders = ", ".join(name for names in studies.FOLDERS.values() for name in names)
        raise MixflError(
            f"--data {data} has none of the folders {folders}: make them with `mixfl data prepare`."
        )
    return wanted


def listed(scale: str, data: Path | None, jobs: int, trials: int | None = None) -> list[list[str]]:
    """Rows of label, title, study and estimated time."""
    every = chosen([], scale, data, trials)
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


def reproduce(
    wanted: Sequence[Study], out: Path, crew: Crew, board: Board
) -> tuple[list[Study], dict[str, Done]]:
    """Make the runs of the studies, each once; then more trials where a claim is not decided and
    the study has another look. Returns the studies with the trials made, and these by folder."""
    now = list(wanted)
    while True:
        trials: dict[str, Trial] = {t.folder: t for s in now for t in s.trials()}
        # The first trial of every setting, then the second: an early look shows all settings.
        order = sorted(trials.values(), key=lambda t: t.keys["seed"])
        ended = {d.trial.folder: d for d in crew.make(order, out / RUNS, board)}
        if any(d.status == "failed" for d in ended.values()):
            return now, ended
        more = [grown(s, ended) for s in now]
        if more == now:
            return now, ended
        now = more


def grown(study: Study, ended: Mapping[str, Done]) -> Study:
    """With more trials, if a claim needs them. (The last look has no next.)"""
    return study.grown(undecided(study, ended)) if study.looks else study


def over(wanted: Sequence[Study], out: Path) -> set[str]:
    """The folders of runs that are done."""
    return {t.folder for s in wanted for t in s.trials() if done(t, out / RUNS)}


def remember(
    out: Path, ids: Sequence[str], scale: str, data: Path | None, trials: int | None = None
) -> None:
    """Save the request, so that `mixfl report` can show the results again, and the versions and
    digests of its studies."""
    out.mkdir(parents=True, exist_ok=True)
    kept = [os.path.abspath(i) if is_file(i) else i for i in ids]
    file = out / REPRODUCED
    asked: dict[str, Any] = {"ids": kept, "scale": scale}
    if data is not None:
        asked["data"] = os.path.abspath(data)
    if trials is not None:
        asked["trials"] = trials
    protocols: dict[str, dict[str, str]] = {}
    if file.exists():
        before = json.loads(file.read_bytes())
        protocols = before.get("protocol", {})
        for key in ("scale", "data", "trials"):
            if before.get(key) != asked.get(key):
                raise MixflError(
                    f"{out} was made with {key} = {before.get(key)}, not {asked.get(key)}: choose "
                    "another --out."
                )
    wanted = chosen(ids, scale, data, trials)
    if wrong := changed([(s.id, s.version, s.digest) for s in wanted], protocols):
        raise MixflError(f"{out} holds results of another protocol: {'; '.join(wrong)}.")
    for s in wanted:
        protocols.setdefault(s.id, {})[str(s.version)] = s.digest
    write_whole(file, (json.dumps({**asked, "protocol": protocols}) + "\n").encode())


def made(folders: Sequence[Path]) -> Document:
    """A document about the finished studies in a folder of `mixfl reproduce`."""
    (folder,) = folders
    asked = json.loads((folder / REPRODUCED).read_bytes())
    data = Path(asked["data"]) if "data" in asked else None
    wanted = chosen(asked["ids"], asked["scale"], data, asked.get("trials"))
    over: dict[str, Done] = {}
    whole, notes = [], []
    for study in wanted:
        shown = finished(study, folder, over)
        if shown is None:
            notes.append(f"Not finished yet: {study.title}")
            continue
        whole.append(shown)
        if grown(shown, over) != shown:
            notes.append(f"Not finished yet: more trials of {study.title}")
    command = ["mixfl", "reproduce", *asked["ids"], "--scale", asked["scale"]]
    command += ["--data", asked["data"]] if data else []
    command += ["--trials", str(asked["trials"])] if "trials" in asked else []
    so_far = document(whole, over, folder, shlex.join([*command, "--out", str(folder)]))
    return replace(so_far, notes=notes)


def finished(study: Study, folder: Path, over: dict[str, Done]) -> Study | None:
    """With the trials of its last look that is complete; None if the first is not. Their runs are
    added to `over`."""
    last = None
    while True:
        ended = {t.folder: done(t, folder / RUNS) for t in study.trials()}
        over |= {name: one for name, one in ended.items() if one is not None}
        if not all(ended.values()):
            return last
        last, study = study, grown(study, over)
        if study == last:
            return last


def document(
    wanted: Sequence[Study], ended: Mapping[str, Done], out: Path, command: str
) -> Document:
    findings: list[Finding] = []
    sections = []
    for study in wanted:
        decided = decide(study, ended)
        findings += decided + earlier(out, study)
        keep(out, study, decided)
        parts = [part for show in study.shows for part in shown(study, show, ended, out)]
        sections.append(Section(study.title, parts, study.text))
    facts = [
        ("command", command),
        ("date", datetime.date.today().isoformat()),
        ("machine", f"{processor()}, {os.cpu_count()} cores"),
        ("versions", f"mixfl {mixfl.__version__}, Python {platform.python_version()}"),
        ("runs", str(len(ended))),
        ("protocol", ", ".join(f"{s.id} {s.version} ({s.digest})" for s in wanted if s.claims)),
    ]
    findings.sort(key=lambda f: (not f.number.isdigit(), f.number.zfill(3)))
    return Document("Mixed Federated Learning: the paper's tables and figures", facts, findings,
                    sections)  # fmt: skip


def draw(document: Document, folder: Path) -> None:
    """Save the charts as files for a paper, named by their labels. Sweeps with one label are panels
    of one figure."""
    from mixfl.report.save import save_plot, save_sweeps

    every = [p for s in document.sections for p in s.parts]
    swept = [p for p in every if isinstance(p, Sweep) and p.label]
    for label, x in dict.fromkeys((p.label, p.x) for p in swept):
        of_it = [p for p in swept if (p.label, p.x) == (label, x)]
        save_sweeps(of_it, folder / f"{label}-against-{x.replace('/', '-')}.pdf")
    parts = [p for p in every if isinstance(p, Curves) and p.label]
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

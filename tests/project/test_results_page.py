"""The tables of verdicts in the docs are those of the verdicts that are kept beside them, and these
follow from the archived runs."""

import json
import lzma
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.archive import unpack
from benchmarks.verdicts import main
from mixfl.studies import reproduce
from mixfl.studies.claims import decide

RESULTS = Path(__file__).parents[2] / "docs/results"
NOW = ["verdicts_synthetic.json", "verdicts_real.json", "verdicts_real_paper.json"]
PAGES = [
    ("../results.md", NOW, []),
    ("claims_2.md", NOW, ["--figures"]),
    ("earlier.md", NOW, ["--earlier"]),
    ("version_1.md", ["verdicts_1.json"], []),
]


@pytest.mark.parametrize(("page", "files", "options"), PAGES)
def test_a_page_has_what_the_verdicts_say(page, files, options):
    made = CliRunner().invoke(main, [*(str(RESULTS / f) for f in files), *options])
    assert made.exit_code == 0
    assert made.output.count("\n") > 4
    assert made.output.strip() in (RESULTS / page).read_text()


@pytest.mark.system
@pytest.mark.parametrize("name", ["synthetic", "real", "real_paper"])
def test_verdicts_follow_from_the_archived_runs(name, tmp_path):
    """All but those that need no runs."""
    archive = RESULTS / "runs" / f"{name}.jsonl.xz"
    asked = json.loads(lzma.decompress(archive.read_bytes()).split(b"\n", 1)[0])
    data = tmp_path / "data" if "data" in asked else None
    for task in ("smile", "text", "movie") if data else ():
        (data / task).mkdir(parents=True)
    assert unpack(archive, tmp_path / "out", data) > 0
    kept = json.loads((RESULTS / f"verdicts_{name}.json").read_text())
    over: dict = {}
    judged = set()
    for study in reproduce.chosen(asked["ids"], asked["scale"], data):
        made = reproduce.finished(study, tmp_path / "out", over) if study.settings else None
        if made is not None and study.claims:
            found = [asdict(f) for f in decide(made, over)]
            assert found == kept[study.id][str(study.version)]
            judged.add(study.id)
    every = [*reproduce.chosen([], "quick", None), *reproduce.chosen(asked["ids"], "quick", None)]
    with_runs = {s.id for s in every if s.settings and s.claims}
    assert judged == set(kept) & with_runs

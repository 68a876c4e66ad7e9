"""`compare`, `sweep` and `reproduce` with --on: what a cluster makes is what is made here, to the
bit. Mistakes are said in a line, before anything is written."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_problem
from run_folders import cli, snapshot, timeless
from test_engines import cluster_of_two

from mixfl.runs.reading import read_metrics, read_status
from mixfl.studies import sweep as sweeping
from mixfl.studies.mailbox import WORKERS

MIXFL = str(Path(sys.executable).with_name("mixfl"))
SUPPORT = str(Path(tiny_problem.__file__).parent)
HERE = ["--jobs", "2"]  # each run has one device, as in a job of a cluster
SLURM = ["--on", "slurm", "--on-option", "cluster=local", "--on-option", "time=0:30:00",
         "--on-option", "partition=any", "--jobs", "2"]  # fmt: skip
COMPARE = ["compare", "mine.py:problem", "--algorithms", "fedavg,2wgt", "--rounds", "4"]
SWEEP = ["sweep", "mine.py:problem", "--algorithm", "pt", "--over", "client_lr=0.1,0.4,3e38",
         "--trials", "1", "--rounds", "4"]  # fmt: skip
REPRODUCE = ["reproduce", "mine.toml"]
TUNE = ["tune", "mine.py:problem", "--over", "client_lr=0.1,0.4"]
# It notes what loads it: the command, or a worker and its cluster's mark.
PROBLEM = f"""
import os, pathlib, sys
sys.path.insert(0, {SUPPORT!r})
from tiny_problem import problem

marks = [name for name in ("RAY_JOB_ID", "SUBMITIT_EXECUTOR") if name in os.environ]
with pathlib.Path(__file__).with_name("loaded").open("a") as file:
    file.write(" ".join([pathlib.Path(sys.argv[0]).stem, *marks]) + "\\n")
"""
STUDY = """
title = "A tiny study"
task = "mine.py:problem"

[quick]
trials = [2, 3]
keys = { rounds = 4 }

[[series]]
algorithms = ["pt"]

[[show]]
label = "tab.tiny"
kind = "table"
metrics = ["eval/loss"]

[[claim]]
number = 1
says = "Its loss is small"
[[claim.checks]]
kind = "below"
metric = "eval/loss"
of = ["pt"]
limit = 0.5
"""  # two trials do not decide that: there is a third


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROBLEM)
    (tmp_path / "mine.toml").write_text(STUDY)
    return tmp_path


def mixfl(*words):
    """What it printed, and what loaded the problem."""
    Path("loaded").unlink(missing_ok=True)
    ended = subprocess.run([MIXFL, *words], capture_output=True, text=True)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, set(Path("loaded").read_text().splitlines())


def runs(out):
    """How each run ended, its configuration, its metrics without times, and its model."""
    found = {}
    for folder in (file.parent for file in Path(out).rglob("status.json")):
        model = folder / "model.safetensors"
        found[str(folder.relative_to(out))] = (
            read_status(folder)["status"], (folder / "config.toml").read_text(),
            timeless(read_metrics(folder)), model.read_bytes() if model.exists() else None,
        )  # fmt: skip
    return found


def made_here_and_there(command, on, mark):
    """What was printed by the command here and on the cluster. The runs are the same, all of them
    made by the cluster's workers, and none is made again."""
    here, loaded = mixfl(*command, *HERE, "--out", "here")
    assert loaded == {"mixfl", "worker"}
    there, loaded = mixfl(*command, *on, "--out", "there")
    assert loaded == {"mixfl", f"worker {mark}"}
    assert runs("there") == runs("here")
    assert not list(Path("there").rglob(WORKERS))

    before = {p: kept for p, kept in snapshot(Path("there")).items() if p.parent != Path("there")}
    again, loaded = mixfl(*command, *on, "--out", "there", "--resume")
    assert loaded == {"mixfl"}
    assert set(re.findall(r"(\d+) to make", again)) == {"0"}
    assert snapshot(Path("there")).items() >= before.items()
    assert runs("there") == runs("here")
    assert shown(again) == shown(there)
    return here, there


def shown(printed):
    """The table and what follows, without the names of folders."""
    lines = printed.splitlines()
    (rule,) = (i for i, line in enumerate(lines) if "───" in line)
    return [line.split() for line in lines[rule - 1 :] if not line.startswith(("Runs", "Report"))]


def without(cells, column):
    return [row[:column] + row[column + 1 :] for row in cells]


@pytest.mark.system
def test_a_sweep_by_jobs_of_slurm(folder):
    pytest.importorskip("submitit")
    here, there = made_here_and_there(SWEEP, SLURM, "SUBMITIT_EXECUTOR")
    assert shown(there) == shown(here)
    assert "diverged at round 1" in there
    assert len(runs("there")) == 3
    tables = [json.loads((folder / o / sweeping.RESULTS).read_text()) for o in ("here", "there")]
    assert tables[0] == tables[1]
    assert "client_lr=0.4" in (folder / "there" / "report.html").read_text()


@pytest.mark.system
def test_a_comparison_by_a_ray_cluster(folder, monkeypatch):
    pytest.importorskip("ray")
    with cluster_of_two(monkeypatch) as (address, _):
        on = ["--on", "ray", "--on-option", f"address={address}"]
        here, there = made_here_and_there(COMPARE, on, "RAY_JOB_ID")
    column = shown(here)[0].index("ms/round")
    assert without(shown(there), column) == without(shown(here), column)
    assert "2 runs: 2 to make, 2 at a time" in there  # as many as the cluster has cores
    assert (folder / "there" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "there" / "report.html").exists()


@pytest.mark.system
def test_a_reproduction_by_jobs_of_slurm(folder):
    """Its third trial is asked for when the first jobs have ended."""
    pytest.importorskip("submitit")
    here, there = made_here_and_there(REPRODUCE, SLURM, "SUBMITIT_EXECUTOR")
    assert shown(there) == shown(here)
    assert "3 runs: 2 are done already, 1 to make" in there
    reports = []
    for out in ("here", "there"):
        _, text = (folder / out / "report.md").read_text().split("## Verdicts")
        *above, row = text.strip().splitlines()
        reports.append([*above, without([row.split("|")], 3)])  # ms per round
    assert reports[0] == reports[1]
    assert "Parallel Training" in str(reports[1][-1])


@pytest.mark.parametrize("command", [COMPARE, SWEEP, REPRODUCE, TUNE], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--on rya", "unknown --on 'rya'. Did you mean 'ray'"),
        ("--on-option cpus=1", "--on-option is for --on ray and --on slurm"),
        ("--on ray --on-option cpu=1", "unknown --on-option of ray: 'cpu'. Did you mean 'cpus'"),
        ("--on ray --on-option cpus=two", "--on-option cpus=two: expected a number"),
        ("--on ray --on-option cpus", "--on-option cpus: expected key=value"),
        ("--on slurm --on-option time=1 --on-option time=2", "--on-option time is given twice"),
        ("--on ray", "pip install 'mixfl[ray]'"),
        ("--on slurm", "pip install 'mixfl[slurm]'"),
    ],
)
def test_mistakes_are_said_first(command, options, words, folder, monkeypatch, capsys):
    for package in ("ray", "submitit"):  # are not installed
        monkeypatch.setitem(sys.modules, package, None)
    assert cli(monkeypatch, *command, *options.split(), "--out", "out") == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("mixfl: ")
    assert said.count("\n") == 1
    assert not (folder / "out").exists()

"""Studies, and the report of a reproduction."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_problem

from mixfl.errors import MixflError
from mixfl.report.document import Document, Section
from mixfl.report.page import page
from mixfl.studies import reproduce, study
from mixfl.studies.progress import Board
from mixfl.studies.show import shown
from mixfl.studies.trials import Crew, Done

TINY = f"{tiny_problem.__file__}:problem"
MIXFL = Path(sys.executable).with_name("mixfl")
LABELS = [
    "fig.celeba_and_ncp_acc",
    "fig.celeba_and_ncp_loss",
    "tab.metrics_summary",
    "fig.nmp",
    "tab.nmp-results",
    "fig.metrics_summary",
    "fig.ncp_acc_on_splits",
    "fig.nmp-sgd-recall",
    "tab.nmp-saving-analysis",
    "fig.celeba_owgt_sweep_central_batch",
    "fig.celeba_twgt_sweep_central_batch",
    "fig.celeba_lr_vs_K",
    "fig.ncp_lr_vs_K",
    "fig.ncp_compare_max_lrs",
    "fig.nmp-adam",
    "tab.conv_summary",
    "tab.lr_limit_summary",
    "tab.slr_assumptions",
    # What the paper does not show
    "extra.two_way_step",
    "extra.forgetting",
    "extra.example_transfer",
    "extra.adaptive",
    "extra.populations",
    "extra.one_step",
]


@pytest.mark.parametrize("scale", study.SCALES)
def test_every_table_and_figure_of_the_paper_has_a_study(scale):
    wanted = reproduce.chosen([], scale, None)
    labels = {label for s in wanted for label in s.labels}
    assert labels >= set(LABELS)
    decided = {str(c["number"]) for s in wanted for c in s.claims}
    assert decided >= {str(n) for n in range(1, 17)}
    for s in wanted:  # every series that a show or a claim names is there
        for show in s.shows:
            if "series" in show:
                assert s.named(show["series"])
    least = 3 if scale == "quick" else 5
    assert all(len(x.trials) >= least for s in wanted for x in s.settings)
    if scale == "full":
        (swept,) = (s for s in wanted if s.id == "central_batch")
        assert all(len(x.trials) == 10 for x in swept.settings)


def test_quick_is_said_to_take_at_most_half_an_hour_on_two_cores():
    """With three trials; with five, the first look, an hour."""
    assert study.estimate(reproduce.chosen([], "quick", None, 3), 2) < 30 * 60
    assert study.estimate(reproduce.chosen([], "quick", None), 2) < 60 * 60


def test_full_has_the_papers_settings():
    studies = {s.id: s for s in reproduce.chosen([], "full", None)}
    paper = {"smile": 500, "text": 2000, "movie": 2000}
    for task, rounds in paper.items():
        for setting in studies[task].settings:
            assert setting.trials[0].preset == "paper"
            assert setting.trials[0].rounds() == rounds


def test_a_run_that_two_studies_show_is_made_once():
    every = reproduce.chosen([], "quick", None)
    folders = [t.folder for s in every for t in s.trials()]
    assert len(set(folders)) < len(folders)


def test_unknown_labels_and_scales_are_named():
    with pytest.raises(MixflError, match=r"Did you mean 'fig\.nmp'"):
        reproduce.chosen(["fig.nmpp"], "quick", None)
    with pytest.raises(MixflError, match="unknown scale 'small'"):
        reproduce.chosen([], "small", None)


def test_data_without_a_known_folder_is_refused(tmp_path):
    with pytest.raises(MixflError, match="mixfl data prepare"):
        reproduce.chosen(["smile"], "quick", tmp_path)
    (tmp_path / "celeba").mkdir()
    (smile,) = reproduce.chosen(["smile"], "quick", tmp_path)
    assert smile.data == "smile, real"
    assert smile.settings[0].trials[0].data == str(tmp_path / "celeba")
    assert smile.settings[0].trials[0].preset == "cpu"


# A reproduction from beginning to end; the study is a file, no code

STUDY = f"""
title = "A tiny <b>study</b>"
task = "{TINY}"

[quick]
trials = 2
keys = {{ rounds = 6, eval_every = 2 }}

[[series]]
algorithms = ["fedavg", "pt"]

[[series]]
algorithms = ["pt"]
over = {{ client_lr = [0.2, 3e38] }}

[[show]]
label = "fig.tiny"
kind = "curves"
metrics = ["eval/loss"]

[[show]]
label = "fig.tiny"
kind = "final"
metric = "eval/loss"
key = "client_lr"
series = "pt client_lr=*"

[[show]]
label = "tab.tiny"
kind = "table"
metrics = ["eval/loss"]

[[claim]]
number = 1
says = "A high rate diverges"
[[claim.checks]]
kind = "order"
metric = "eval/loss"
key = "client_lr"
of = ["pt", "pt"]
limit = 9
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "tiny.toml").write_text(STUDY)
    monkeypatch.setattr(study, "STUDIES", tmp_path / "studies")
    return tmp_path


def test_a_study_from_its_file_to_the_page(tiny):
    out = tiny / "out"
    wanted = reproduce.chosen(["fig.tiny"], "quick", None)
    reproduce.remember(out, ["fig.tiny"], "quick", None)
    with Crew(2) as crew:
        wanted, ended = reproduce.reproduce(wanted, out, crew, Board())
    assert sorted({d.status for d in ended.values()}) == ["diverged", "finished"]
    document = reproduce.document(wanted, ended, out, "mixfl reproduce")
    (section,) = document.sections
    curves, swept, table = section.parts
    assert [s.name for s in curves.series] == [
        "FedAvg (FL alone)", "Parallel Training", "Parallel Training client_lr=0.2",
        "Parallel Training client_lr=3e+38",
    ]  # fmt: skip
    (line,) = swept.lines
    assert [p.mean is None for p in line.points] == [False, True]
    assert line.points[1].note == "2 of 2 trials diverged"
    assert table.rows[3][1].startswith("diverged at round 1")
    losses = [t.rows[-1]["eval/loss"] for t in curves.series[0].trials]
    assert table.rows[0][1].startswith(f"{np.mean(losses):.4f} ± ")
    # A sweep has the configuration and the command of every run behind it, too.
    of_sweep = Document("", [], [], [Section("", [swept])]).trials()
    assert [t.config["client_lr"] for t in of_sweep] == [0.2, 0.2, 3e38, 3e38]
    assert all("mixfl run --config" in t.command for t in of_sweep)
    (finding,) = document.findings
    assert finding.data.endswith("synthetic")
    html = page(document)
    assert "<b>study</b>" not in html
    assert "A tiny &lt;b&gt;study" in html
    reproduce.draw(document, out / "figures")
    assert (out / "figures" / "fig.tiny.pdf").read_bytes().startswith(b"%PDF")
    (figure,) = (out / "figures").glob("*-against-client_lr.pdf")
    assert figure.read_bytes().startswith(b"%PDF")

    # Again: nothing is made, and the same is shown.
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()}
    with Crew(1) as crew:
        wanted, again = reproduce.reproduce(wanted, out, crew, Board())
    assert {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()} == before
    assert reproduce.document(wanted, again, out, "mixfl reproduce") == document
    shown = reproduce.made([out])
    assert shown.sections == document.sections
    assert shown.findings == document.findings

    assert study.estimate(wanted, 2) >= study.COMPILE_SECONDS
    assert study.estimate(wanted, 2, reproduce.over(wanted, out)) == 0

    with pytest.raises(MixflError, match="was made with scale = quick, not full"):
        reproduce.remember(out, [], "full", None)


def test_what_is_not_finished_yet_is_said(tiny):
    out = tiny / "out"
    reproduce.remember(out, [], "quick", None)
    document = reproduce.made([out])
    assert document.sections == []
    assert document.notes == ["Not finished yet: A tiny <b>study</b>"]


SLOW = f"""
import dataclasses, pathlib, sys, time
sys.path.insert(0, {str(Path(tiny_problem.__file__).parent)!r})
import tiny_problem

def evaluate(params):
    if pathlib.Path(__file__).with_name("slowly").exists():
        time.sleep(0.05)
    return tiny_problem.evaluate(params)

problem = dataclasses.replace(tiny_problem.problem, evaluate=evaluate)
"""
LONG = """
title = "Long runs"
task = "slow.py:problem"

[full]
trials = 2
round_ms = 50
keys = { rounds = 400 }

[[series]]
algorithms = ["fedavg"]

[[show]]
label = "fig.long"
kind = "curves"
metrics = ["eval/loss"]
"""


@pytest.mark.slow
def test_full_says_how_long_it_takes_is_stopped_and_goes_on(tmp_path):
    """With a file of one's own."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "long.toml").write_text(LONG)
    (tmp_path / "slowly").touch()
    command = [str(MIXFL), "reproduce", "long.toml", "--scale", "full", "--out", "out"]
    pipes: dict = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    process = subprocess.Popen([*command, "--jobs", "2"], **pipes)
    assert "about 22 s" in process.stdout.readline()
    assert not (tmp_path / "out" / "runs").exists()
    while process.poll() is None and not any(
        file.stat().st_size for file in tmp_path.rglob("metrics.jsonl")
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130, error
    assert "0 of 2 runs are over, the others are saved" in error
    (tmp_path / "slowly").unlink()
    again = subprocess.run(command, **pipes)
    assert again.returncode == 0, again.stderr
    assert "going on from the checkpoint of round" in again.stderr
    assert "Long runs" in (tmp_path / "out" / "report.html").read_text()
    assert (tmp_path / "out" / "figures" / "fig.long.pdf").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("title", "titel"), "tiny.toml has no `title`"),
        (('kind = "curves"', 'kind = "curve"'), "Did you mean 'curves'"),
        (('metrics = ["eval/loss"]', ""), r"show\[0\] of tiny.toml has no `metrics`"),
        (
            ("trials = 2", "trails = 2"),
            "unknown key in quick of tiny.toml.*Did you mean 'trials'",
        ),
        (('"order"', '"better"'), r"unknown key in claim\[0\].checks\[0\] of tiny.toml: 'key'"),
        (("limit = 9", ""), r"claim\[0\].checks\[0\] of tiny.toml has no `limit`"),
        (("[[claim]]", "[claim]"), "expected tables"),
        (("trials = 2", "trials = 0"), "quick.trials = 0: expected a whole number of at least 1"),
        (('metrics = ["eval/loss"]', "metrics = [3]"), r"metrics\[0\] = 3: expected text"),
        (('"fedavg", "pt"', '"fedavgg"'), "unknown algorithm 'fedavgg'"),
        (("rounds = 6", "round = 6"), "unknown key 'round'"),
        (("title =", "title"), "is not valid TOML"),
    ],
)
def test_slips_in_a_study_are_named(change, words, tmp_path):
    file = tmp_path / "tiny.toml"
    file.write_text(STUDY.replace(*change))
    with pytest.raises(MixflError, match=words):
        reproduce.chosen([str(file)], "quick", None)


def test_two_series_of_the_same_name_are_refused(tiny):
    file = tiny / "studies" / "tiny.toml"
    file.write_text(STUDY.replace('algorithms = ["fedavg", "pt"]', 'algorithms = ["pt", "pt"]'))
    with pytest.raises(MixflError, match="the same name"):
        reproduce.chosen([], "quick", None)


def test_the_list_has_every_label_and_a_time():
    ended = subprocess.run(
        [str(MIXFL), "reproduce", "--list"], capture_output=True, text=True, check=True
    )
    for label in LABELS:
        assert label in ended.stdout
    assert "All of them: about" in ended.stdout


def test_theory_and_costs_need_no_runs(tmp_path):
    (theory,) = reproduce.chosen(["theory"], "quick", None)
    document = reproduce.document([theory], {}, tmp_path, "")
    assert [p.label for p in document.sections[0].parts] == [
        "tab.conv_summary", "tab.lr_limit_summary", "tab.slr_assumptions"
    ]  # fmt: skip
    assert all(len(p.rows) == 9 for p in document.sections[0].parts)


def test_table_2_is_one_table_with_a_column_for_each_task(tmp_path):
    (asked,) = reproduce.chosen(["tab.metrics_summary"], "quick", None)
    (show,) = (s for s in asked.shows if s["label"] == "tab.metrics_summary")
    ended = {}
    for i, setting in enumerate(asked.settings):
        for k, trial in enumerate(setting.trials):
            folder = tmp_path / trial.folder
            folder.mkdir(parents=True)
            (folder / "config.toml").write_text("w_f = 0.5\nw_c = 0.25\n")
            rows = [{"round": r, "theory/g2": r * (i + 1), "theory/b2": 1 + k} for r in (2, 50)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            ended[trial.folder] = Done(trial, folder, "finished", 50)
    (table,) = shown(asked, show, ended, tmp_path)
    tasks = [s.trials[0].task for s in asked.settings]
    assert tasks[:3] == ["smile", "text", "movie"]
    column = {row[0]: row[1:4] for row in table.rows if row[0] != "the paper's"}
    theirs = [row[1:4] for row in table.rows if row[0] == "the paper's"]
    assert column["federated data"] == ["CelebA, smiling", "Stack Overflow", "MovieLens"]
    assert column["central loss"][2] == "spreadout"
    assert (column["w_f"], column["w_c"]) == (["0.5"] * 3, ["0.25"] * 3)
    g2, b2 = (values for name, values in column.items() if name.startswith("largest"))
    assert g2 == ["50", "100", "150"]
    assert b2 == [str(len(asked.settings[0].trials))] * 3
    assert theirs == [["49.04", "0.03", "0.03"], ["1.26", "1.34", "1.5"]]

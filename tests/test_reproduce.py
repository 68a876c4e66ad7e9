"""Studies, the claims that they decide, and the report of a reproduction."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_problem

from mixfl.errors import MixflError
from mixfl.experiments import claims, reproduce, study
from mixfl.experiments.board import Board
from mixfl.experiments.claims import AGREE, DISAGREE, OPEN
from mixfl.experiments.report.page import page
from mixfl.experiments.study import Setting, Study
from mixfl.experiments.trials import Crew, Done, Trial

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
    assert study.estimate(reproduce.chosen([], "quick", None), 2) < 30 * 60


def test_full_has_the_papers_settings():
    found = {s.id: s for s in reproduce.chosen([], "full", None)}
    paper = {"smile": 500, "text": 2000, "movie": 2000}
    for task, rounds in paper.items():
        for setting in found[task].settings:
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
    (found,) = reproduce.chosen(["smile"], "quick", tmp_path)
    assert found.data == "smile, real"
    assert found.settings[0].trials[0].data == str(tmp_path / "celeba")
    assert found.settings[0].trials[0].preset == "cpu"


# Claims, on made-up figures


def results(tmp_path, figures, metric="eval/loss", keys=None):
    """Of {name: values of the trials}; None is a diverged trial, a list a whole curve."""
    settings, ended = [], {}
    for name, values in figures.items():
        algorithm, *_ = name.split()
        trials = [Trial("smile", algorithm, f"{name}/seed{i}", name) for i in range(len(values))]
        settings.append(Setting(name, algorithm, (keys or {}).get(name, {}), trials))
        for trial, value in zip(trials, values, strict=True):
            folder = tmp_path / trial.folder
            folder.mkdir(parents=True)
            curve = value if isinstance(value, list) else [value] * 10
            rows = [{"round": 5 * (i + 1), metric: v} for i, v in enumerate(curve)]
            if value is not None:
                (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
            status = "diverged" if value is None else "finished"
            ended[trial.folder] = Done(trial, folder, status, 7)
    found = Study("made", "Made", "", "smile", "made up", settings, [], [])
    return claims.Results(found, ended)


def verdicts(check, found):
    return [c.verdict for c in claims.run(check, found)]


CLEAR = {"a": [1.0, 1.1, 1.05], "b": [2.0, 2.1, 2.04]}
NOISY = {"a": [1.0, 3.0, 2.0], "b": [2.5, 1.5, 2.3]}
SAME = {"a": [1.0, 1.1, 1.2], "b": [1.001, 1.099, 1.2]}
GONE = {"a": [1.0, 1.0, 1.0], "b": [None, None, 2.0]}


@pytest.mark.parametrize(
    ("figures", "better", "worse", "close", "reaches"),
    [
        (CLEAR, AGREE, DISAGREE, DISAGREE, AGREE),
        (NOISY, OPEN, OPEN, OPEN, OPEN),
        (SAME, OPEN, OPEN, AGREE, AGREE),
        (GONE, AGREE, DISAGREE, OPEN, OPEN),
    ],
)
def test_verdicts(tmp_path, figures, better, worse, close, reaches):
    found = results(tmp_path, figures)
    loss = {"metric": "eval/loss", "of": "a", "than": "b"}
    assert verdicts({"kind": "better", **loss}, found) == [better]
    assert verdicts({"kind": "better", **loss, "of": "b", "than": "a"}, found) == [worse]
    assert verdicts({"kind": "close", **loss, "within": 0.01}, found) == [close]
    assert verdicts({"kind": "reaches", **loss, "within": 0.01}, found) == [reaches]


def test_one_that_diverged_is_not_close_to_one_that_did_not(tmp_path):
    found = results(tmp_path, GONE)
    check = {"metric": "eval/loss", "of": "b", "than": "a", "within": 5}
    assert verdicts({"kind": "close", **check}, found) == [DISAGREE]


def test_higher_is_better_for_accuracies(tmp_path):
    found = results(tmp_path, CLEAR, "eval/accuracy")
    check = {"kind": "better", "metric": "eval/accuracy", "of": "b", "than": "a"}
    assert verdicts(check, found) == [AGREE]


def test_differences_are_taken_within_a_seed(tmp_path):
    """The trials differ by far more than the two do: only pairs can tell."""
    seeds = np.array([0.0, 10.0, 20.0])
    found = results(tmp_path, {"a": list(seeds), "b": list(seeds + [0.1, 0.11, 0.09])})
    check = {"kind": "better", "metric": "eval/loss", "of": "a", "than": "b"}
    assert verdicts(check, found) == [AGREE]


def test_better_is_claimed_wrongly_in_2_5_of_100_cases(tmp_path):
    """Where there is no difference: that is what a 95 % interval promises."""
    rng = np.random.default_rng(0)
    wrong = 0
    for i in range(400):
        a, b = rng.normal(size=(2, 3))
        found = results(tmp_path / str(i), {"a": list(a), "b": list(b)})
        wrong += verdicts(
            {"kind": "better", "metric": "eval/loss", "of": "a", "than": "b"}, found
        ) == [AGREE]
    assert 2 <= wrong <= 20


def test_parts_of_a_curve():
    rows = np.array([[5 * (i + 1), i] for i in range(10)], float)
    assert claims.part(rows, "early") == 0.5
    assert claims.part(rows, "end") == 8.5
    assert claims.part(rows, "curve") == 4.5
    assert claims.part(np.array([[5, 9.0], [10, 2.0], [20, 3.0]]), "largest") == 3.0
    with pytest.raises(MixflError, match="unknown part"):
        claims.part(rows, "middle")


def test_limits(tmp_path):
    found = results(tmp_path, CLEAR)
    check = {"metric": "eval/loss", "of": "a"}
    assert verdicts({"kind": "above", **check, "limit": 0.5}, found) == [AGREE]
    assert verdicts({"kind": "below", **check, "limit": 0.5}, found) == [DISAGREE]
    assert verdicts({"kind": "below", **check, "limit": 1.06}, found) == [OPEN]
    assert verdicts({"kind": "below", **check, "limit": 1.2, "at": "largest"}, found) == [AGREE]


def test_contrasts(tmp_path):
    figures = {"a": [3.0, 3.1], "b": [1.0, 1.1], "c": [2.0, 2.0], "d": [1.9, 1.91]}
    found = results(tmp_path, figures)
    check = {"kind": "contrast", "metric": "eval/loss", "of": "a", "less": "b", "than": ["c", "d"]}
    assert verdicts(check, found) == [AGREE]
    check = {**check, "of": "c", "less": "d", "than": ["a", "b"]}
    assert verdicts(check, found) == [DISAGREE]


def test_the_order_in_which_algorithms_diverge(tmp_path):
    figures = {
        "2wgt lr=1": [1.0, 1.0], "2wgt lr=2": [9.0, 1.0], "pt lr=1": [1.0, 1.0],
        "pt lr=2": [1.0, 1.1], "pt lr=4": [None, 1.0], "1wgt lr=2": [1.0, 1.0],
        "1wgt lr=4": [1.0, 1.0],
    }  # fmt: skip
    keys = {name: {"lr": float(name[-1])} for name in figures}
    found = results(tmp_path, figures, keys=keys)
    check = {"kind": "order", "metric": "eval/loss", "key": "lr", "limit": 3.0}
    (checked,) = claims.run({**check, "of": ["2wgt", "pt", "1wgt"]}, found)
    assert checked.verdict == AGREE
    assert "2wgt up to 1, pt up to 2, 1wgt up to 4 (all tried)" in checked.evidence
    assert verdicts({**check, "of": ["pt", "2wgt", "1wgt"]}, found) == [DISAGREE]
    assert verdicts({**check, "of": ["pt", "pt", "1wgt"]}, found) == [OPEN]


def test_every_setting_of_an_algorithm_is_compared_with_its_first(tmp_path):
    figures = {"pt k=1": [2.0, 2.1], "pt k=2": [1.0, 1.1], "pt k=4": [3.0, 3.1]}
    found = results(tmp_path, figures)
    check = {"kind": "reaches", "metric": "eval/loss", "each": ["pt"], "within": 0.1}
    checked = claims.run(check, found)
    assert [c.verdict for c in checked] == [AGREE, DISAGREE]
    assert checked[0].evidence.endswith("helps")
    assert not checked[1].evidence.endswith("helps")


def test_a_claim_needs_all_of_its_checks(tmp_path):
    found = results(tmp_path, {**CLEAR, "c": [1.0, 3.0, 2.0]})
    good = {"kind": "better", "metric": "eval/loss", "of": "a", "than": "b"}
    bad, open_ = {**good, "of": "b", "than": "a"}, {**good, "of": "c", "than": "a"}
    for checks, verdict in (([good], AGREE), ([good, open_], OPEN), ([good, open_, bad], DISAGREE)):
        claim = {"number": 1, "says": "so", "checks": checks}
        made = Study(**{**vars(found.study), "claims": [claim]})
        (finding,) = claims.decide(made, found.ended)
        assert finding.verdict == verdict
        assert len(finding.evidence) == len(checks)


def test_a_series_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MixflError, match="unknown series of the study made 'x'"):
        claims.run(
            {"kind": "above", "metric": "m", "of": "x", "limit": 1}, results(tmp_path, CLEAR)
        )
    with pytest.raises(MixflError, match="unknown kind of check 'nearly'"):
        claims.run({"kind": "nearly"}, results(tmp_path / "b", CLEAR))


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
of = ["pt client_lr=3"]
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
        ended = reproduce.reproduce(wanted, out, crew, Board())
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
    (finding,) = document.findings
    assert finding.data.endswith("synthetic")
    html = page(document)
    assert "<b>study</b>" not in html
    assert "A tiny &lt;b&gt;study" in html
    reproduce.draw(document, out / "figures")
    assert (out / "figures" / "fig.tiny.pdf").read_bytes().startswith(b"%PDF")

    # Again: nothing is made, and the same is shown.
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()}
    with Crew(1) as crew:
        again = reproduce.reproduce(wanted, out, crew, Board())
    assert {p: p.stat().st_mtime_ns for p in (out / "runs").rglob("*") if p.is_file()} == before
    assert reproduce.document(wanted, again, out, "mixfl reproduce") == document
    shown = reproduce.made([out])
    assert shown.sections == document.sections
    assert shown.findings == document.findings

    with pytest.raises(MixflError, match="was made with scale = quick, not full"):
        reproduce.remember(out, [], "full", None)


def test_what_is_not_finished_yet_is_said(tiny):
    out = tiny / "out"
    reproduce.remember(out, [], "quick", None)
    document = reproduce.made([out])
    assert document.sections == []
    assert document.notes == ["Not finished yet: A tiny <b>study</b>"]


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
    assert "All of it: about" in ended.stdout


def test_theory_and_costs_need_no_runs(tmp_path):
    (theory,) = reproduce.chosen(["theory"], "quick", None)
    document = reproduce.document([theory], {}, tmp_path, "")
    assert [p.label for p in document.sections[0].parts] == [
        "tab.conv_summary", "tab.lr_limit_summary", "tab.slr_assumptions"
    ]  # fmt: skip
    assert all(len(p.rows) == 9 for p in document.sections[0].parts)

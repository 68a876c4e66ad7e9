"""The protocol of studies: versions, digests, and more trials until a claim is decided."""

import json
import re

import numpy as np
import pytest
import tiny_problem

from mixfl.errors import MixflError
from mixfl.studies import protocol, reproduce, study
from mixfl.studies.progress import Board
from mixfl.studies.show import largest_rows
from mixfl.studies.trials import Done
from mixfl.tasks import read_toml
from mixfl.theory.intervals import half_width, interval, sequential

LOOKS = (5, 10, 15, 20)


def test_no_study_changed_without_a_new_version():
    known, now = protocol.recorded(), protocol.present()
    assert protocol.changed(now, known) == [], "then run: python -m mixfl.studies.protocol"
    assert all(str(version) in known[id] for id, version, _ in now)


def test_a_digest_covers_what_is_judged(tmp_path):
    file = study.STUDIES / "02_text.toml"
    content = read_toml(file)
    first = protocol.digest(content, file)
    assert protocol.digest({**content, "text": "other words", "version": 9}, file) == first
    timed = {**content, "quick": {**content["quick"], "round_ms": 1}}
    assert protocol.digest(timed, file) == first
    fewer = {**content, "quick": {**content["quick"], "trials": 2}}
    assert protocol.digest(fewer, file) != first
    claims = json.loads(json.dumps(content["claim"]))
    claims[0]["checks"][0]["metric"] = "eval/loss"
    assert protocol.digest({**content, "claim": claims}, file) != first
    other = {**content, "quick": {**content["quick"], "preset": "cpu"}}
    assert protocol.digest(other, file) != first


def test_a_change_of_a_preset_is_a_change_of_the_protocol(monkeypatch):
    file = study.STUDIES / "02_text.toml"
    first = protocol.digest(read_toml(file), file)
    content = read_toml(file)
    monkeypatch.setattr(protocol, "read_toml", lambda path: {"client_lr": 9.0})
    assert protocol.digest(content, file) != first


def test_a_change_of_ones_own_problem_is_one_too(tmp_path):
    file = tmp_path / "mine.toml"
    content = {"title": "Mine", "task": "mine.py:problem"}
    (tmp_path / "mine.py").write_text("one")
    first = protocol.digest(content, file)
    (tmp_path / "mine.py").write_text("two")
    assert protocol.digest(content, file) != first


# What the looks cost


def test_the_error_of_all_looks_together_stays_below_5_percent():
    """No difference, and one stops as soon as an interval excludes 0: with plain intervals that is
    wrong in far more than 5 % of cases."""
    rng = np.random.default_rng(0)
    wrong = plain = 0
    for values in rng.normal(size=(1500, 20)):
        excluded = [abs(values[:n].mean()) > half_width(values[:n]) for n in LOOKS]
        plain += any(excluded)
        looks = [sequential(values[:n], LOOKS) for n in LOOKS]
        wrong += any(d.low > 0 or d.high < 0 for d in looks)
    assert plain / 1500 > 0.08
    assert 0.01 < wrong / 1500 < 0.05


def test_what_a_look_decided_stays_decided():
    values = np.array([1.0, 1.01, 0.99, 1.0, 1.02, *np.linspace(-9, 9, 5)])
    assert sequential(values[:5], LOOKS).low > 0.9
    last = sequential(values, LOOKS)
    assert interval(values).low < 0 < 0.9 < last.low
    assert last.mean == pytest.approx(values.mean())
    assert sequential(values, ()) == interval(values)


# Studies whose runs are made up

STUDY = f"""
title = "Made up"
version = 1
task = "{tiny_problem.__file__}:problem"

[quick]
trials = [2, 4, 6]
keys = {{ rounds = 6, eval_every = 2 }}

[[series]]
algorithms = ["fedavg", "pt", "2wgt"]

[[claim]]
number = 1
says = "clear"
checks = [{{ kind = "better", metric = "eval/loss", of = "pt", than = "fedavg" }}]
"""
OPEN = """
[[claim]]
number = 2
says = "never decided"
checks = [{ kind = "better", metric = "eval/loss", of = "2wgt", than = "pt" }]
"""


class Made:
    """In place of a Crew: pt's loss is lower than that of fedavg, and 2wgt's now lower than pt's,
    now higher."""

    def make(self, trials, out, board):
        ended = []
        for t in trials:
            folder = out / t.folder
            folder.mkdir(parents=True, exist_ok=True)
            seed = t.keys["seed"]
            noise = 1e-4 * (seed % 3)
            loss = {"fedavg": 2 + noise, "pt": 1.0, "2wgt": 1 + (-1) ** seed * 0.1 + noise}[t.id]
            row = json.dumps({"round": 6, "eval/loss": loss})
            (folder / "metrics.jsonl").write_text(row + "\n")
            (folder / "config.toml").write_text("")
            (folder / "status.json").write_text('{"status": "finished", "round": 6}')
            ended.append(Done(t, folder, "finished", 6))
        return ended


def reproduced(file, out, trials=None):
    asked = [str(file)], "quick", None, trials
    reproduce.remember(out, *asked)
    wanted, ended = reproduce.reproduce(reproduce.chosen(*asked), out, Made(), Board())
    return wanted[-1], reproduce.document(wanted, ended, out, "")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "made.toml"
    path.write_text(STUDY + OPEN)
    return path


def test_only_series_of_undecided_claims_get_more_trials(file, tmp_path):
    made, document = reproduced(file, tmp_path / "out")
    assert {s.name: len(s.trials) for s in made.settings} == {"fedavg": 2, "pt": 6, "2wgt": 6}
    clear, never = document.findings
    assert (clear.verdict, clear.trials) == ("agree", "2")
    assert (never.verdict, never.trials) == ("not decided", "6")
    assert reproduce.made([tmp_path / "out"]).findings == document.findings


def test_the_interval_shown_is_that_of_the_looks(file, tmp_path):
    _, document = reproduced(file, tmp_path / "out")
    clear = document.findings[0]
    low, high = map(float, re.findall(r"[-+.\d]+", clear.interval))
    values = np.array([1.0, 1.0001])
    assert high - low == pytest.approx(2 * half_width(values, 0.05 / 3), abs=0.01)
    assert half_width(values, 0.05 / 3) > 2.9 * half_width(values)
    assert clear.effect == "+1"


def test_a_look_that_is_not_complete_is_said(file, tmp_path):
    out = tmp_path / "out"
    made, _ = reproduced(file, out)
    (last,) = (s.trials[-1] for s in made.settings if s.name == "pt")
    (out / reproduce.RUNS / last.folder / "status.json").unlink()
    document = reproduce.made([out])
    assert document.notes == ["Not finished yet: more trials of Made up"]
    assert document.findings[1].trials == "4"


def test_a_fixed_number_of_trials_has_plain_intervals(file, tmp_path):
    made, document = reproduced(file, tmp_path / "out", 3)
    assert {len(s.trials) for s in made.settings} == {3}
    low, high = map(float, re.findall(r"[-+.\d]+", document.findings[0].interval))
    assert high - low == pytest.approx(2 * half_width([0, 1e-4, 2e-4]), abs=0.01)
    with pytest.raises(MixflError, match="was made with trials = 3, not None"):
        reproduced(file, tmp_path / "out")


def test_versions_stand_side_by_side(file, tmp_path):
    out = tmp_path / "out"
    reproduced(file, out)
    file.write_text(STUDY)
    with pytest.raises(MixflError, match="is not what its version 1 was: give it version = 2"):
        reproduced(file, out)
    file.write_text(STUDY.replace("version = 1", "version = 2"))
    made, document = reproduced(file, out)
    assert [(f.number, f.version) for f in document.findings] == [("1", 2), ("1", 1), ("2", 1)]
    # No run that was seen before decides the new version.
    assert {t.keys["seed"] for t in made.trials()} == {1000, 1001}
    recorded = json.loads((out / "reproduce.json").read_text())["protocol"]["made"]
    assert set(recorded) == {"1", "2"}
    assert recorded["2"] == made.digest
    assert ("protocol", f"made 2 ({made.digest})") in document.facts


def test_every_trial_has_its_own_synthetic_data(tmp_path):
    file = tmp_path / "faces.toml"
    text = 'title = "Faces"\ntask = "smile"\nnew_data = true\n[quick]\npreset = "demo"\n'
    file.write_text(f'{text}trials = 3\n[[series]]\nalgorithms = ["pt"]\n')
    (made,) = reproduce.chosen([str(file)], "quick", None)
    assert [t.keys["data_seed"] for t in made.trials()] == [0, 1, 2]
    (tmp_path / "celeba").mkdir()
    (real,) = reproduce.chosen([str(file)], "quick", tmp_path)
    assert all("data_seed" not in t.keys for t in real.trials())


@pytest.mark.parametrize("trials", ["[]", "[5, 5]", "[10, 5]"])
def test_looks_must_rise(file, trials):
    file.write_text(STUDY.replace("[2, 4, 6]", trials))
    with pytest.raises(MixflError, match="expected a number, or numbers that rise"):
        study.read(file, "quick", None)


def test_verdicts_say_how_their_settings_differ_from_the_papers(tmp_path):
    def departs(study):
        return {words for s in study.settings for words in s.departs}

    (quick,) = reproduce.chosen(["smile"], "quick", None)
    assert "synthetic data" in departs(quick)
    assert "rounds 300 (500)" in departs(quick)
    assert not any(d.startswith(("local_steps", "client_batch", "inputs")) for d in departs(quick))
    (tmp_path / "celeba").mkdir()
    (full,) = reproduce.chosen(["smile"], "full", tmp_path)
    assert departs(full) == set()
    (few,) = reproduce.chosen(["smile"], "full", None)
    assert departs(few) == {"synthetic data"}


def test_series_of_several_tasks_depart_each_by_themselves(tmp_path):
    for name in ("celeba", "movielens", "text"):
        (tmp_path / name).mkdir()
    (made,) = reproduce.chosen(["dissimilarity"], "quick", tmp_path)
    departs = {s.name: list(s.departs) for s in made.settings}
    assert departs["pt smile"] == departs["pt smile unit"] == departs["pt movie"] == []
    assert "hidden 64 (1024)" in departs["pt text"]
    assert not any(words.startswith("inputs") for words in departs["pt text"])
    presets = {s.name: s.trials[0].preset for s in made.settings}
    assert presets == {
        "pt smile": "paper", "pt smile unit": "paper", "pt movie": "paper", "pt text": "cpu"
    }  # fmt: skip
    assert made.settings[0].trials[0].keys["local_steps"] == 1


def test_keys_of_synthetic_data_are_not_given_to_runs_on_real_data(tmp_path):
    """They would be refused. The folders keep their names."""
    (tmp_path / "celeba").mkdir()
    for data in (None, tmp_path):
        (made,) = reproduce.chosen(["dp_smile"], "quick", data)
        assert all(("image_size" in t.keys) == (data is None) for t in made.trials())


def test_tasks_of_one_study_have_their_own_data(tmp_path):
    (tmp_path / "movielens").mkdir()
    (made,) = reproduce.chosen(["dissimilarity"], "quick", tmp_path)
    labels = {s.name: s.data for s in made.settings}
    assert labels["pt movie"] == "movie, real"
    assert labels["pt text"] == "text, synthetic"
    data = {s.name: s.trials[0].data for s in made.settings}
    assert data["pt movie"] == str(tmp_path / "movielens")
    assert data["pt smile"] is None


def test_the_largest_of_all_simulations_per_round():
    trials = [
        [
            {"round": r, "theory/g2": g, "theory/b2": 1.0}
            for r, g in zip((0, 2), values, strict=True)
        ]
        for values in ((1.0, 5.0), (3.0, 4.0))
    ]
    rows = largest_rows(trials, ["theory/g2", "theory/b2"])
    assert [(r["round"], r["theory/g2"]) for r in rows] == [(0, 3.0), (2, 5.0)]


@pytest.mark.parametrize(
    "margin",
    [
        "",
        "part = 0.2",
        "within = 1, part = 0.2",
        "within = 1, effect = { of = 'pt', than = 'fedavg' }",
    ],
)
def test_a_margin_is_a_number_or_a_part_of_an_effect(file, margin):
    check = f'kind = "close", metric = "eval/loss", of = "pt", than = "fedavg", {margin}'
    file.write_text(
        STUDY
        + OPEN.replace(
            'kind = "better", metric = "eval/loss", of = "2wgt", than = "pt"', check.rstrip(", ")
        )
    )
    with pytest.raises(MixflError, match="needs a margin"):
        study.read(file, "quick", None)


def test_a_population_may_have_keys_of_its_own():
    (made,) = reproduce.chosen(["populations"], "quick", None)
    (own,) = made.named("2wgt own settings")
    (shared,) = made.named("2wgt")
    assert own.trials[0].keys["smiling.client_batch"] == 5
    assert own.trials[0].folder.split("/")[0] != shared.trials[0].folder.split("/")[0]

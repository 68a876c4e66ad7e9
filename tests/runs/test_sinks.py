"""What a run tells its sinks: everything, in order, and once."""

import dataclasses

import pytest
import tiny_problem

import mixfl
from mixfl.engine.base import Progress
from mixfl.errors import MixflError
from mixfl.runs.plan import plan_of
from mixfl.runs.sinks.base import Sink, Sinks, Start
from mixfl.runs.sinks.terminal import Plain
from mixfl.runs.training import run

METHODS = [name for name in vars(Sink) if not name.startswith("_")]


class Recorder(Sink):
    """Keeps the calls; from a sink that lacks a method, the test would not learn of it."""

    def __init__(self):
        self.calls = []

    def told(self, name) -> list:
        return [argument for method, argument in self.calls if method == name]


for name in METHODS:
    setattr(Recorder, name, lambda self, it, name=name: self.calls.append((name, it)))

START = Start("2wgt", "problem", {}, rounds=10, notes=["a layer is low-rank"])


def trained(out=None, problem=tiny_problem.problem, resume=False, **settings):
    recorder = Recorder()
    plan = plan_of(problem, "pt", {"rounds": 4, "eval_every": 2, "devices": 1, **settings})
    return run(plan, out, resume, recorder), recorder


def test_a_run_from_beginning_to_end(tmp_path):
    result, recorder = trained(tmp_path / "run", checkpoint_every=3)
    (start,) = recorder.told("begin")
    assert (start.label, start.round, start.rounds, start.rows) == ("pt", 0, 4, ())
    assert start.config == result.config
    assert recorder.told("advance") == [1, 2, 3, 4]
    assert recorder.told("evaluated") == result.metrics
    assert [row["round"] for row in result.metrics] == [2, 4]
    assert recorder.told("saved") == [3, 4]
    assert recorder.told("finished") == [result.params]
    assert recorder.calls[0][0] == "begin"
    assert [name for name, _ in recorder.calls[-2:]] == ["finished", "ended"]
    assert recorder.told("ended") == [None]


def test_a_run_without_a_folder_saves_nothing():
    assert trained(checkpoint_every=1)[1].told("saved") == []


def test_a_resumed_run_begins_where_it_was(tmp_path):
    def fail(params):
        if next(calls) == 4:
            raise MixflError("stopped")
        return {"loss": 1.0}

    calls = iter(range(100))
    problem = dataclasses.replace(tiny_problem.problem, evaluate=fail)
    settings = dict(eval_every=1, checkpoint_every=2)
    recorder = Recorder()
    plan = plan_of(problem, "pt", {"rounds": 4, "devices": 1, **settings})
    with pytest.raises(MixflError, match="stopped"):
        run(plan, tmp_path / "run", False, recorder)
    (error,) = recorder.told("ended")
    assert str(error) == "stopped"
    assert recorder.told("finished") == []
    result, again = trained(tmp_path / "run", problem, resume=True, **settings)
    (start,) = again.told("begin")
    assert start.round == 2
    assert again.told("advance") == [3, 4]
    assert [row["round"] for row in again.told("evaluated")] == [3, 4]
    assert [row["round"] for row in result.metrics] == [1, 2, 3, 4]
    assert "going on from the checkpoint of round 2" in again.told("note")


def test_a_sink_that_fails_ends_the_run(tmp_path):
    class Full(Recorder):
        def evaluated(self, row):
            raise MixflError("no room")

    sink = Full()
    plan = plan_of(tiny_problem.problem, "pt", {"rounds": 4, "eval_every": 2})
    with pytest.raises(MixflError, match="no room"):
        run(plan, tmp_path / "run", False, sink)
    assert [str(e) for e in sink.told("ended")] == ["no room"]
    assert mixfl.load(tmp_path / "run").status == "failed"


def test_several_sinks_are_told_as_one():
    one, two = Recorder(), Recorder()
    both = Sinks([one, two])
    for name in METHODS:
        getattr(both, name)(name)
    assert one.calls == two.calls == [(name, name) for name in METHODS]


def test_the_notes_of_a_start_are_shown_once_for_several_runs(capsys):
    report = Plain()
    for label in ("fedavg", "pt"):
        report.begin(START._replace(label=label))
        report.note("its own")
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["fedavg: a layer is low-rank", "fedavg: its own", "pt: its own"]


def test_progress_of_a_long_round_reaches_the_sinks():
    settings = dict(rounds=1, cohort_chunk=2, central_chunk=1)
    _, recorder = trained(**settings)
    progress = recorder.told("within")
    assert all(isinstance(p, Progress) and p.round == 0 for p in progress)
    assert progress[-1].share == 1.0
    assert "5 of 5 clients" in progress[-1].words

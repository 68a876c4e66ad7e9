"""A run's folder: what is in it, that it repeats, resumes and survives, bit for bit."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_problem
from run_folders import (
    ROUNDS,
    TINY,
    StopError,
    adaptive,
    after_round,
    array_files,
    assert_equal_trees,
    assert_same,
    cli,
    evaluating,
    events,
    expected_events,
    flip,
    lines,
    snapshot,
    stopping,
    timeless,
    train,
    train_until,
    truncate,
)
from safetensors.numpy import load_file

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.keys import DP_KEYS
from mixfl.engine import Simulator
from mixfl.errors import Interrupted, MixflError
from mixfl.runs import reading
from mixfl.runs.checkpoint import KEEP, Checkpoints
from mixfl.runs.loop import Loop

TIMEOUT = 300  # seconds; only against hanging


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folders of uninterrupted runs, one per algorithm, made when first asked for."""
    made = {}

    def run(algorithm):
        if algorithm not in made:
            made[algorithm] = tmp_path_factory.mktemp("whole") / algorithm
            train(algorithm, made[algorithm])
        return made[algorithm]

    return run


# What the folder holds


def test_folder(whole):
    out = whole("2wgt")
    assert {p.name for p in out.iterdir()} == {
        ".lock", "config.toml", "metrics.jsonl", "checkpoints", "tensorboard", "status.json",
        "model.safetensors", "origin.json", "log.jsonl",
    }  # fmt: skip
    assert json.loads((out / "status.json").read_text()) == {"status": "finished", "round": ROUNDS}
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["4", "6", "7"]
    assert len(list((out / "checkpoints").iterdir())) == KEEP


def test_metrics_are_flat_and_of_the_evaluated_rounds(tmp_path):
    result = train("pt", tmp_path / "run", eval_every=3)
    rows = lines(tmp_path / "run")
    assert [row["round"] for row in rows] == [3, 6, 7]
    assert rows == result.metrics
    for row in rows:
        assert {"eval/loss", "comm/down_bytes", "comm/up_bytes", "time/round_ms"} < row.keys()
        assert all(isinstance(v, int | float) for v in row.values())
        assert row["time/round_ms"] > 0
        assert row["clients/federated"] == 5
        assert row["clients/rejected"] == 0
    assert rows[-1]["eval/loss"] == float(tiny_problem.evaluate(result.params)["loss"])


X = 4 * (tiny_problem.FEATURES + 1)  # bytes of the model, and of a gradient
UP = X + 4 + 4  # Delta_i, p_i, K_i
DEALT = 2 * 3 * 4 * (tiny_problem.FEATURES + 1)  # K |B_i| central examples
BYTES = {
    "fedavg": (X, UP), "pt": (X, UP), "1wgt": (2 * X, UP), "2wgt": (2 * X, UP),
    "example-transfer": (X + DEALT, UP), "oracle": (0, 0), "central": (0, 0),
    "pretrain": (X, UP), "baseline": (X, UP), "server-learning": (X, UP), "fedclg": (2 * X, UP),
    "mimelite": (2 * X, UP + X), "scaffold": (2 * X, UP + X),
}  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_are_those_of_the_messages(algorithm, whole):
    first, *_, last = ((r["comm/down_bytes"], r["comm/up_bytes"]) for r in lines(whole(algorithm)))
    down, up = BYTES[algorithm]
    if algorithm == "2wgt":  # with momentum at the clients, deltas do not tell the gradients
        up += X
    assert last == (down, up)
    assert first == ((0, 0) if algorithm == "pretrain" else last)


def test_bytes_of_two_way_with_plain_sgd():
    s = mixfl.Settings(cohort_size=5)
    algorithm = ALGORITHMS["2wgt"].build(tiny_problem.problem, s)
    assert Simulator(tiny_problem.problem, algorithm, s).round_bytes(0) == BYTES["2wgt"]


def test_events_are_the_metrics(whole):
    found = events(whole("2wgt"))
    assert found == expected_events(lines(whole("2wgt")))
    assert len(found) > 5 * ROUNDS


def test_model_is_plain_safetensors(whole):
    arrays = load_file(whole("2wgt") / "model.safetensors")
    assert {k: (a.shape, a.dtype) for k, a in arrays.items()} == {
        "w": ((tiny_problem.FEATURES,), np.float32), "b": ((), np.float32)
    }  # fmt: skip


# Reading it back


def test_load(whole, tmp_path):
    result = train("2wgt", tmp_path / "run")
    run = mixfl.load(tmp_path / "run")
    assert run.status == "finished"
    assert run.config == result.config
    assert run.metrics == result.metrics
    assert run.params.keys() == {"w", "b"}
    assert all((run.params[k] == result.params[k]).all() for k in run.params)
    assert run.params["w"].tobytes() == mixfl.load(whole("2wgt")).params["w"].tobytes()


class Layer(NamedTuple):
    w: jax.Array
    b: jax.Array


SHAPES = {
    "bare array": jnp.arange(3.0),
    "dict": {"hidden": {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}, "scale": jnp.ones(())},
    "list": [jnp.ones(2), [jnp.zeros(1), {"a": jnp.ones(1)}]],
    "eleven": [jnp.full(1, float(i)) for i in range(11)],
    "params": {"params": jnp.ones(2)},
    "slashes": {"a/b": jnp.ones(1), "a": {"b": jnp.zeros(1)}},
    "half": {"w": jnp.ones(2, jnp.bfloat16)},
}


def train_on(params, out):
    """One round that moves every parameter."""

    def distance(p):
        return sum(jnp.sum((x.astype(jnp.float32) - 20) ** 2) for x in jax.tree.leaves(p))

    problem = mixfl.Problem(lambda key: params, [mixfl.Central(distance)])
    return mixfl.train(problem, "central", out=out, rounds=1, local_steps=1).params


@pytest.mark.parametrize("shape", SHAPES)
def test_load_gives_dicts_and_lists(shape, tmp_path):
    params = train_on(SHAPES[shape], tmp_path / "run")
    for before, after in zip(*map(jax.tree.leaves, (SHAPES[shape], params)), strict=True):
        assert (before != after).all()
    assert_equal_trees(mixfl.load(tmp_path / "run").params, params)


def test_load_fills_another_kind_of_pytree(tmp_path):
    like = (Layer(jnp.ones((2, 2)), jnp.zeros(2)), Layer(jnp.ones(2), jnp.zeros(())))
    params = train_on(like, tmp_path / "run")
    assert_equal_trees(mixfl.load(tmp_path / "run", like=like).params, params)
    plain = mixfl.load(tmp_path / "run").params
    assert_equal_trees(plain, [{"w": p.w, "b": p.b} for p in params])
    with pytest.raises(MixflError, match=r"has the arrays .*0/b.*, expected \['w'\]"):
        mixfl.load(tmp_path / "run", like={"w": like[0].w})
    with pytest.raises(MixflError, match=r"0/w with shape \(2, 2\), expected \(3,\)"):
        mixfl.load(tmp_path / "run", like=(Layer(np.ones(3), like[0].b), like[1]))


def test_load_of_an_unfinished_run(tmp_path):
    train_until("fedavg", tmp_path / "run", at=4)
    run = mixfl.load(tmp_path / "run")
    assert (run.status, run.params) == ("failed", None)
    assert [row["round"] for row in run.metrics] == [1, 2, 3]


def test_load_of_no_run(tmp_path):
    with pytest.raises(MixflError, match="holds no run"):
        mixfl.load(tmp_path)


# Repeating and resuming


@pytest.mark.parametrize("algorithm", ["2wgt", "pretrain", "oracle"])
def test_config_repeats_the_run(algorithm, monkeypatch, tmp_path):
    first, again = tmp_path / "first", tmp_path / "elsewhere" / "again"
    keys = {**adaptive(algorithm), "rounds": 4, "w_f": 0.3, "seed": 7, "local_steps": 3}
    keys |= {"cohort_chunk": 2} if "cohort_chunk" in ALGORITHMS[algorithm].uses else {}
    sets = [arg for k, v in keys.items() for arg in ("--set", f"{k}={v}")]
    monkeypatch.chdir(TINY.parent)
    task = f"{TINY.name}:problem"
    assert cli(monkeypatch, "run", task, "--algorithm", algorithm, "--out", first, *sets) == 0
    config = mixfl.load(first).config
    unset = DP_KEYS | {"local_epochs", "cohort_cap"}
    uses = ALGORITHMS[algorithm].uses - {"central_batch"}  # not where no batch is drawn
    assert uses - unset <= config.keys()
    # best_by = auto depends on what `evaluate` returns; download_gradient = auto is as `download`.
    auto = {k for k, value in config.items() if value == "auto"}
    assert auto <= {"best_by", "download_gradient"}
    assert keys.items() <= config.items()

    monkeypatch.chdir(tmp_path)
    assert cli(monkeypatch, "run", "--config", first / "config.toml", "--out", again) == 0
    assert_same(again, first)
    assert mixfl.load(again).config == config


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resumed_equals_uninterrupted(algorithm, whole, tmp_path):
    out = tmp_path / "run"
    train_until(algorithm, out, at=3)  # after the checkpoint of round 2
    assert not (out / "model.safetensors").exists()
    train_until(algorithm, out, at=4, resume=True)  # rounds 3, 4, 5, and not 6
    assert [row["round"] for row in lines(out)] == [1, 2, 3, 4, 5]
    result = train(algorithm, out, resume=True)
    assert_same(out, whole(algorithm))
    assert_equal_trees(result.params, mixfl.load(whole(algorithm)).params)
    assert timeless(result.metrics) == timeless(lines(whole(algorithm)))
    assert events(out) == expected_events(lines(out))


def test_stopped_before_the_first_checkpoint(whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    train_until("pt", out, at=2)
    monkeypatch.setattr(time, "time", lambda: 2e9)  # much later: another file of events
    train("pt", out, resume=True)
    assert len(list((out / "tensorboard").iterdir())) == 2
    assert_same(out, whole("pt"))
    assert events(out) == expected_events(lines(out))


def test_half_a_line_and_half_an_event_are_made_again(whole, tmp_path):
    out = tmp_path / "run"
    train_until("1wgt", out, at=6)
    for file in (out / "metrics.jsonl", *(out / "tensorboard").iterdir()):
        content = file.read_bytes()
        file.write_bytes(content + content[-30:-10])
    train("1wgt", out, resume=True)
    assert_same(out, whole("1wgt"))
    assert events(out) == expected_events(lines(out))


def test_damaged_row_is_left_out_and_said(tmp_path, capsys):
    out = tmp_path / "run"
    train_until("fedavg", out, at=6)
    content = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text(content.replace('"round": 2', '"ro\0nd": 2'))
    train("fedavg", out, resume=True, progress=True)
    assert "metrics.jsonl is damaged: round 2 is missing" in capsys.readouterr().err
    assert [row["round"] for row in lines(out)] == [1, 3, 4, 5, 6, 7]


def test_killed_before_the_config_was_there(whole, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / ".lock").touch()
    (out / ".config.toml.partial").write_text("task = ")
    train("fedavg", out, resume=True)
    assert_same(out, whole("fedavg"))
    assert not list(out.glob(".*.partial"))


def test_killed_between_model_and_status(whole, tmp_path):
    out = tmp_path / "run"
    train("fedavg", out)
    (out / "status.json").write_text('{"status": "running", "round": 0}')
    train("fedavg", out, resume=True)
    assert mixfl.load(out).status == "finished"
    assert_same(out, whole("fedavg"))


def test_resuming_a_finished_run_changes_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    result = train("2wgt", out)
    before = snapshot(out)
    again = train("2wgt", out, resume=True, progress=True)
    assert snapshot(out) == before
    assert "finished already" in capsys.readouterr().err
    assert_equal_trees(again.params, result.params)
    assert again.metrics == result.metrics


# Signals and other processes


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_says_how_to_go_on(number, whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        after_round(patch, 3, lambda: signal.raise_signal(number))
        with pytest.raises(Interrupted, match=r"after round 4 of 7.*--resume"):
            train("2wgt", out, checkpoint_every=100)
    assert signal.getsignal(number) is before
    assert json.loads((out / "status.json").read_text()) == {"status": "interrupted", "round": 4}
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["4"]
    assert [row["round"] for row in lines(out)] == [1, 2, 3, 4]
    train("2wgt", out, checkpoint_every=100, resume=True)
    assert_same(out, whole("2wgt"))


def test_second_signal_stops_at_once(tmp_path, monkeypatch):
    """Also while an evaluation is under way that would never end."""
    ended = threading.Event()
    hang = lambda n: ended.wait(TIMEOUT) if n == 3 else None  # noqa: E731

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    after_round(monkeypatch, 4, twice)
    with pytest.raises(KeyboardInterrupt):
        train("fedavg", tmp_path / "run", evaluating("fedavg", hang), devices=1)
    assert not ended.is_set()
    assert [row["round"] for row in lines(tmp_path / "run")] == [1, 2]
    ended.set()


# Evaluation beside the rounds


def test_evaluation_runs_beside_the_following_rounds(tmp_path, monkeypatch):
    """The evaluation of round 4 waits for round 6, which therefore can't wait for it."""
    reached = threading.Event()
    waited = []
    after_round(monkeypatch, 6, reached.set)
    wait = lambda n: waited.append(reached.wait(TIMEOUT)) if n == 1 else None  # noqa: E731
    settings = dict(rounds=8, eval_every=4, checkpoint_every=100, devices=1)
    train("pt", tmp_path / "run", evaluating("pt", wait), **settings)
    assert waited == [True]
    assert [row["round"] for row in lines(tmp_path / "run")] == [4, 8]


def test_no_round_runs_beside_an_evaluation_where_cpu_devices_share_a_cohort(monkeypatch):
    """They would wait for each other in a pool of threads that has no more than one for each."""
    order = []
    problem = evaluating("pt", lambda n: order.append(f"evaluation {n}"))
    check = Loop._check
    noted = lambda self, r: (order.append(f"round {r.round}"), check(self, r))  # noqa: E731
    monkeypatch.setattr(Loop, "_check", noted)
    train("pt", None, problem, rounds=3, devices=2)
    assert order == [
        "evaluation 0", "round 1", "evaluation 1", "round 2", "evaluation 2", "round 3",
        "evaluation 3",
    ]  # fmt: skip


def settled_at_once(monkeypatch):
    """The synchronous way: every evaluation is waited for before the next round."""
    evaluate = Loop._evaluate

    def synchronous(self, *arguments):
        evaluate(self, *arguments)
        self._settle()

    monkeypatch.setattr(Loop, "_evaluate", synchronous)


@pytest.mark.parametrize("algorithm", ["2wgt", "oracle"])
def test_rows_are_those_of_the_synchronous_way(algorithm, tmp_path, monkeypatch):
    settings = dict(rounds=20, eval_every=3, checkpoint_every=100, devices=1)
    train(algorithm, tmp_path / "beside", **settings)
    settled_at_once(monkeypatch)
    train(algorithm, tmp_path / "alone", **settings)
    assert_same(tmp_path / "beside", tmp_path / "alone")


def test_rows_are_written_before_the_checkpoint_that_has_them(tmp_path, monkeypatch):
    """At every checkpoint, as a kill would find the folder."""
    out, found = tmp_path / "run", {}
    save = Checkpoints.save

    def saving(self, round, *rest, **more):
        save(self, round, *rest, **more)
        found[round] = [row["round"] for row in lines(out)]

    monkeypatch.setattr(Checkpoints, "save", saving)
    train("pt", out, rounds=9, eval_every=2, checkpoint_every=3, devices=1)
    assert found == {3: [2], 6: [2, 4, 6], 9: [2, 4, 6, 8, 9]}


def test_a_loss_that_is_not_finite_is_told_for_its_round(tmp_path):
    base = tiny_problem.problem
    calls = iter(range(1000))

    def evaluate(params):
        return {"loss": np.nan if next(calls) == 2 else 1.0}

    problem = dataclasses.replace(base, evaluate=evaluate)
    with pytest.raises(mixfl.Diverged, match="diverged in round 4") as error:
        train("pt", tmp_path / "run", problem, rounds=20, eval_every=2, checkpoint_every=100,
              devices=1)  # fmt: skip
    assert error.value.round == 4
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["round"]) == ("diverged", 4)
    assert [row["round"] for row in lines(tmp_path / "run")] == [2]


def test_a_model_is_not_used_up_while_it_is_evaluated(tmp_path, monkeypatch):
    """Rounds 3 and 4 run before the model of round 2 is looked at."""
    reached, seen = threading.Event(), []
    after_round(monkeypatch, 4, reached.set)

    def evaluate(params):
        assert not seen or reached.wait(TIMEOUT)
        seen.append(jax.tree.map(np.array, params))
        return {}

    problem = dataclasses.replace(tiny_problem.problem, evaluate=evaluate)
    train("pt", None, problem, rounds=5, eval_every=2, checkpoint_every=100, devices=1)
    two = dict(rounds=2, devices=1, **adaptive("pt"))
    expected = mixfl.train(tiny_problem.problem, "pt", **two).params
    assert_equal_trees(seen[1], expected)


WAITING = f"""
import dataclasses, pathlib, sys, time
sys.path.insert(0, {str(TINY.parent)!r})
import tiny_problem
go = pathlib.Path(__file__).with_name("go")
calls = -1  # 0: before the run

def evaluate(params):
    global calls
    calls += 1
    while calls == 3 and not go.exists():
        time.sleep(0.01)
    return tiny_problem.evaluate(params)

problem = dataclasses.replace(tiny_problem.problem, evaluate=evaluate)
"""


@pytest.mark.system
def test_ctrl_c_and_a_second_process(monkeypatch, capfd, tmp_path):
    """A process that waits in round 3 is disturbed by a second one, and then gets Ctrl-C."""
    (tmp_path / "waiting.py").write_text(WAITING)
    out = tmp_path / "run"
    task = f"{tmp_path / 'waiting.py'}:problem"
    command = ["run", task, "--algorithm", "2wgt", "--out", str(out)]
    pipe, env = subprocess.PIPE, os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    arguments = [Path(sys.executable).with_name("mixfl"), *command]
    child = subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, env=env)
    try:
        while len(reading.read_metrics(out)) < 2:
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.01)
        assert cli(monkeypatch, *command, "--resume") == 2
        assert f"another process is writing to {out}" in capfd.readouterr().err
        child.send_signal(signal.SIGINT)
        (tmp_path / "go").touch()
        _, err = child.communicate()
    finally:
        child.kill()
    assert child.returncode == 130
    assert "stopped after round" in err
    assert "--resume" in err
    assert "Traceback" not in err
    assert mixfl.load(out).status == "interrupted"
    assert cli(monkeypatch, *command, "--resume") == 0
    assert cli(monkeypatch, *command[:-1], tmp_path / "whole") == 0
    assert_same(out, tmp_path / "whole")


# Damage


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damaged_checkpoint_falls_back(damage, whole, tmp_path, capfd):
    out = tmp_path / "run"
    train_until("2wgt", out, at=7)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["2", "4", "6"]
    for file in array_files(out / "checkpoints" / "6"):
        damage(file)
    train("2wgt", out, resume=True, progress=True)
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "the checkpoint of round 6 is damaged" in err
    assert "going back to the one before it" in err
    assert "going on from the checkpoint of round 4" in err
    assert_same(out, whole("2wgt"))
    assert events(out) == expected_events(lines(out))


def test_no_damage_to_a_checkpoint_goes_unnoticed(tmp_path):
    """A flipped byte in any file: the state of that round as it was, or the one before it."""
    states = [
        {"x": np.arange(50, dtype=np.float32) + round, "n": np.int32(round)} for round in (1, 2)
    ]
    meta = {"rejected": 3}
    path = tmp_path / "checkpoints"
    notes = []
    checkpoints = Checkpoints(path, notes.append)
    checkpoints.save(1, states[0], meta)
    checkpoints.save(2, states[1], meta)
    checkpoints.close()
    saved = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    newest = [p for p in saved if path / "2" in p.parents and saved[p]]
    assert any(p in array_files(path / "2") for p in newest)
    back = 0
    for file in newest:
        n, count = len(saved[file]), saved[file].find(b"3")  # or the 3 that is in meta
        for at in {0, n // 3, n // 2, n - 1, max(count, 0) if file.name == "metadata" else 0}:
            for p, content in saved.items():
                p.parent.mkdir(parents=True, exist_ok=True)
                p.write_bytes(content)
            flip(file, at)
            checkpoints = Checkpoints(path, notes.append)
            round, state, found = checkpoints.latest(states[0])
            checkpoints.close()
            expected = states[round - 1]
            assert found == meta
            assert state["x"].tobytes() == expected["x"].tobytes(), (file, at)
            assert state["n"] == expected["n"]
            back += round == 1
    assert len(notes) == back
    assert back >= len(array_files(path / "1"))


def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path):
    """The same settings with another model: neither silently used nor deleted."""
    small = tiny_problem.problem
    stops = stopping("fedavg", 4)
    with pytest.raises(StopError):
        mixfl.train(stops, "fedavg", rounds=6, checkpoint_every=1, out=tmp_path / "r")
    kept = sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir())
    assert kept

    def init(key):
        return small.init(key) | {"unused": jnp.zeros(3)}

    larger = dataclasses.replace(small, init=init)
    with pytest.raises(MixflError, match="another model"):
        mixfl.train(larger, "fedavg", rounds=6, checkpoint_every=1, out=tmp_path / "r", resume=True)
    assert sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir()) == kept


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_training_can_start_from_given_weights(kind, tmp_path):
    given = jax.tree.map(kind, tiny_problem.problem.init(jax.random.key(5)))
    p = dataclasses.replace(tiny_problem.problem, init=lambda key: given)
    first = mixfl.train(p, "2wgt", rounds=2, out=tmp_path / "r")
    again = mixfl.train(p, "2wgt", rounds=2, out=tmp_path / "r", resume=True)
    jax.tree.map(np.testing.assert_array_equal, first.params, again.params)
    assert np.isfinite(jax.tree.leaves(given)[0]).all()  # not donated away

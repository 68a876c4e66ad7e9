"""Runs in Weights & Biases, offline, read back from its files: everything is there, and once."""

import dataclasses
import json
import signal
import sys

import pytest
import tiny_problem
from run_folders import StopError, after_round, lines, stopping

import mixfl
from mixfl.errors import Interrupted, MixflError

wandb = pytest.importorskip("wandb")
ROUNDS = 5


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))  # no key, and nothing left behind
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


def train(out, problem=tiny_problem.problem, **changes):
    settings = {"rounds": ROUNDS, "checkpoint_every": 2, "devices": 1, "track": "wandb", **changes}
    return mixfl.train(problem, "pt", out=out, **settings)


def records(tmp_path) -> list:
    """Of all starts, in their order."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    found = []
    for file in sorted(
        tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime_ns
    ):
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            found.append(record)
    return found


def history(tmp_path) -> list[dict]:
    rows = []
    for record in records(tmp_path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return [{k: v for k, v in r.items() if k == "_step" or not k.startswith("_")} for r in rows]


def expected(out, key="round"):
    return [
        {"_step": r["round"]} | {k: v for k, v in r.items() if k != "round"} for r in lines(out)
    ]


def exit_codes(tmp_path):
    return [r.exit.exit_code for r in records(tmp_path) if r.WhichOneof("record_type") == "exit"]


def test_metrics_config_and_names(tmp_path):
    out = tmp_path / "the run"
    found = dataclasses.replace(tiny_problem.problem, name="mine")
    result = train(out, found, eval_every=2)
    assert history(tmp_path) == expected(out)
    run = next(r.run for r in records(tmp_path) if r.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("mine", "the run")
    config = {u.key: json.loads(u.value_json) for u in run.config.update}
    assert {k: config[k] for k in result.config} == result.config
    assert exit_codes(tmp_path) == [0]
    assert json.loads((out / "wandb.json").read_text()) == {
        "id": run.run_id, "logged": ROUNDS, "finished": True,
    }  # fmt: skip


def test_interrupted_and_resumed_in_the_same_run(tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        after_round(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted):
            train(out)
    train(out, resume=True)
    train(out, resume=True)  # it is finished: nothing more is logged
    timeless = [{k: v for k, v in r.items() if k != "time/round_ms"} for r in history(tmp_path)]
    assert timeless == [{k: v for k, v in r.items() if k != "time/round_ms"} for r in expected(out)]
    ids = {r.run.run_id for r in records(tmp_path) if r.WhichOneof("record_type") == "run"}
    assert len(ids) == 1
    assert exit_codes(tmp_path) == [1, 0]


def test_rounds_made_again_are_logged_once(tmp_path):
    """Stopped after round 3, with a checkpoint of round 2."""
    out = tmp_path / "run"
    with pytest.raises(StopError):
        train(out, stopping("pt", 4))
    train(out, resume=True)
    assert [r["_step"] for r in history(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_row_does_not_wait_for_the_next_one(tmp_path, monkeypatch):
    """W&B would hold it back, and a kill would lose what the run folder says that it has."""
    at_once, log = [], wandb.Run.log

    def spied(run, values, step, commit=None):
        at_once.append(commit)
        return log(run, values, step=step, commit=commit)

    monkeypatch.setattr(wandb.Run, "log", spied)
    train(tmp_path / "run")
    assert at_once == [True] * ROUNDS


def test_a_failure_is_said_once_and_ends_no_run(tmp_path, monkeypatch, capsys):
    def broken(**more):
        raise wandb.errors.CommError("no such server")

    monkeypatch.setattr(wandb, "init", broken)
    assert len(train(tmp_path / "run", progress=True).metrics) == ROUNDS
    said = capsys.readouterr().err
    assert said.count("Weights & Biases failed (no such server)") == 1
    assert "--resume --track wandb" in said


def test_not_installed_and_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(MixflError, match="wandb login"):
        train(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MixflError, match=r"pip install 'mixfl\[wandb\]'"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()

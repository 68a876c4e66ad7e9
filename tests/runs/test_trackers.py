"""Runs in MLflow, read back from a real store (SQLite): everything is there, and once."""

import dataclasses
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tiny_problem
from mlflow import MlflowClient
from run_folders import TINY, StopError, after_round, cli, lines, snapshot

import mixfl
from mixfl.errors import Interrupted, MixflError
from mixfl.runs.sinks import mlflow as trackers

ROUNDS = 5


@pytest.fixture(scope="module", autouse=True)
def client(tmp_path_factory):
    """The store is made once, which takes seconds; artifacts go to the current folder."""
    home = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
            patch.delenv(name, raising=False)
        yield MlflowClient()


def problem(action=lambda n: None, **metrics):
    """`action(n)` is called before the n-th evaluation (0: before the run)."""
    calls = iter(range(1000))

    def evaluate(params):
        action(next(calls))
        return {**tiny_problem.evaluate(params), **metrics}

    return dataclasses.replace(tiny_problem.problem, evaluate=evaluate)


def train(out, found=None, **changes):
    settings = {"rounds": ROUNDS, "checkpoint_every": 2, "devices": 1, "track": "mlflow", **changes}
    return mixfl.train(found or problem(), "pt", out=out, **settings)


def run_of(client, out):
    return client.get_run(json.loads((out / "mlflow.json").read_text())["run_id"])


def history(client, out) -> dict:
    """Key: [(step, value)], in the order in which they were logged."""
    run = run_of(client, out)
    return {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }


def expected(rows) -> dict:
    keys = [k for k in rows[0] if k != "round"]
    return {k: [(row["round"], row[k]) for row in rows] for k in keys}


def assert_whole(client, out):
    """The times of rounds that were made again are those of the first time."""
    found, rows = history(client, out), expected(lines(out))
    assert [step for step, _ in found.pop("time/round_ms")] == list(range(1, ROUNDS + 1))
    rows.pop("time/round_ms")
    assert found == rows
    info = run_of(client, out).info
    assert info.status == "FINISHED"
    files = {f.path for f in client.list_artifacts(info.run_id)}
    assert files == {"config.toml", "model.safetensors"}


def test_metrics_params_and_files(client, tmp_path):
    out = tmp_path / "the run"
    found = dataclasses.replace(problem(), name="my problem", files={"words.txt": "a b"})
    result = train(out, found, eval_every=2)
    run = run_of(client, out)
    assert history(client, out) == expected(result.metrics)
    assert {step for step, _ in history(client, out)["eval/loss"]} == {2, 4, 5}
    assert run.data.params == {k: str(v) for k, v in result.config.items()}
    assert run.info.run_name == "the run"
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "my problem"
    for name in ("config.toml", "model.safetensors", "words.txt"):
        there = Path(client.download_artifacts(run.info.run_id, name))
        assert there.read_bytes() == (out / name).read_bytes()


def test_names_that_mlflow_does_not_allow(client, tmp_path):
    names = {
        "recall@10": "eval/recall_at_10", "a+b (c)": "eval/a_b _c_", "/a": "eval__a",
        "../a": "eval_.._a", "é": "eval/é",
    }  # fmt: skip
    train(tmp_path / "run", problem(**{key: float(i) for i, key in enumerate(names)}))
    found = history(client, tmp_path / "run")
    for i, name in enumerate(names.values()):
        assert found[name] == [(t, i) for t in range(1, ROUNDS + 1)]


def test_a_value_that_is_not_finite_is_left_out(client, tmp_path):
    train(tmp_path / "run", problem(odd=float("nan")))
    assert "eval/odd" not in history(client, tmp_path / "run")


def test_interrupted_and_resumed(client, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        after_round(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted):
            train(out)
    killed = run_of(client, out).info
    assert killed.status == "KILLED"
    train(out, resume=True)
    assert run_of(client, out).info.run_id == killed.run_id
    assert_whole(client, out)


def test_rounds_made_again_are_logged_once(client, tmp_path):
    """Stopped after round 3, with a checkpoint of round 2."""
    out = tmp_path / "run"

    def stop(n):
        if n == 4:
            raise StopError("stopped")

    with pytest.raises(StopError):
        train(out, problem(stop))
    assert run_of(client, out).info.status == "FAILED"
    assert len(history(client, out)["eval/loss"]) == 3
    train(out, resume=True)
    assert_whole(client, out)


@pytest.mark.parametrize("content", ["", '{"run_id": "no id"}', json.dumps({"run_id": 32 * "0"})])
def test_a_run_that_mlflow_does_not_know_is_logged_anew(content, client, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        after_round(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted):
            train(out)
    (out / "mlflow.json").write_text(content)
    train(out, resume=True)
    assert_whole(client, out)


def test_a_finished_run_is_logged_once_and_also_later(client, tmp_path):
    out = tmp_path / "run"
    train(out, track=None)
    assert not (out / "mlflow.json").exists()
    train(out, resume=True)
    assert_whole(client, out)
    before, files = run_of(client, out).to_dictionary(), snapshot(out)
    train(out, resume=True)
    assert_whole(client, out)
    assert (run_of(client, out).to_dictionary(), snapshot(out)) == (before, files)


def test_diverged(client, tmp_path):
    losses = iter([1.0, 1.0, 1.0, float("nan")])
    found = dataclasses.replace(problem(), evaluate=lambda params: {"loss": next(losses)})
    with pytest.raises(mixfl.Diverged):
        train(tmp_path / "run", found)
    assert run_of(client, tmp_path / "run").info.status == "FAILED"
    assert history(client, tmp_path / "run")["eval/loss"] == [(1, 1.0), (2, 1.0)]


def test_a_failure_in_mid_run_is_said_once_and_made_up_for(client, tmp_path, capsys):
    """MLflow refuses to log to a run that is deleted."""
    out = tmp_path / "run"

    def delete(n):
        if n == 3:
            client.delete_run(run_of(client, out).info.run_id)

    result = train(out, problem(delete), progress=True)
    assert len(result.metrics) == ROUNDS
    said = [line for line in capsys.readouterr().err.splitlines() if "MLflow" in line]
    assert len(said) == 1
    assert "going on without it" in said[0]
    run = run_of(client, out)
    assert run.info.status == "RUNNING"
    client.restore_run(run.info.run_id)
    train(out, resume=True)
    assert run_of(client, out).info.run_id == run.info.run_id
    assert_whole(client, out)


def test_a_server_that_is_not_there(client, tmp_path, capsys, monkeypatch):
    """The command that is said logs the run later."""
    out = tmp_path / "run"
    words = ["run", f"{TINY}:problem", "--algorithm", "pt", "--rounds", ROUNDS, "--out", out]
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        assert cli(monkeypatch, *words, "--track", "mlflow") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "MLflow failed" in line]
    assert len(said) == 1
    assert cli(monkeypatch, *shlex.split(said[0].partition(": mixfl ")[2])) == 0
    assert_whole(client, out)


def test_compare(client, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    words = ["compare", f"{TINY}:problem", "--algorithms", "pt,fedavg", "--rounds", ROUNDS]
    assert cli(monkeypatch, *words, "--jobs", 1, "--out", tmp_path, "--track", "mlflow") == 0
    for name in ("pt", "fedavg"):
        assert_whole(client, tmp_path / name)
    mine = client.get_experiment_by_name("mine").experiment_id
    assert {r.info.run_name for r in client.search_runs([mine])} == {"pt", "fedavg"}


BEGIN = """
import sys
from pathlib import Path
from types import SimpleNamespace
from mixfl.runs.sinks.base import Start
from mixfl.runs.sinks.trackers import tracker

folder = SimpleNamespace(path=Path(sys.argv[1]), files={})
folder.path.mkdir()
tracker("mlflow")(folder, sys.exit).begin(Start("run", "together", {"key": 1}, rounds=1))
"""


@pytest.mark.slow
def test_runs_that_begin_together_make_one_store(tmp_path):
    """MLflow alone would leave a broken database."""
    store = f"sqlite:///{tmp_path}/new.db"
    several = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN, tmp_path / str(i)],
            env=os.environ | {"MLFLOW_TRACKING_URI": store}, stderr=subprocess.PIPE,
        )
        for i in range(2)
    ]  # fmt: skip
    for process in several:
        said = process.communicate()[1].decode()
        assert process.returncode == 0, said
    client = MlflowClient(store)
    found = [run_of(client, tmp_path / str(i)) for i in range(2)]
    assert len({run.info.run_id for run in found}) == 2
    assert len({run.info.experiment_id for run in found}) == 1


def test_the_lock_is_in_a_folder_of_the_users_own(tmp_path, monkeypatch):
    """Whoever can open a file can hold its lock, and keep us waiting."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blocked = os.open(tempfile.gettempdir(), os.O_RDONLY)
    fcntl.flock(blocked, fcntl.LOCK_EX)  # as anybody could
    try:
        with (
            trackers.one_at_a_time(),
            trackers.lock_file("mlflow") as other,
            pytest.raises(BlockingIOError),
        ):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(blocked)
    assert (tmp_path / "cache/mixfl/locks").stat().st_mode & 0o777 == 0o700


def test_without_a_place_for_a_lock_it_goes_on(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with trackers.one_at_a_time():
        pass


def test_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MixflError, match=r"pip install 'mixfl\[mlflow\]'"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_tracker_and_no_folder(tmp_path):
    with pytest.raises(MixflError, match=r"tracker 'mlfow'.*mean 'mlflow'.*Valid: mlflow, wandb"):
        train(tmp_path / "run", track="mlfow")
    assert not (tmp_path / "run").exists()
    with pytest.raises(MixflError, match="give out"):
        train(None)


def test_the_user_has_the_last_word_on_telemetry(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    seen = telemetry_seen(monkeypatch)
    train(tmp_path / "kept", rounds=1)
    assert set(seen) == {"false"}
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "false"


def test_telemetry_is_off_only_while_mlflow_is_called(tmp_path, monkeypatch):
    for variable in trackers.ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    seen = telemetry_seen(monkeypatch)
    train(tmp_path / "default", rounds=1)
    assert set(seen) == {"true"}
    assert not trackers.ENVIRONMENT.keys() & os.environ.keys()


def telemetry_seen(monkeypatch) -> list:
    """What MLflow's client sees when a run is made and its metrics are logged."""
    seen = []
    for method in ("create_run", "log_batch", "set_terminated"):
        original = getattr(MlflowClient, method)

        def watched(self, *arguments, original=original, **more):
            seen.append(os.environ.get("MLFLOW_DISABLE_TELEMETRY"))
            return original(self, *arguments, **more)

        monkeypatch.setattr(MlflowClient, method, watched)
    return seen

"""What `mixfl watch` knows about runs, and whom it tells."""

import contextlib
import fcntl
import http.client
import json
import math
import os
import subprocess
import sys
import threading

import pytest
import tiny_problem
from run_folders import TINY, after_round, cli, train
from watched import a_run, add_rows, served

import mixfl
from mixfl.errors import Interrupted, MixflError
from mixfl.runs import folder as folders
from mixfl.runs.folder import is_locked, locked
from mixfl.studies.progress import Board as Progress
from mixfl.studies.trials import Crew, Trial, check_failed
from mixfl.watch import board as boards
from mixfl.watch.board import Board
from mixfl.watch.curves import POINTS, Columns
from mixfl.watch.run_state import log_lines, summary
from mixfl.watch.runs_below import runs_below

# States


@pytest.mark.parametrize(
    ("status", "alive", "state"),
    [
        ({"status": "finished", "round": 50}, False, "finished"),
        ({"status": "diverged", "round": 3, "message": "lower client_lr"}, False, "diverged"),
        ({"status": "failed", "round": 3, "message": "the disk is full"}, False, "failed"),
        ({"status": "interrupted", "round": 3}, False, "stopped"),
        ({"status": "running", "round": 3, "saved": 3}, True, "running"),
        ({"status": "running", "round": 3, "saved": 3}, False, "died"),
        ({"status": "interrupted", "round": 3}, True, "starting"),
        (None, True, "starting"),
        (None, False, "died"),
    ],
)
def test_states(status, alive, state, tmp_path):
    path = a_run(tmp_path / "run", status)
    held = locked(path) if alive else contextlib.nullcontext()
    with held:
        found = summary(path, 50)
    assert found["state"] == state
    assert (found["round"], found["values"]["eval/loss"]) == (
        max(5, (status or {}).get("round", 0)),
        0.2,
    )
    assert (status or {}).get("message", "") in found["message"]
    if state == "died":
        kept = "checkpoint of round 3 is kept" if status else "saved nothing"
        assert kept in found["message"]


def test_looking_at_a_lock_keeps_no_run_from_starting(tmp_path, monkeypatch):
    """A run that begins while someone looks waits for a moment."""
    path = a_run(tmp_path / "run", {"status": "running"})
    looking = open(path / ".lock", "rb")  # noqa: SIM115
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(folders.time, "sleep", lambda seconds: looking.close())
    with locked(path):
        assert is_locked(path)
        monkeypatch.setattr(folders.time, "sleep", lambda seconds: None)
        with pytest.raises(folders.Busy):
            locked(path)
    assert not is_locked(path)


def test_runs_are_found_but_nothing_within_them(tmp_path):
    a_run(tmp_path / "b", None)
    a_run(tmp_path / "sweep/lr=1/seed0", None)
    a_run(tmp_path / "b/aside-1", None)
    a_run(tmp_path / ".hidden/run", None)
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [p.relative_to(tmp_path).as_posix() for p in runs_below(tmp_path)]
    assert found == ["b", "sweep/lr=1/seed0"]


# Curves


def test_only_what_was_added_is_read(tmp_path, monkeypatch):
    path = a_run(tmp_path / "run", None, rows=3)
    columns, read = Columns(path), []
    add = Columns._add
    monkeypatch.setattr(Columns, "_add", lambda self, c: (read.append(len(c)), add(self, c)))
    columns.update()
    add_rows(path, 4, 4)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"round": 5, "eval/l')  # cut off in the middle
    columns.update()
    assert columns.line("eval/loss") == {"rounds": [1, 2, 3, 4], "mean": [1, 0.5, 0.333333, 0.25]}
    assert read[1] < read[0]
    assert columns.line("eval/other") is None


def test_a_file_written_anew_is_read_anew(tmp_path):
    path = a_run(tmp_path / "run", None, rows=6)
    columns = Columns(path)
    columns.update()
    (path / "metrics.jsonl").unlink()
    add_rows(path, 1, 2)
    columns.update()
    assert columns.line("eval/loss")["rounds"] == [1, 2]
    (path / "metrics.jsonl").unlink()
    columns.update()
    assert columns.line("eval/loss") is None


def test_long_and_broken_curves(tmp_path):
    path = a_run(tmp_path / "run", None, rows=0)
    with open(path / "metrics.jsonl", "w") as file:
        for t in range(1, 5001):
            row = {"round": t, "eval/loss": float(t)} | ({"late": 1.0} if t > 4000 else {})
            file.write(json.dumps(row) + "\n")
        huge = "9" * 400  # no float holds it
        file.write(f'{{"round": {huge}, "late": 1}}\n{{"round": 5001, "eval/loss": {huge}}}\n')
        file.write('nonsense\n[1]\n{"round": "x"}\n{"round": 5001, "eval/loss": NaN}\n')
    columns = Columns(path)
    columns.update()
    line = columns.line("eval/loss")
    assert len(line["rounds"]) <= POINTS + 1
    assert (line["rounds"][0], line["rounds"][-1]) == (1, 5000)
    assert columns.line("late")["rounds"][0] == 4001
    assert not any(map(math.isnan, line["mean"]))
    assert summary(path, 9)["values"] == {}  # the last is not finite


# The board


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(boards, "SCAN_SECONDS", 0.0)


def test_a_page_is_told_what_changed(tmp_path, at_once):
    one = a_run(tmp_path / "one", {"status": "finished", "round": 50}, client_lr=float(1))
    two = a_run(tmp_path / "two", {"status": "failed", "round": 2})
    board = Board([tmp_path])
    told = board.changes(0)
    assert [r["name"] for r in told["runs"]] == ["one", "two"]
    assert told["configs"][1]["client_lr"] == "1.0"
    told = board.changes(told["version"])
    assert (told["runs"], told["configs"], told["gone"]) == ([], {}, [])
    add_rows(two, 6, 6)
    told = board.changes(told["version"])
    assert [(r["name"], r["round"]) for r in told["runs"]] == [("two", 6)]
    assert told["configs"] == {}
    for file in one.iterdir():
        file.unlink()
    one.rmdir()
    a_run(tmp_path / "three", None)
    told = board.changes(told["version"])
    assert (told["gone"], [(r["id"], r["name"]) for r in told["runs"]]) == ([1], [(3, "three")])
    with pytest.raises(MixflError, match="no such run"):
        board.details(1)


def test_folders_of_one_name_are_told_apart(tmp_path, at_once):
    for name in ("a/runs", "b/runs"):
        a_run(tmp_path / name / "one", None)
    told = Board([tmp_path / "a/runs", tmp_path / "b/runs"]).changes(0)
    assert [r["name"] for r in told["runs"]] == ["a/runs/one", "b/runs/one"]
    told = Board([tmp_path / "a", tmp_path / "b", tmp_path / "a/../b"]).changes(0)
    assert {r["name"] for r in told["runs"]} == {"a/runs/one", "b/runs/one"}


@pytest.mark.parametrize(
    ("keys", "command", "words"),
    [
        ({}, "mixfl run --config {run}/config.toml --out {run} --resume", ""),
        ({"task": "python:own"}, "mixfl run path.py:problem --config {run}", "resume=True"),
        ({"round_deadline": 600.0}, "mixfl flower up server --run --project {project}", "up all"),
    ],
)
def test_how_a_run_goes_on(keys, command, words, tmp_path, at_once):
    run = a_run(tmp_path / "project/runs/one", {"status": "interrupted"}, **keys)
    (tmp_path / "project/pyproject.toml").write_text("[tool.flwr.app]\n")
    board = Board([tmp_path])
    board.changes(0)
    told = board.details(1)["resume"]
    assert told["command"].startswith(command.format(run=run, project=tmp_path / "project"))
    assert words in told["words"]
    (tmp_path / "project/pyproject.toml").write_text("tool = 3\n")  # another project's
    assert bool(board.details(1)["resume"]["command"]) == ("round_deadline" not in keys)


def test_a_run_that_cannot_be_read_is_shown_with_the_reason(tmp_path, at_once):
    a_run(tmp_path / "run", {"status": "finished"})
    (tmp_path / "run/config.toml").write_text("task = ")
    told = Board([tmp_path]).changes(0)
    assert "config.toml" in told["configs"][1]["unreadable"]


def test_curves_are_sent_once(tmp_path, at_once):
    path = a_run(tmp_path / "run", {"status": "failed"})
    board = Board([tmp_path])
    board.changes(0)
    told = board.curves({1: 0, 99: 0}, ["eval/loss"])["runs"]
    assert told[1]["lines"]["eval/loss"]["rounds"] == [1, 2, 3, 4, 5]
    version = told[1]["version"]
    (path / "status.json").write_text('{"status": "finished"}')  # no new metrics
    board.changes(0)
    assert board.curves({1: version}, ["eval/loss"])["runs"] == {}
    add_rows(path, 6, 6)
    board.changes(0)
    assert (
        board.curves({1: version}, ["eval/loss"])["runs"][1]["lines"]["eval/loss"]["rounds"][-1]
        == 6
    )


# A run tells how it is doing, and stops when it is asked to


def test_a_run_is_stopped_on_request_and_goes_on(tmp_path, monkeypatch, at_once):
    out, board = tmp_path / "run", Board([tmp_path])

    def stop():
        board.changes(0)
        assert board.runs[1].summary["state"] == "running"
        assert json.loads((out / "progress.json").read_text())["rounds"] == 500
        assert board.stop(1) == board.stop(1) == "run stops after this round and saves."

    monkeypatch.setattr("mixfl.runs.stopping.LOOK_SECONDS", 0)
    with monkeypatch.context() as patch:
        after_round(patch, 3, stop)
        with pytest.raises(Interrupted, match="on request after round") as error:
            train("fedavg", out, rounds=500)
    done = error.value.result.metrics[-1]["round"]
    assert 3 <= done < 10
    status = json.loads((out / "status.json").read_text())
    assert (status["status"], status["stopped"]) == ("interrupted", "on request")
    assert not (out / "stop").exists()
    assert not (out / "progress.json").exists()
    board.changes(0)
    assert board.runs[1].summary["state"] == "stopped"
    with pytest.raises(MixflError, match="not running"):
        board.stop(1)
    (out / "stop").touch()  # an old request stops no new process
    with monkeypatch.context() as patch:
        after_round(patch, done + 2, lambda: os.kill(os.getpid(), 2))
        with pytest.raises(Interrupted):
            train("fedavg", out, rounds=500, resume=True)
    assert "stopped" not in json.loads((out / "status.json").read_text())
    kinds = [(line["kind"], line["text"].partition(":")[0]) for line in log_lines(out)]
    assert [k for k, _ in kinds if k != "note"] == ["begin", "stopped", "begin", "stopped"]
    assert kinds[0][1] == "begins"
    assert ("begin", f"goes on from round {done}") in kinds


def test_a_run_in_a_thread_is_stopped_too(tmp_path, monkeypatch):
    """There it gets no signals."""
    monkeypatch.setattr("mixfl.runs.stopping.LOOK_SECONDS", 0)
    after_round(monkeypatch, 2, lambda: (tmp_path / "run/stop").touch())
    ended = []

    def work():
        try:
            mixfl.train(tiny_problem.problem, "fedavg", rounds=500, out=tmp_path / "run")
        except Interrupted as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended[0].on_request


def test_notes_are_logged_and_a_failure_too(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(mixfl.Diverged):
        mixfl.train(tiny_problem.problem, "fedavg", rounds=3, client_lr=1e38, clip="off", out=out)
    lines = log_lines(out)
    assert [line["kind"] for line in lines][-1] == "diverged"
    assert "lower client_lr" in lines[-1]["text"]


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr("mixfl.runs.sinks.live.LOG", "no/such/folder")
    monkeypatch.setattr("mixfl.runs.sinks.live.PROGRESS", "no/such/file")
    assert train("fedavg", tmp_path / "run", rounds=2).metrics[-1]["round"] == 2


# Whom it tells


def asked(server, path, method="GET", body=None, **headers):
    host, port = server.server_address
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    given = {"Host": f"127.0.0.1:{port}", "X-Mixfl-Token": server.token}
    for name, value in {**given, **{k.replace("_", "-"): v for k, v in headers.items()}}.items():
        if value is not None:
            connection.putheader(name, value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content, answer.headers


@pytest.fixture
def watching(tmp_path, at_once):
    path = a_run(tmp_path / "runs/run", {"status": "running"})
    with served(tmp_path / "runs") as server, locked(path):
        yield server, path


def test_the_page_needs_the_token_in_its_address(watching):
    server, _ = watching
    code, content, headers = asked(server, f"/?token={server.token}", X_Mixfl_Token=None)
    assert code == 200
    assert "connect-src 'self'" in content
    assert "http://" not in content.partition("<script>")[0].replace("http-equiv", "")
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    for wrong in ("/", "/?token=", "/?token=x", f"/?token={server.token}x"):
        assert asked(server, wrong)[0] == 403  # the header is not for the page


def test_nothing_is_told_without_the_token(watching):
    server, _ = watching
    assert asked(server, "/api/runs")[0] == 200
    for path in (
        "/api/runs",
        "/api/run?id=1",
        "/api/curves?runs=1.0",
        f"/api/runs?token={server.token}",
    ):
        for token in (None, "", "x", server.token[:-1]):
            code, content, _ = asked(server, path, X_Mixfl_Token=token)
            assert code == 403
            assert "run" not in content.replace("mixfl watch", "").replace("printed", "")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "["]
)
def test_another_name_for_this_machine_is_refused(host, watching):
    server, path = watching
    assert asked(server, "/api/runs", Host=host)[0] == 403
    assert asked(server, "/api/stop", "POST", b'{"id": 1}', Host=host)[0] == 403
    assert not (path / "stop").exists()


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:5"])
def test_addresses_of_this_machine_are_known(host, watching):
    assert asked(watching[0], "/api/runs", Host=host)[0] == 200


def test_only_the_page_itself_stops_a_run(watching):
    server, path = watching
    asked(server, "/api/runs")
    body, stop = b'{"id": 1}', path / "stop"
    own = f"http://127.0.0.1:{server.server_address[1]}"
    assert asked(server, "/api/stop", "POST", body, X_Mixfl_Token=None)[0] == 403
    assert asked(server, "/api/stop", "POST", body, Origin="http://evil.example")[0] == 403
    assert asked(server, "/api/stop", "POST", body, Origin="null")[0] == 403
    assert asked(server, "/api/stop", "GET")[0] == 404
    assert asked(server, "/api/stop", "POST", b'{"id": 7}')[0] == 409
    for wrong in (b"", b"[]", b'{"id": "../x"}', b"{" * 100, b" " * 2000):
        assert asked(server, "/api/stop", "POST", wrong)[0] == 400
    assert not stop.exists()
    code, content, _ = asked(server, "/api/stop", "POST", body, Origin=own)
    assert (code, json.loads(content)["said"]) == (200, "run stops after this round and saves.")
    assert stop.exists()


def test_bad_questions(watching):
    server, _ = watching
    for path in ("/api/runs?since=x", "/api/run", "/api/run?id=x", "/api/curves?runs=a.b",
                 "/api/curves?runs=1", "/api/curves?runs=1.0&metrics={}"):  # fmt: skip
        assert asked(server, path)[0] == 400, path
    assert asked(server, "/../../etc/passwd")[0] == 404
    assert asked(server, "/api/run?id=9")[0] == 409


def test_the_command_listens_on_this_machine_only(tmp_path, monkeypatch, capsys):
    assert cli(monkeypatch, "watch", tmp_path / "none") == 2
    assert "does not exist" in capsys.readouterr().err
    process = subprocess.Popen(
        [sys.executable, "-c", "from mixfl.cli import main; main()", "watch", tmp_path],
        stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        said = process.stdout.readline()
        assert "http://127.0.0.1:" in said
        assert len(said.partition("token=")[2]) > 30
        process.send_signal(2)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").mkdir()
    with served(tmp_path / "runs") as server:
        port = server.server_address[1]
        assert cli(monkeypatch, "watch", tmp_path / "runs", "--port", port) == 2
    assert f"port {port}" in capsys.readouterr().err


def test_a_run_of_a_sweep_that_is_stopped_ends_no_other(tmp_path):
    """The worker's answer; the run's folder is as the run left it, and it has no result."""

    class Stopped:
        def ready(self, out, wanted):
            return wanted()

        def run(self, trial, out, tell, note, judge):
            return {"error": "stopped on request after round 3 of 9", "on_request": True}

    crew = Crew.__new__(Crew)
    trials = [Trial(f"{TINY}:problem", "fedavg", name, name) for name in ("one", "two")]
    crew.workers, crew.cluster = [Stopped()], None
    ended = crew.make(trials, tmp_path, Progress())
    assert [(d.status, d.round) for d in ended] == [("failed", 0)] * 2
    with pytest.raises(MixflError, match=r"2 of 2 runs failed \(one: stopped on request.*--resume"):
        check_failed(ended)

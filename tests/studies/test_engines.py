"""Runs on other machines: Ray with a node that is killed, submitit's local jobs, what goes wrong.
A lost machine costs its run what came after the last checkpoint, and no run is lost."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny_problem

from mixfl.errors import MixflError
from mixfl.runs.folder import is_locked
from mixfl.studies import launchers, remote, serving
from mixfl.studies.engines import crew
from mixfl.studies.mailbox import ALIVE, ANSWERS, REQUESTS, WORKERS, Lines
from mixfl.studies.progress import Board
from mixfl.studies.trials import Trial
from mixfl.studies.worker_process import Worker

TINY = f"{tiny_problem.__file__}:problem"
EVERY, ROUNDS = 5, 20
PAUSED = f"""
import dataclasses, itertools, pathlib, sys, time
sys.path.insert(0, {str(Path(tiny_problem.__file__).parent)!r})
import tiny_problem

def problem():
    calls, go = itertools.count(), pathlib.Path(__file__).with_name("go")

    def evaluate(params):
        while next(calls) > 2 * {EVERY} + 2 and not go.exists():
            time.sleep(0.05)
        return tiny_problem.evaluate(params)

    return dataclasses.replace(tiny_problem.problem, evaluate=evaluate)
"""  # after some rounds, it waits for the file `go`


class Noting(Board):
    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


def trials(n, task=TINY):
    keys = {"rounds": ROUNDS, "checkpoint_every": EVERY, "eval_every": 1}
    return [Trial(task, "fedavg", f"seed{i}", f"{i}", keys={**keys, "seed": i}) for i in range(n)]


def paused_trials(n, folder):
    (folder / "paused.py").write_text(PAUSED)
    return trials(n, f"{folder / 'paused.py'}:problem")


def under_way(out, rows):
    """The runs that have so many rows of metrics and are not over."""
    found = [f.parent for f in out.glob("*/metrics.jsonl")]
    return [
        f for f in found
        if len((f / "metrics.jsonl").read_text().splitlines()) >= rows
        and json.loads((f / "status.json").read_text())["status"] == "running"
    ]  # fmt: skip


def starts(folder):
    """The rounds from which a run was started."""
    said = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["round"] for line in said if line["text"].startswith(("begins", "goes on"))]


def lose_one(kill, folder, board, over):
    """When two runs are under way, one loses its machine. The other one waits until that is known
    and the lost one has let go of its folder."""
    running: list = []
    while len(running) < 2 and not over.wait(0.1):
        running = under_way(folder / "out", 2 * EVERY)
    kill()
    while not over.wait(0.1):
        free = [f for f in running if not is_locked(f) or len(starts(f)) > 1]
        if free and any("goes on" in note for note in board.notes):
            break
    (folder / "go").touch()


def check_taken_up(ended, board, out):
    """One run was lost and went on from its checkpoint; all are complete."""
    assert [d.status for d in ended] == ["finished"] * len(ended)
    assert any("another worker goes on with it" in note for note in board.notes), board.notes
    again = [s for s in (starts(d.folder) for d in ended) if len(s) > 1]
    assert again
    assert all(s[1] >= EVERY for s in again), again
    for one in ended:
        rounds = [row["round"] for row in one.rows]
        assert rounds == list(range(1, ROUNDS + 1))
    assert not (out / WORKERS).exists()


@contextlib.contextmanager
def cluster_of_two(monkeypatch):
    """The address of a Ray cluster of two nodes, and what kills one."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # tests beside this one would starve it
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    script = Path(tiny_problem.__file__).with_name("ray_cluster.py")
    cluster = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip

    def kill():
        cluster.stdin.write("kill\n")
        cluster.stdin.flush()

    try:
        yield cluster.stdout.readline().strip(), kill
    finally:
        cluster.communicate()


def test_a_ray_cluster_loses_a_node(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    board, over, out = Noting(), threading.Event(), tmp_path / "out"
    with cluster_of_two(monkeypatch) as (address, kill):
        threading.Thread(target=lose_one, args=(kill, tmp_path, board, over), daemon=True).start()
        try:
            with crew("ray", {"address": address}) as workers:
                assert len(workers.workers) == 2  # as many as cores
                ended = workers.make(paused_trials(3, tmp_path), out, board)
        finally:
            over.set()
    check_taken_up(ended, board, out)


def test_a_job_of_submitit_is_killed(tmp_path):
    pytest.importorskip("submitit")
    board, over, out = Noting(), threading.Event(), tmp_path / "out"
    with crew("slurm", {"cluster": "local", "partition": "any", "time": "0:30:00"}, 2) as workers:

        def kill():
            for child in children(workers.workers[0].job.job._process.pid):
                os.kill(child, signal.SIGKILL)

        threading.Thread(target=lose_one, args=(kill, tmp_path, board, over), daemon=True).start()
        try:
            ended = workers.make(paused_trials(2, tmp_path), out, board)
        finally:
            over.set()
    check_taken_up(ended, board, out)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(p) for children in found for p in children.read_text().split()]


# Without a cluster: the two ends of a mailbox


class Told:
    """A process that makes runs, as serve sees it."""

    made: list = []

    def __init__(self, core, devices, hung):
        self.interrupted = threading.Event()

    def run(self, trial, out, tell, note, judge):
        self.made.append(trial)
        tell(1)
        note("hm", True)
        why = judge({"round": 1, "eval/loss": 2.0}) if judge is not None else ""
        if trial.folder == "waits":
            self.interrupted.wait()
            return {"error": "interrupted"}
        return {"finished": True, "why": why}

    def interrupt(self):
        self.interrupted.set()

    def close(self): ...


@pytest.fixture
def box(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serving, "Worker", Told)
    Told.made = []
    folder = tmp_path / "box"
    folder.mkdir()
    return folder


def test_a_mailbox_takes_a_run_there_and_its_answers_back(box, tmp_path):
    requests = Lines(box / REQUESTS)
    (trial,) = trials(1)
    plain = dict(
        task=trial.task, algorithm=trial.algorithm, folder="a", label="a", keys={"seed": 3}
    )
    requests.write(run=plain, out=str(tmp_path), judged=True)
    requests.write(stop="enough")
    requests.write(close=True)
    with open(box / REQUESTS, "a") as file:
        file.write('{"run": {"half')  # is being written
    serving.serve(str(box), str(tmp_path), 1, 0.0)
    answers = Lines(box / ANSWERS).read()
    assert "ready" in answers[0]
    assert answers[1:] == [
        {"round": 1}, {"note": "hm", "once": True}, {"row": {"round": 1, "eval/loss": 2.0}},
        {"finished": True, "why": "enough"},
    ]  # fmt: skip
    assert [t.keys for t in Told.made] == [{"seed": 3}]


def test_a_worker_ends_when_its_command_is_silent(box, tmp_path):
    (tmp_path / ALIVE).write_text("0")
    run = {"task": TINY, "algorithm": "fedavg", "folder": "waits", "label": "w"}
    Lines(box / REQUESTS).write(run=run, out=str(tmp_path), judged=False)
    serving.serve(str(box), str(tmp_path), 1, 0.0, silent=0.2)
    assert Lines(box / ANSWERS).read()[-1] == {"error": "interrupted"}


def test_a_worker_that_does_not_see_the_folder_says_so(box):
    serving.serve(str(box), "/not/there", 1, 0.0)
    (answer,) = Lines(box / ANSWERS).read()
    assert "does not see the folder /not/there" in answer["error"]


class Jobs:
    """A launcher whose jobs do what they are told."""

    jobs = devices = 1

    def __init__(self, does):
        self.does, self.started, self.cancelled = does, 0, 0

    def start(self, mailbox, request):
        self.started += 1
        self.does(Lines(mailbox / ANSWERS))
        return self

    def ended(self):
        return "its node is gone"

    def cancel(self):
        self.cancelled += 1

    def close(self): ...


def made(launcher, out):
    from mixfl.studies.trials import Crew

    board = Noting()
    with Crew(0, 0.0, remote.Cluster(launcher, 0.0)) as workers:
        return workers.make(trials(1), out, board), board


def test_jobs_that_never_start_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "STATE_SECONDS", 0.0)
    launcher = Jobs(lambda answers: None)
    with pytest.raises(MixflError, match="could not be started: its node is gone"):
        made(launcher, tmp_path)
    assert launcher.started == remote.STARTS


def test_a_run_that_loses_every_machine_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "STATE_SECONDS", 0.0)
    launcher = Jobs(lambda answers: answers.write(ready="here"))
    monkeypatch.setattr(launcher, "ended", lambda: "its node is gone" if launcher.looks() else None)
    seen: list = []
    monkeypatch.setattr(
        launcher, "looks", lambda: seen.append(1) or len(seen) % 2 == 0, raising=False
    )
    (ended,), board = made(launcher, tmp_path)
    assert ended.status == "failed"
    assert "its node is gone, " in ended.reason
    assert sum("another worker goes on" in n for n in board.notes) == 2


@pytest.mark.parametrize(
    ("on", "options", "words"),
    [
        ("rya", {}, "unknown --on 'rya'. Did you mean 'ray'"),
        ("local", {"cpus": 1}, "--on-option is for --on ray and --on slurm"),
        ("ray", {"cpu": 1}, "Did you mean 'cpus'"),
        ("ray", {"cpus": "two"}, "--on-option cpus=two: expected a number"),
        ("slurm", {"cluster": "mine"}, "Valid: local, slurm"),
        ("slurm", {"cluster": "local", "time": "long"}, "--on-option time=long: expected minutes"),
        ("slurm", {}, "there is no sbatch here"),
    ],
)
def test_what_is_wrong_with_an_engine_is_said(on, options, words, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MixflError) as error:
        crew(on, options)
    assert words in str(error.value)


@pytest.mark.parametrize(("on", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_extra_is_named(on, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MixflError, match=rf"pip install 'mixfl\[{on}\]'"):
        crew(on)


def test_times_are_those_of_sbatch():
    given = {"90": 90, "8:00:00": 480, "1-0": 1440, "2-12:30": 3630, "10:30": 11, "0": 1}
    assert {text: launchers.minutes(text) for text in given} == given


def test_a_worker_hears_an_interrupt_that_its_parent_has_blocked(tmp_path):
    """What Ray starts has it blocked, and so have its children."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        worker = Worker(None, 1)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    while worker.process.poll() is None:
        worker.interrupt()  # between runs, it ends
        time.sleep(0.05)
    assert worker.process.returncode
    worker.close()

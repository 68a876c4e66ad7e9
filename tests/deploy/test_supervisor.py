"""`mixfl flower up`: processes that are killed, that hang and that are left behind. Those that it
keeps up are small ones here (fake_flower.py); test_deployment.py and test_chaos.py have real
ones."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import fake_flower
import pytest
from click.testing import CliRunner

from benchmarks.deployment import free_port
from mixfl.cli import cli
from mixfl.deploy.flower import processes, supervisor
from mixfl.deploy.flower.flwr_command import Answer, FlwrCommand
from mixfl.deploy.flower.keys import make_keys
from mixfl.deploy.flower.new_project import write_project
from mixfl.deploy.flower.registration import register_nodes
from mixfl.deploy.flower.run_keeper import RunKeeper
from mixfl.deploy.flower.supervisor import Child, Pause
from mixfl.errors import MixflError

HUNG = 60.0  # seconds; ends what hangs
SHORT = """
import mixfl.deploy.flower.supervisor as s, mixfl.deploy.flower.run_keeper as k
s.GRACE = 1.0
k.ASK_EVERY = k.ASK_SELDOM = k.LINGER = k.FIRST_PAUSE = 0.2
from mixfl.cli import main
main()
"""


class Project:
    """A project whose programs are fakes, and the supervisors that were started in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        write_project(folder, "smile")
        make_keys(folder / "keys", 2)
        for name in ("bin", "fake"):
            (folder / name).mkdir()
        for name in ("superlink", "superexec", "flwr", "flwr-serverapp"):
            program = folder / "bin" / name
            source = Path(fake_flower.__file__).read_text()
            program.write_text(f"#!{sys.executable}\n{source}")
            program.chmod(0o755)
        for name in ("superlink", "superexec"):
            self.script(name, f"exec bin/{name}")
        self.script("supernode", "touch node-$1.up; exec sleep 1000")
        self.script("worker", "exec sleep 1000")
        (folder / "env.sh").write_text('PATH="$PWD/bin:$PATH"\n')
        (folder / "known").write_text("")
        self.address = f"127.0.0.1:{free_port()}"
        self.running: list[subprocess.Popen] = []

    def script(self, name: str, text: str) -> None:
        file = self.folder / f"{name}.sh"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    def up(self, *arguments: str) -> subprocess.Popen:
        environment = {**os.environ, "SUPERLINK": self.address}
        with open(self.folder / "up.log", "ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-c", SHORT, "flower", "up", *arguments], cwd=self.folder,
                env=environment, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.running.append(started)
        return started

    def run(self, *more: str) -> subprocess.Popen:
        return self.up("server", "--run-config", "out='runs/fake'", *more)

    def told(self) -> str:
        return (self.folder / "up.log").read_text()

    def wish(self, text: str) -> None:
        (self.folder / "wish").write_text(text)

    def rounds(self) -> int:
        folder = self.folder / "runs/fake/checkpoints"
        return len(list(folder.iterdir())) if folder.exists() else 0

    def asked(self, command: str) -> int:
        file = self.folder / "asked"
        text = file.read_text() if file.exists() else ""
        return sum(line.startswith(command) for line in text.splitlines())

    def server(self) -> int:
        return int((self.folder / "server.pid").read_text())

    def until(self, true, what: str) -> None:
        end = time.monotonic() + HUNG
        while not true():
            assert time.monotonic() < end, f"not within {HUNG:.0f} s: {what}\n{self.told()}"
            time.sleep(0.05)

    def told_of(self, text: str, times: int = 1) -> None:
        self.until(lambda: self.told().count(text) >= times, text)

    def process(self, name: str) -> int:
        """Of the child that was started last."""
        self.told_of(f"{name}: started, process")
        return int(self.told().split(f"{name}: started, process ")[-1].split()[0])

    def close(self) -> None:
        for started in self.running:
            started.kill()
            started.wait()
        for name in ("superlink", "superexec", "node-1", "node-2", "worker-1", "worker-2", "flwr"):
            processes.kill(processes.marked(f"{self.folder}/{name}"))
        processes.kill(processes.serving(self.folder / "runs/fake"))


@pytest.fixture
def project(tmp_path):
    made = Project((tmp_path / "project").resolve())
    yield made
    made.close()


def alive(pid: int) -> bool:
    return processes.started(pid) is not None


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_what_is_killed_is_started_again(project):
    up = project.up("node", "1", "2")
    for name in ("node-1", "node-2", "worker-1", "worker-2"):
        killed = project.process(name)
        kill(killed)
        project.told_of(f"{name}: killed by SIGKILL after")
        project.until(lambda name=name, k=killed: project.process(name) != k, "another")
        assert alive(project.process(name))
    up.terminate()
    assert up.wait(HUNG) == 0
    assert project.told().count("started, process") == 8


def test_the_pause_grows(project):
    project.script("worker", "exit 7")
    project.up("node", "1")
    project.told_of("worker-1: exited with code 7 after 0 s; restarting in 2 s")
    seconds = [line.split()[-2] for line in project.told().splitlines() if "restarting in" in line]
    assert seconds == ["0.5", "1", "2"]
    assert [Pause(1, 60, n).next() for n in (0, 3, 6, 5000)] == [1, 8, 60, 60]


def test_the_pause_is_forgotten_after_a_while(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "WELL", 0.0)
    (tmp_path / "logs").mkdir()
    child = Child("child", ["false"], tmp_path)
    for starts in (1, 2, 3):
        while child.starts < starts or child.process is not None:
            child.tend()
    assert capsys.readouterr().out.count("restarting in 0.5 s") == 3


def test_what_does_not_listen_is_killed(project):
    project.script("worker", "trap '' TERM; echo $$ > deaf; while :; do sleep 1; done")
    up = project.up("node", "1")
    project.until(lambda: (project.folder / "deaf").exists(), "it runs")
    deaf, node = project.process("worker-1"), project.process("node-1")
    up.terminate()
    assert up.wait(HUNG) == 0
    assert not alive(deaf)
    assert not alive(node)
    assert "did not exit after SIGTERM" in project.told()


def test_all_ends_with_the_supervisor(project):
    up = project.up("node", "1")
    children = [project.process("node-1"), project.process("worker-1")]
    kill(up.pid)
    project.until(lambda: not any(map(alive, children)), "all ended")


def test_what_is_left_behind_is_ended_by_the_next(project):
    """A grandchild in a session of its own, which no signal of the kernel's reaches; and nothing
    of what only looks the same."""
    project.script("worker", "setsid sh -c 'echo $$ > left; exec sleep 1000' & exec sleep 1000")
    up = project.up("node", "1")
    left = project.folder / "left"
    project.until(lambda: left.exists() and left.read_text(), "it runs")
    kill(up.pid)
    up.wait()
    grandchild = int(left.read_text())
    assert alive(grandchild)
    stranger = subprocess.Popen(["sleep", "1000"], env={processes.MARK: "/elsewhere/worker-1"})
    try:
        project.script("worker", "exec sleep 1000")
        project.up("node", "1")
        project.told_of("worker-1: killed 1 leftover process of an earlier supervisor")
        assert not alive(grandchild)
        assert alive(stranger.pid)
    finally:
        stranger.kill()
        stranger.wait()


def test_one_supervisor_at_a_time(project):
    first = project.up("node", "1")
    node = project.process("node-1")
    assert project.up("node", "2", "1").wait(HUNG) == 2
    assert f"is already supervised, by process {first.pid}" in project.told()
    assert alive(node)


def test_output_is_bounded_and_private(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LOG_BYTES", 1000)
    (tmp_path / "logs").mkdir()
    program = "seq 1 1000; while [ ! -e go ]; do sleep 0.01; done; seq 5"
    child = Child("child", ["sh", "-c", program], tmp_path)
    child.tend()
    while child.log.stat().st_size < 3893:
        time.sleep(0.01)
    child.bound_log()
    (tmp_path / "go").touch()
    child.process.wait()
    assert child.log.read_text() == "1\n2\n3\n4\n5\n"
    assert (tmp_path / "logs/child.log.1").read_text().endswith("\n999\n1000\n")


def test_files_are_for_their_owner(project):
    project.up("node", "1")
    project.until((project.folder / "node-1.up").exists, "it runs")
    for path in ("state", "logs", "logs/node-1.log", "state/node-1.lock", "node-1.up"):
        assert not stat.S_IMODE((project.folder / path).stat().st_mode) & 0o077, path


def test_a_run_is_finished_once(project):
    assert project.run().wait(HUNG) == 0
    assert project.rounds() == 10
    assert project.asked("run") == 1
    assert project.asked("supernode register") == 2
    assert not alive(project.process("superlink"))
    assert project.run().wait(HUNG) == 0
    assert (project.asked("run"), project.asked("supernode register")) == (1, 2)  # it knows
    keeping = project.run("--keep")
    project.told_of("run: finished, in", 3)
    assert alive(project.process("superlink"))
    assert keeping.poll() is None


def test_keys_that_are_registered_already(project):
    (project.folder / "known").write_text("node-1.pub")
    assert project.run().wait(HUNG) == 0
    assert project.told().count("its key is registered") == 2


@pytest.mark.parametrize("victim", ["server", "superexec", "superlink", "supervisor"])
def test_a_run_outlives_everything(project, victim):
    """Its rounds are kept, and it is repeated where it ended."""
    project.wish("hang")
    up = project.run()
    project.told_of("run: 1 is started")
    project.until(lambda: project.rounds() == 1, "the first round")
    server = project.server()
    if victim == "supervisor":
        kill(up.pid)
        project.until(lambda: not alive(project.process("superexec")), "superexec ended with it")
        up = project.run()
    else:
        kill(server if victim == "server" else project.process(victim))
    if victim == "superlink":
        project.told_of("superlink: started", 2)
        assert alive(server)
    else:
        project.until(lambda: project.rounds() == 2, "a round of the repeated run")
        assert not alive(server)
        assert project.asked("stop 1") == 1
    project.wish("")
    assert up.wait(HUNG) == 0
    assert project.rounds() == 10
    assert project.asked("run") == (1 if victim == "superlink" else 2)


def test_an_orphan_that_holds_the_folder_is_ended(project):
    """It has neither the mark nor the session of what was started here."""
    project.wish("orphan")
    up = project.run()
    project.until(lambda: project.rounds() == 1, "the first round")
    orphan = project.server()
    kill(up.pid)
    up.wait()
    assert alive(orphan)
    project.wish("")
    assert project.run().wait(HUNG) == 0
    assert "a leftover server that held" in project.told()
    assert not alive(orphan)
    assert project.rounds() == 10


def test_only_a_server_is_ended_for_its_lock(project):
    out = project.folder / "runs/fake"
    out.mkdir(parents=True)
    other = subprocess.Popen(["sh", "-c", 'exec 9>> "$0/.lock"; flock 9; exec sleep 1000', out])
    try:
        project.until((out / ".lock").exists, "it has the lock")
        assert not processes.running(processes.serving(out))
        assert processes.kill(processes.serving(out)) == 0
        assert alive(other.pid)
    finally:
        other.kill()
        other.wait()


def test_a_hopeless_run_is_given_up(project):
    project.wish("diverge")
    assert project.run().wait(HUNG) == 3
    assert "given up, 5 failures without a new round. The last: too far" in project.told()
    assert project.asked("run") == 5
    assert not alive(project.process("superlink"))


def test_a_run_that_is_stopped_stays_so(project):
    project.wish("hang")
    up = project.run()
    project.until(lambda: project.rounds() == 1, "the first round")
    (project.folder / "fake/1").write_text("finished:stopped")
    assert up.wait(HUNG) == 3
    assert "stopped by `flwr stop`" in project.told()
    assert project.asked("run") == 1
    assert not alive(project.server())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["server", "1"], "give numbers with the role node"),
        (["node"], "give numbers with the role node"),
        (["node", "1", "--run"], "are options for the server"),
        (["node", "9"], "keys/node-9 is not in"),
        (["server", "--run-config", "out=''"], "needs a run folder"),
        (["server", "--run-config", "out='x"], "--run-config out='x"),
    ],
)
def test_refused(project, arguments, told):
    done = CliRunner().invoke(cli, ["flower", "up", "--project", str(project.folder), *arguments])
    assert isinstance(done.exception, MixflError)
    assert told in str(done.exception)


def test_no_project(tmp_path):
    done = CliRunner().invoke(cli, ["flower", "up", "--project", str(tmp_path), "server"])
    assert "not a project made by `mixfl flower new`" in str(done.exception)


def test_no_token_in_a_command_line(tmp_path):
    from mixfl.deploy.flower.superexec import Quiet

    program = "import sys; print(sys.argv[1:], open(sys.argv[-1]).read())"
    with open(tmp_path / "told", "w") as told:
        command = [sys.executable, "-c", program, "--token", "the secret"]
        Quiet.Popen(command, stdout=told).wait()
    arguments, _, token = (tmp_path / "told").read_text().strip().partition("] ")
    assert token == "the secret"
    assert "secret" not in arguments
    assert "--token-file" in arguments


def test_a_disk_that_can_not_be_written_stops_nothing(tmp_path):
    """Here there is no folder to write to; what is lost are notes."""
    flwr = FlwrCommand(tmp_path, "127.0.0.1:9", command=["/none"])
    RunKeeper(flwr, tmp_path / "run")._note(5)
    answer = list_end(flwr.ask("list"))
    assert not answer.done
    assert "flwr can't be run" in answer.text
    child = Child("child", ["true"], tmp_path)
    while child.starts < 1 or child.process is not None:
        child.tend()
    assert not (tmp_path / "logs").exists()


class FakeFlwr(FlwrCommand):
    """Answers each command with `answers(*arguments)`."""

    def __init__(self, folder, answers):
        super().__init__(folder, "", sleep=lambda seconds: iter(()))
        self.answers, self.asked = answers, []
        for name in ("keys", "state", "run"):
            (folder / name).mkdir()

    def is_reachable(self):
        return True

    def ask(self, *arguments):
        self.asked.append(arguments)
        yield
        return self.answers(*arguments)


def test_a_superlink_with_another_database_is_told_the_keys_again(tmp_path):
    """Its file may have the same inode as the one before."""
    nodes = {}

    def answers(_, command, key="", *more):
        if command == "list":
            return Answer(True, json.dumps({"nodes": [{"node-id": str(n)} for n in nodes]}))
        if key in nodes.values():
            return Answer(False, "Public key already in use.")
        nodes[10**18 + len(registered())] = key
        return Answer(True, json.dumps({"success": True, "node-id": max(nodes)}))

    def registered():
        return [a for a in flwr.asked if a[1] == "register"]

    flwr = FakeFlwr(tmp_path, answers)
    (tmp_path / "state/superlink.db").touch()
    for n in (1, 2):
        (tmp_path / f"keys/node-{n}.pub").write_text(f"key {n}")
    for expected in (2, 2):
        list_end(register_nodes(flwr))
        assert len(registered()) == expected
    nodes.clear()
    list_end(register_nodes(flwr))
    assert len(registered()) == 4
    assert len(nodes) == 2


@pytest.mark.parametrize("code", [1, 0])
def test_a_bad_key_keeps_nobody_else_away(tmp_path, capsys, code):
    """Flower may say in JSON that it has failed, and end with code 0."""

    def answers(_, command, key, *more):
        assert len(flwr.asked) < 10, "asked without end"
        text = '{"success": false, "error-message": "not a key"}'
        return Answer(code == 0, text) if "node-1" in key else Answer(True, '{"node-id": 5}')

    flwr = FakeFlwr(tmp_path, answers)
    for n in (1, 2):
        (tmp_path / f"keys/node-{n}.pub").write_text("")
    list_end(register_nodes(flwr))
    told = capsys.readouterr().out
    assert told.count("node-1: its key can't be registered: not a key") == 3
    assert "node-1: continuing without it" in told
    assert "node-2: its key is registered" in told


@pytest.mark.parametrize("said", [True, False])
def test_a_run_waits_for_space_on_the_disk(tmp_path, monkeypatch, capsys, said):
    """It is not its own failure, however often: by its words, or, where there was no room for
    them, by a look at the disk."""
    pauses, tries, full = [], [], errno.EDQUOT if said else errno.ENOSPC

    def tried():
        yield
        tries.append(1)
        if len(tries) == 20:
            (tmp_path / "run/status.json").write_text('{"status": "finished"}')
            return "", False
        return f"status.json could not be written: {os.strerror(full)}" if said else "failed", True

    def no_room(*args, **more):
        raise OSError(full, os.strerror(full))

    flwr = FakeFlwr(tmp_path, None)
    flwr.sleep = lambda seconds: iter(pauses.append(seconds) or ())
    keeper = RunKeeper(flwr, tmp_path / "run")
    keeper._try = tried
    if not said:
        monkeypatch.setattr("mixfl.deploy.flower.run_keeper.tempfile.TemporaryFile", no_room)
    assert list_end(keeper.finish()) == 0
    assert (pauses[:3], pauses[-1], len(pauses)) == ([1, 2, 4], 60, 19)
    assert "given up" not in capsys.readouterr().out


@pytest.mark.parametrize(("stopped", "code"), [("on request", 3), ("", 0)])
def test_a_run_that_is_stopped_on_request_is_not_repeated(stopped, code, tmp_path, capsys):
    """One that a signal stopped is, and so is one whose earlier process was stopped."""
    out, tries = tmp_path / "run", []
    out.mkdir()
    (out / "status.json").write_text('{"status": "interrupted", "stopped": "on request"}')
    os.utime(out / "status.json", (1, 1))  # long ago

    def tried():
        yield
        tries.append(1)
        if len(tries) == 1:
            return "the SuperLink is down", False
        said = (
            {"status": "interrupted", "stopped": stopped}
            if len(tries) == 2
            else {"status": "finished"}
        )
        (out / "status.json").write_text(json.dumps(said))
        return "its server has ended", False

    flwr = FakeFlwr(tmp_path, None)
    flwr.sleep = lambda seconds: iter(())
    keeper = RunKeeper(flwr, out)
    keeper._try = tried
    assert list_end(keeper.finish()) == code
    assert len(tries) == (2 if stopped else 3)
    assert ("stopped on request" in capsys.readouterr().out) == bool(stopped)


def test_a_keeper_that_fails_is_replaced(tmp_path, capsys):
    made = []

    def keeper():
        made.append(1)
        yield
        if len(made) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return 7

    there = supervisor.Supervisor(tmp_path, [], keeper)
    assert there._tend() == 7
    told = capsys.readouterr().out
    assert "the run can't be supervised" in told
    assert "Too many open files; trying again in 1 s" in told


def list_end(generator):
    """What a generator returns."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value

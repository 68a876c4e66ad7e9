"""A deployment on this machine, for benchmarks and tests: real processes, TLS, authentication.

A SuperLink, its superexec and nodes are started by the scripts of a project that `mixfl flower new`
wrote. They use free ports. Their output is in logs/ in the project's folder. Time-outs only end
what hangs.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from mixfl.deploy.flower import processes
from mixfl.deploy.flower.keys import make_keys
from mixfl.deploy.flower.new_project import write_project

BIN = Path(sys.executable).parent
HUNG = 300.0  # seconds
LIBC = ctypes.CDLL(None)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def end_with_parent() -> None:
    """For `preexec_fn`: the child is killed when this process ends, even by kill -9."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def child(parent: int, part: str) -> int | None:
    """A child or grandchild process whose command line contains `part`."""
    try:
        for name in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            pid = int(name)
            if part.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
            if below := child(pid, part):
                return below
    except OSError:  # a process has just ended
        pass
    return None


class Deployment:
    def __init__(self, folder: Path, task: str = "smile", nodes: int = 3, **environment: str):
        self.folder, self.nodes, self.more = folder, nodes, environment
        write_project(folder, task)
        make_keys(folder / "keys", nodes)
        (folder / "logs").mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        self.ports = {f"node-{n}": free_port() for n in range(1, nodes + 1)}
        self.processes: dict[str, subprocess.Popen] = {}
        self.started: dict[str, float] = {}  # when
        self.own: dict[str, dict[str, str]] = {}  # environment of single processes
        self.flwr_home = folder / ".flwr"

    def __enter__(self) -> "Deployment":
        try:
            self.start("superlink")
            self.wait_until(self.reachable, "the SuperLink is reachable")
            self.start("superexec")
            for n in range(1, self.nodes + 1):
                self.flwr("supernode", "register", f"keys/node-{n}.pub")
                self.start(f"node-{n}")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    def stop(self) -> None:
        """Kills everything that is left, including child processes."""
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        self.processes.clear()

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "SUPERLINK": self.address,
            "FLWR_HOME": str(self.flwr_home), "NODES": str(self.nodes),
            **self.more, **more,
        }  # fmt: skip

    def start(self, name: str, *options: str, **environment: str) -> None:
        """Starts `superlink`, `superexec` or `node-N`."""
        if name.startswith("node-"):
            command = ["./supernode.sh", name.removeprefix("node-"), *options]
            environment = {"PORT": str(self.ports[name]), **environment}
        else:
            command = [f"./{name}.sh", *options]
        environment = {**self.own.get(name, {}), **environment}
        self.started[name] = time.monotonic()
        with open(self.log_file(name), "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(**environment), stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=end_with_parent,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """Sends SIGKILL to this process only; its children must end by themselves."""
        process = self.processes[name]
        process.kill()
        process.wait()

    def tend(self) -> None:
        """Restarts nodes that have ended, as systemd would. The SuperLink refuses a killed node
        until it has noticed its end."""
        for name, process in list(self.processes.items()):
            due = time.monotonic() > self.started[name] + 10
            if name.startswith("node-") and process.poll() is not None and due:
                self.start(name)

    def log_file(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_file(name).read_text(errors="replace")

    def reachable(self) -> bool:
        host, port = self.address.split(":")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return True
        except OSError:
            return False

    def wait_until(self, true, what: str, seconds: float = HUNG) -> None:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                tails = [f"{f.name}: {f.read_text(errors='replace')[-1500:]}"
                         for f in sorted((self.folder / "logs").iterdir())]  # fmt: skip
                raise AssertionError("\n".join([f"not within {seconds:.0f} s: {what}", *tails]))
            time.sleep(0.2)

    def flwr(self, *arguments: str, cwd: Path | None = None) -> str:
        """Runs `flwr` as a user would after `. ./env.sh`."""
        line = '. "$0/env.sh" && cd "$1" && shift && exec flwr "$@"'
        command = ["sh", "-c", f'cd "$0" && {line}', self.folder, cwd or self.folder, *arguments]
        done = subprocess.run(
            command, env=self.environment(), capture_output=True, text=True, timeout=HUNG
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, project: Path | None = None, **config) -> int:
        """Starts a run and waits until it begins. Returns its number in Flower."""
        earlier = self.server_process()
        given = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
        output = self.flwr("run", ".", "--format", "json", "--run-config", given, cwd=project)
        answer = json.loads(output[output.index("{") :])
        assert answer["success"], output
        self.wait_until(lambda: self.server_process() not in (None, earlier), "the run has begun")
        return int(answer["run-id"])

    def status(self, run: int) -> str:
        output = self.flwr("list", "--run-id", str(run), "--format", "json")
        return json.loads(output[output.index("{") :])["runs"][0]["status"]

    def server_process(self) -> int | None:
        """The server of the current run, which superexec started."""
        return child(self.processes["superexec"].pid, "flwr-serverapp")

    def worker(self, node: str) -> int | None:
        """The process that answers a node's messages."""
        return child(self.processes[node].pid, "mixfl.deploy.flower.worker")

    def watcher(self, node: str) -> int | None:
        """The process that hands a node's messages to its worker."""
        return child(self.processes[node].pid, "flower\0worker")

    def finished(self, run: int, seconds: float = HUNG) -> str:
        """Waits for the end of a run. Returns its status."""
        self.wait_until(lambda: self.server_process() is None, "the run has ended", seconds)
        return self.status(run)

    def told(self, run: int) -> str:
        """What the server's part of a run printed."""
        return self.flwr("log", str(run), "--show")


class Supervised(Deployment):
    """The same, run by `mixfl flower up`: one supervisor for the server and one per node."""

    def __enter__(self) -> "Supervised":
        return self

    def start(self, name: str, *options: str, **environment: str) -> None:
        """Starts the supervisor of `server` or `node-N`."""
        role, _, number = name.partition("-")
        command = ["mixfl", "flower", "up", role, *filter(None, [number]), *options]
        own = {"PORT": str(self.ports[name])} if number else {}
        self.started[name] = time.monotonic()
        with open(self.log_file(f"up-{name}"), "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(**own, **environment), stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent,
            )  # fmt: skip

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()
        for name in ("superlink", "superexec", "flwr"):
            processes.kill(processes.marked(f"{self.folder.resolve()}/{name}"))
        for n in range(1, self.nodes + 1):
            for name in ("node", "worker"):
                processes.kill(processes.marked(f"{self.folder.resolve()}/{name}-{n}"))

    def part(self, child: str, line: str) -> processes.Test:
        """A process of a supervised child, by a part of its command line."""
        ours = processes.marked(f"{self.folder.resolve()}/{child}")

        def matches(process: Path) -> bool:
            return line.encode() in (process / "cmdline").read_bytes() and ours(process)

        return matches

    def runs(self) -> list[str]:
        """The numbers of the runs in Flower."""
        return re.findall(r"run: (\d+) is started", self.log("up-server"))


def second_project(deployment: Deployment, task: str) -> Path:
    """Another project that the same deployment can run."""
    folder = deployment.folder.parent / f"{deployment.folder.name}-{task}"
    shutil.rmtree(folder, ignore_errors=True)
    write_project(folder, task)
    return folder

"""Starts the engines' worker processes, sends them requests, and watches the machine meanwhile."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
TAG = "MIXFL_BENCH"  # in the environment of a worker and of its child processes
TICK = os.sysconf("SC_CLK_TCK")
LONGEST = 300  # seconds to wait for an answer


class WorkerFailed(Exception):
    pass


class Worker:
    """A process that speaks `benchmarks.peers.protocol`."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None, cwd: Path = ROOT):
        self.tag = f"{TAG}={uuid.uuid4().hex}"
        name, value = self.tag.split("=")
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            cwd=cwd, start_new_session=True,
            env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", **(env or {}), name: value},
        )  # fmt: skip

    def ask(self, do: str, longest: float = LONGEST, **more) -> dict:
        assert self.process.stdin
        assert self.process.stdout
        timer = threading.Timer(longest, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise WorkerFailed(f"stopped in '{do}': {self._last_line()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def run(self, rounds: int, longest: float = LONGEST) -> float:
        """Seconds that the rounds took."""
        return self.ask("run", longest, rounds=rounds)["seconds"]

    def timed(self, rounds: int) -> tuple[float, float]:
        """Seconds that the rounds took, and processor time of all of the worker's processes."""
        before = sum(map(_ticks, tagged(self.tag)))
        seconds = self.run(rounds)
        return seconds, (sum(map(_ticks, tagged(self.tag))) - before) / TICK

    def parameters(self) -> dict[str, np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "params.npz"
            self.ask("parameters", path=str(path))
            with np.load(path) as stored:
                return dict(stored)

    def peak_mb(self) -> float:
        """The largest resident size so far, summed over the worker's processes."""
        return sum(_peak_kb(pid) for pid in tagged(self.tag)) / 1024

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self.process.stdin
            self.process.stdin.write('{"do": "quit"}\n')
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in tagged(self.tag):  # its leftover child processes
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.log.close()

    def _last_line(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no message"


def module(name: str, *arguments: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", f"benchmarks.{name}", *arguments]


class OutsideLoad:
    """Use as `with OutsideLoad() as load: ...`. Afterwards load.share is the share of the machine's
    cores that other processes (or the host of a virtual machine) used meanwhile."""

    share = 0.0

    def __enter__(self):
        self.before = self._now()
        return self

    def __exit__(self, *_):
        busy, total, own = np.subtract(self._now(), self.before)
        self.share = float(max(0.0, busy - own) / max(total, 1))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Ticks of all cores so far: busy, total, and busy for the benchmark."""
        try:
            first = Path("/proc/stat").read_text().splitlines()[0]
        except OSError:
            return 0, 0, 0
        ticks = [int(t) for t in first.split()[1:9]]  # user nice system idle iowait irq ...
        own = sum(map(_ticks, {os.getpid(), *tagged(TAG + "=")}))
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks), own


def tagged(tag: str) -> list[int]:
    """Processes with the tag in their environment."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if tag.encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def _ticks(pid: int) -> int:
    """CPU ticks of a process and of the children that it has waited for."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))
    return 0


def _peak_kb(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1])
    return 0

"""Starts processes, restarts those that exit, and ends all of them with itself.

Whatever ends the supervisor also ends the processes it started. If any survive, the next
supervisor kills them first (processes.py). The pause before a restart grows while a process keeps
exiting soon after its start. The supervisor prints one line per event; the processes' own output
is in logs/.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mixfl.deploy.flower import processes
from mixfl.errors import MixflError

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds before a restart
WELL = 60.0  # seconds of running after which the pause is reset
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
LOG_BYTES = 10_000_000  # of a log file; one older file is kept
LOOK_EVERY = 0.2

Keeper = Generator[None, None, int]


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # stdout is closed
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


@dataclass
class Pause:
    """Seconds to wait after a failure; they double with each failure in a row."""

    first: float = FIRST_PAUSE
    longest: float = LONGEST_PAUSE
    failures: int = 0

    def next(self) -> float:
        seconds = min(self.first * 2.0 ** min(self.failures, 30), self.longest)
        self.failures += 1
        return seconds

    def reset(self) -> None:
        self.failures = 0


@dataclass
class Child:
    """A supervised process, run in the project's folder."""

    name: str
    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    starts: int = 0
    since: float = 0.0  # when it was started
    due: float = 0.0  # when to start it
    pause: Pause = field(default_factory=Pause)

    @property
    def mark(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"

    def tend(self) -> None:
        now = time.monotonic()
        if self.process is None:
            if now >= self.due:
                self._start(now)
            return
        exit_reason = ended(self.process)
        if exit_reason is not None:
            # Kill its children too: a run's server would keep the run folder locked.
            processes.kill(processes.marked(self.mark))
            self.process = None
            self._restart_later(now, exit_reason)

    def _start(self, now: float) -> None:
        self.starts, self.since = self.starts + 1, now
        try:
            self.process = start(self.command, self.folder, self.mark, self.environment, self.log)
        except OSError as error:
            self._restart_later(now, f"can't be started: {error.strerror or error}")
            return
        say(f"{self.name}: started, process {self.process.pid}")

    def _restart_later(self, now: float, why: str) -> None:
        lived = now - self.since
        if lived >= WELL:
            self.pause.reset()
        seconds = self.pause.next()
        self.due = now + seconds
        say(f"{self.name}: {why} after {lived:.0f} s; restarting in {seconds:g} s")

    def bound_log(self) -> None:
        """Copies and empties a log that is too long. The process keeps appending to it."""
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > LOG_BYTES:
                try:
                    shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
                finally:  # empty it even if the disk is too full for the copy
                    os.truncate(self.log, 0)


def start(
    command: Sequence[str], folder: Path, mark: str, environment: Mapping[str, str],
    log: Path | IO[bytes],
) -> subprocess.Popen:  # fmt: skip
    output = _opened(log) if isinstance(log, Path) else log
    try:
        return subprocess.Popen(
            command, cwd=folder, env={**os.environ, **environment, processes.MARK: mark},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the supervisor, which ends the others
            preexec_fn=processes.end_with(os.getpid()),
        )  # fmt: skip
    finally:
        if isinstance(log, Path):
            output.close()


def _opened(log: Path) -> IO[bytes]:
    try:
        return open(log, "ab")
    except OSError as error:
        say(f"{log} can't be written ({error.strerror}): this output is lost")
        return open(os.devnull, "ab")


def ended(process: subprocess.Popen) -> str | None:
    code = process.poll()
    if code is None:
        return None
    return f"killed by {_signal(-code)}" if code < 0 else f"exited with code {code}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Supervisor:
    """`new_keeper` makes the keeper, a generator that looks after the run. If one fails, another is
    made."""

    def __init__(
        self, folder: Path, children: list[Child], new_keeper: Callable[[], Keeper] | None = None
    ):
        self.folder, self.children, self.new_keeper = folder, children, new_keeper
        self.keeper: Keeper | None = None
        self.due, self.pause = 0.0, Pause()  # of the next keeper
        self.asked = 0  # how often it was asked to stop
        self.locks: list[IO] = []

    def run(self) -> int:
        """Runs until it is asked to stop (0) or the keeper ends (its code)."""
        os.umask(0o077)
        for name in ("state", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for child in self.children:
            self._claim(child.name)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        for child in self.children:
            left = processes.kill(processes.marked(child.mark))
            if left:
                what = "process" if left == 1 else "processes"
                say(f"{child.name}: killed {left} leftover {what} of an earlier supervisor")
        try:
            return self._tend()
        finally:
            self._end()

    def _claim(self, name: str) -> None:
        """Allows one supervisor at a time. The kernel releases the lock however this one ends."""
        file = open(self.folder / "state" / f"{name}.lock", "a+")  # noqa: SIM115 (held to the end)
        self.locks.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise MixflError(
                f"{name} in {self.folder} is already supervised, by process "
                f"{file.read().strip()}: stop that one first."
            ) from None
        with contextlib.suppress(OSError):  # a full disk; the lock is held anyway
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()

    def _stop(self, number: int, frame) -> None:
        self.asked += 1

    def _tend(self) -> int:
        looked = 0.0
        while not self.asked:
            for child in self.children:
                child.tend()
            try:
                self._keep()
            except StopIteration as end:
                return end.value
            if time.monotonic() > looked + 5:
                looked = time.monotonic()
                for child in self.children:
                    child.bound_log()
            time.sleep(LOOK_EVERY)
        say("asked to stop")
        return 0

    def _keep(self) -> None:
        """Advances the keeper. Raises StopIteration when it has ended."""
        if self.keeper is None and self.new_keeper is not None and time.monotonic() >= self.due:
            self.keeper = self.new_keeper()
        if self.keeper is None:
            return
        try:
            next(self.keeper)
        except OSError as error:
            seconds = self.pause.next()
            self.keeper, self.due = None, time.monotonic() + seconds
            say(f"the run can't be supervised: {error}; trying again in {seconds:g} s")

    def _end(self) -> None:
        """Sends SIGTERM to everything, and SIGKILL to what is left after GRACE seconds, or when
        asked to stop once more."""
        if self.keeper is not None:
            self.keeper.close()
        all_marked = [processes.marked(child.mark) for child in self.children]
        for wanted in all_marked:
            processes.send(wanted, signal.SIGTERM)
        end, asked = time.monotonic() + GRACE, self.asked
        while any(map(processes.running, all_marked)):
            if time.monotonic() > end or self.asked > asked:
                killed = sum(map(processes.kill, all_marked))
                say(f"{killed} processes did not exit after SIGTERM and were killed")
                break
            time.sleep(LOOK_EVERY)
        for child in self.children:
            if child.process is not None:
                child.process.kill()  # in case processes can't be found by their mark
                child.process.wait()
        for file in self.locks:
            file.close()
        say("all stopped")

"""Keeps processes up: starts them, starts again what ends, and ends all with itself.

However the supervisor ends, what it started ends too; should anything be left all the same, the
next supervisor ends it first (processes.py). A pause before a restart grows while a process keeps
ending soon. One line per event is printed; what the processes print is in logs/.
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
WELL = 60.0  # seconds after which a process that ends counts as one that ran well
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
LOG_BYTES = 10_000_000  # of a log file; the one before is kept
LOOK_EVERY = 0.2

Keeper = Generator[None, None, int]


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


@dataclass
class Pause:
    """The seconds to wait after each of several failures in a row."""

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
    """A process to be kept up, in the project's folder."""

    name: str
    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen | None = None
    starts: int = 0
    since: float = 0.0  # when it was started
    due: float = 0.0  # when it is to be started
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
        how = ended(self.process)
        if how is not None:
            # What it started goes too: a run's server would keep the run's folder locked.
            processes.kill(processes.marked(self.mark))
            self.process = None
            self._again(now, how)

    def _start(self, now: float) -> None:
        self.starts, self.since = self.starts + 1, now
        try:
            self.process = start(self.command, self.folder, self.mark, self.environment, self.log)
        except OSError as error:
            self._again(now, f"can't be started: {error.strerror or error}")
            return
        say(f"{self.name}: started, process {self.process.pid}")

    def _again(self, now: float, how: str) -> None:
        lived = now - self.since
        if lived >= WELL:
            self.pause.reset()
        seconds = self.pause.next()
        self.due = now + seconds
        say(f"{self.name}: {how} after {lived:.0f} s; starting again in {seconds:g} s")

    def bound_log(self) -> None:
        """It is copied and emptied: the process that writes to it, at its end, goes on."""
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > LOG_BYTES:
                try:
                    shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
                finally:  # a full disk is no reason to keep it
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
            start_new_session=True,  # Ctrl-C is for the supervisor, which sees to the rest
            preexec_fn=processes.end_with(os.getpid()),
        )  # fmt: skip
    finally:
        if isinstance(log, Path):
            output.close()


def _opened(log: Path) -> IO[bytes]:
    try:
        return open(log, "ab")
    except OSError as error:
        say(f"{log} can't be written ({error.strerror}); the output is lost")
        return open(os.devnull, "ab")


def ended(process: subprocess.Popen) -> str | None:
    code = process.poll()
    if code is None:
        return None
    return f"killed by {_signal(-code)}" if code < 0 else f"ended with code {code}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Supervisor:
    """`new_keeper` makes the keeper, and another one where that has failed."""

    def __init__(
        self, folder: Path, children: list[Child], new_keeper: Callable[[], Keeper] | None = None
    ):
        self.folder, self.children, self.new_keeper = folder, children, new_keeper
        self.keeper: Keeper | None = None
        self.due, self.pause = 0.0, Pause()  # of the next keeper
        self.asked = 0  # how often it was asked to stop
        self.locks: list[IO] = []

    def run(self) -> int:
        """Until it is asked to stop, or the keeper has ended: its code."""
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
                say(f"{child.name}: {left} of an earlier supervisor's processes ended")
        try:
            return self._tend()
        finally:
            self._end()

    def _claim(self, name: str) -> None:
        """One supervisor at a time; the kernel gives the lock back, however this one ends."""
        file = open(self.folder / "state" / f"{name}.lock", "a+")  # noqa: SIM115 (held to the end)
        self.locks.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise MixflError(
                f"{name} in {self.folder} is kept up already, by process {file.read().strip()}: "
                "stop that one first."
            ) from None
        with contextlib.suppress(OSError):  # a full disk; the lock is held all the same
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
        """Goes on with the keeper; StopIteration once it has ended."""
        if self.keeper is None and self.new_keeper is not None and time.monotonic() >= self.due:
            self.keeper = self.new_keeper()
        if self.keeper is None:
            return
        try:
            next(self.keeper)
        except OSError as error:
            seconds = self.pause.next()
            self.keeper, self.due = None, time.monotonic() + seconds
            say(f"the run can't be seen to: {error}; trying again in {seconds:g} s")

    def _end(self) -> None:
        """SIGTERM to everything, and SIGKILL to what is left after a while, or at a second call."""
        if self.keeper is not None:
            self.keeper.close()
        all_marked = [processes.marked(child.mark) for child in self.children]
        for wanted in all_marked:
            processes.send(wanted, signal.SIGTERM)
        end, asked = time.monotonic() + GRACE, self.asked
        while any(map(processes.running, all_marked)):
            if time.monotonic() > end or self.asked > asked:
                killed = sum(map(processes.kill, all_marked))
                say(f"{killed} processes did not end by themselves and were killed")
                break
            time.sleep(LOOK_EVERY)
        for child in self.children:
            if child.process is not None:
                child.process.kill()  # where processes can't be found by their mark
                child.process.wait()
        for file in self.locks:
            file.close()
        say("all stopped")

"""A worker on another machine, as the command sees it; the other end is serving.py.

A launcher (launchers.py) starts it as a job of Ray or Slurm. The job makes one run after the other,
like a local process, and gets them through a mailbox. A run is handed out only to a job that has
started: one that waits in a queue keeps none. If a job ends before its run, the run is lost: it
goes back to the others, and goes on from its last checkpoint.
"""

import contextlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from mixfl.errors import MixflError
from mixfl.studies.mailbox import ALIVE, ANSWERS, LOOK_SECONDS, REQUESTS, WORKERS, Lines

PULSE_SECONDS = 5.0
STATE_SECONDS = 1.0  # between two looks at a job's state
GRACE_SECONDS = 60.0  # for the job to say itself that its process hangs
END_SECONDS = 15.0  # for jobs to end by themselves
STARTS = 3  # of a job, one after the other, before it is an error


class Job(Protocol):
    def ended(self) -> str | None:
        """Why it is over; None if it is not."""

    def cancel(self) -> None: ...


class Launcher(Protocol):
    jobs: int  # at a time
    devices: int  # of each

    def start(self, mailbox: Path, request: dict[str, Any]) -> Job:
        """Starts serving.serve(**request). `mailbox`: a folder for files of its own too."""

    def close(self) -> None: ...


class Cluster:
    """All jobs of one command, and its sign of life."""

    def __init__(self, launcher: Launcher, hung: float):
        self.launcher, self.hung = launcher, hung
        self.numbers = itertools.count(1)
        self.boxes: Path | None = None
        self.jobs: list[Job] = []  # all that were started
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.workers = [Remote(self) for _ in range(launcher.jobs)]

    def mailbox(self, out: Path) -> Path:
        with self.lock:
            if self.boxes is None:
                name = f"{os.uname().nodename}-{os.getpid()}-{time.time_ns():x}"
                self.boxes = out.absolute() / WORKERS / name
                self.boxes.mkdir(parents=True, mode=0o700)
                threading.Thread(target=self._beat, daemon=True).start()
            box = self.boxes / str(next(self.numbers))
        box.mkdir(mode=0o700)
        return box

    def _beat(self) -> None:
        assert self.boxes is not None
        for beat in itertools.count():
            with contextlib.suppress(OSError):
                (self.boxes / ALIVE).write_text(str(beat))
            if self.over.wait(PULSE_SECONDS):
                return

    def close(self) -> None:
        """Ends all jobs. The mailboxes go, unless a job is still at work."""
        for worker in self.workers:
            worker.close()
        jobs = self.jobs
        deadline = time.monotonic() + END_SECONDS
        while jobs and time.monotonic() < deadline:
            jobs = [j for j in jobs if j.ended() is None]
            time.sleep(LOOK_SECONDS)
        for job in jobs:
            job.cancel()
        self.over.set()
        self.launcher.close()
        if self.boxes is not None and not jobs:
            shutil.rmtree(self.boxes, ignore_errors=True)
            with contextlib.suppress(OSError):  # another command's are there
                self.boxes.parent.rmdir()


class Remote:
    """Used as a worker_process.Worker is."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.job: Job | None = None
        self.started, self.looked = False, 0.0

    def ready(self, out: Path, wanted: Callable[[], bool]) -> bool:
        """Waits until its job runs, as long as that is wanted."""
        why: str | None = ""
        for _ in range(STARTS):
            if not wanted():
                return False
            if self.job is None:
                self._start(out)
            why = self._started(wanted)
            if why is None:
                return self.started
            self._drop()
        raise MixflError(f"a worker could not be started: {why}")

    def _start(self, out: Path) -> None:
        box = self.cluster.mailbox(out)
        self.answers, self.requests = Lines(box / ANSWERS), Lines(box / REQUESTS)
        launcher = self.cluster.launcher
        request = {
            "mailbox": str(box), "folder": os.getcwd(), "devices": launcher.devices,
            "hung": self.cluster.hung,
        }  # fmt: skip
        self.started, self.looked = False, time.monotonic()
        self.job = launcher.start(box, request)
        self.cluster.jobs.append(self.job)

    def _started(self, wanted: Callable[[], bool]) -> str | None:
        """Why it did not start; None if it did, or if that is no longer wanted."""
        while not self.started and wanted():
            ended = self._ended()  # first: what it said before can be read then
            for answer in self.answers.read():
                if "error" in answer:
                    raise MixflError(answer["error"])
                self.started = self.started or "ready" in answer
            if ended is not None:
                return ended
            time.sleep(LOOK_SECONDS)
        return None

    def _ended(self) -> str | None:
        """Asks for the job's state, but not all the time."""
        if self.job is None:
            return "it was stopped"
        if time.monotonic() - self.looked < STATE_SECONDS:
            return None
        self.looked = time.monotonic()
        return self.job.ended()

    def run(
        self, trial: Any, out: Path, tell: Callable[[int], None],
        note: Callable[[str, bool], None], judge: Callable[[dict], str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """As Worker.run; `lost` says why, if the job ended first."""
        self.requests.write(run=asdict(trial), out=str(out.absolute()), judged=judge is not None)
        heard = time.monotonic()
        while True:
            ended = self._ended()
            for answer in self.answers.read():
                heard = time.monotonic()
                if "round" in answer:
                    tell(answer["round"])
                elif "note" in answer:
                    note(answer["note"], answer["once"])
                elif "row" in answer:
                    assert judge is not None
                    self.requests.write(stop=judge(answer["row"]))
                else:
                    return answer
            silent = time.monotonic() - heard
            if ended is None and self.cluster.hung and silent > self.cluster.hung + GRACE_SECONDS:
                ended = f"nothing was heard of it for {silent:.0f} s"
            if ended is not None:
                self._drop()
                return {"lost": ended}
            time.sleep(LOOK_SECONDS)

    def replace(self) -> None:
        """Its process died; the job has begun another one."""

    def interrupt(self) -> None:
        if self.job is not None:
            self.requests.write(interrupt=True)

    def kill(self) -> None:
        if self.job is not None:
            self.job.cancel()

    def close(self) -> None:
        """There is nothing left for it: its place is free for others. `ready` starts it anew."""
        if self.job is not None and self.started:
            with contextlib.suppress(OSError):
                self.requests.write(close=True)
            self.job, self.started = None, False
        self._drop()

    def _drop(self) -> None:
        if self.job is not None:
            self.job.cancel()
        self.job, self.started = None, False

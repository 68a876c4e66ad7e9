"""Many runs, spread over the cores, each in a folder of its own.

The run folders are the results. A run that has finished or diverged is never made again, even if
another release of mixfl made it; one that was interrupted goes on from its checkpoint. A run folder
is locked while it is written, so several commands may work on the same results.

Every core has its own process (worker.py), which makes one run after the other; with `--on`, jobs
on other machines do (remote.py). If a process dies or makes no progress, its run is tried once
more, alone, after all others. If that fails too, the run is recorded as failed. If a machine is
lost, another one goes on with its run. `benchmarks/trials.py` compares a process per core with
using all cores for one run and with compiling several runs into one program.
"""

import collections
import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mixfl.errors import Interrupted, MixflError
from mixfl.runs.best import remove_checkpoints
from mixfl.runs.folder import differences, say_failed
from mixfl.runs.reading import read_metrics, read_run_config, read_status
from mixfl.settings import KEYS
from mixfl.studies.progress import Board
from mixfl.studies.worker_process import HUNG_SECONDS, Worker

if TYPE_CHECKING:
    from mixfl.studies.remote import Cluster, Remote

OVER = ("finished", "diverged")  # nothing is left to do
BUSY_SECONDS = 1.0  # until a run that another command is making is looked at again
LOSSES = 3  # of a run's machine, after which the run is to blame


@dataclass(frozen=True)
class Trial:
    """A run to make, in plain values that can be sent to another process."""

    task: str
    algorithm: str
    folder: str  # within the folder of all results
    label: str
    preset: str | None = None
    data: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    track: str | None = None

    @property
    def id(self) -> str:
        """Of its algorithm, which may be given as path.py:name."""
        from mixfl.algorithms import recipe  # needs JAX; the processes start before

        return recipe(self.algorithm).id

    def wanted(self) -> dict[str, Any]:
        """What its config.toml must say, as far as that is known without the data."""
        from mixfl.runs.keys import chosen_keys  # needs JAX; the processes start before

        keys = chosen_keys(self.task, self.algorithm, self.preset, {}, self.keys)
        head = {"task": self.task, "algorithm": self.id}
        if ".py" in self.task:
            head["task"] = os.path.abspath(self.task)
        if self.preset is not None:
            head["preset"] = self.preset
        if self.data is not None:
            head["data"] = os.path.abspath(self.data)
        return head | {k: v for k, v in keys.items() if v not in ("auto", None)}

    def rounds(self) -> int:
        return self.wanted().get("rounds", KEYS["rounds"].default)


@dataclass(frozen=True)
class Done:
    """How a trial ended."""

    trial: Trial
    folder: Path
    status: str
    round: int
    reason: str = ""  # why it failed

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder)


def done(trial: Trial, out: Path) -> Done | None:
    """How it ended, if it is over. If its folder holds another run, that is an error."""
    folder = out / trial.folder
    status = read_status(folder)
    if status.get("status") not in OVER or not (folder / "config.toml").is_file():
        return None
    config = read_run_config(folder)
    wanted = {k: v for k, v in trial.wanted().items() if k in config or k in ("preset", "data")}
    changed = differences({k: config.get(k) for k in wanted}, wanted)
    if changed:
        raise MixflError(
            f"{folder} holds another run ({'; '.join(changed)}): choose another --out."
        )
    return Done(trial, folder, status["status"], int(status.get("round", 0)))


def check_failed(ended: Sequence[Done]) -> None:
    """An error that names the trials that failed, if there are any."""
    failed = [d for d in ended if d.status == "failed"]
    if failed:
        which = "; ".join(f"{d.trial.label}: {d.reason}" for d in failed)
        raise MixflError(
            f"{len(failed)} of {len(ended)} runs failed ({which}). The others are done; the same "
            "command with --resume tries these again. Short of memory? Try --jobs 1."
        )


class Source(Protocol):
    """Trials that are thought of one by one, and judged while they run."""

    count: int  # to come

    def more(self) -> Trial | None:
        """The next one; None if there are enough."""

    def judge(self, trial: Trial, row: dict[str, Any]) -> str:
        """After an evaluation: why the run is to stop now; "" if it is not."""

    def over(self, done: Done) -> None: ...


def make(
    trials: Sequence[Trial], out: Path, jobs: int, board: Board, resume: bool = True,
    hung: float = HUNG_SECONDS,
) -> list[Done]:  # fmt: skip
    """Makes the trials that are not over yet; returns how all ended, in their order."""
    with Crew(jobs, hung) as crew:
        return crew.make(trials, out, board, resume)


class Crew:
    """The processes, and a thread for each. They import JAX at once, while the trials are still
    being checked. One that makes no progress for `hung` seconds is ended; 0: none is. With a
    `cluster`, the jobs that it starts on other machines."""

    workers: "Sequence[Worker | Remote]"

    def __init__(
        self, jobs: int, hung: float = HUNG_SECONDS, cluster: "Cluster | None" = None
    ):  # fmt: skip
        self.cluster = cluster
        if cluster is not None:
            self.workers = cluster.workers
            return
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        # One core for each if there are as many; otherwise they share all cores.
        pinned = jobs == len(cores) and jobs > 1
        devices = 1 if jobs > 1 else None
        self.workers = [Worker(cores[i] if pinned else None, devices, hung) for i in range(jobs)]

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *error) -> None:
        if self.cluster is not None:
            self.cluster.close()
            return
        for worker in self.workers:
            worker.close()

    def make(
        self, trials: Sequence[Trial], out: Path, board: Board, resume: bool = True,
        source: Source | None = None,
    ) -> list[Done]:  # fmt: skip
        """Also those of the `source`, which is told how each ended; they are not returned."""
        begun = next((t for t in trials if (out / t.folder / "config.toml").exists()), None)
        if begun is not None and not resume:
            raise MixflError(
                f"{out / begun.folder} holds a run already: --resume to go on, or choose another "
                "--out."
            )
        self.out, self.board, self.source = out, board, source
        self.ended = {t.folder: done(t, out) for t in trials}
        self.left = collections.deque(t for t in trials if self.ended[t.folder] is None)
        self.again: collections.deque[Trial] = collections.deque()  # alone, at the end
        self.losses: collections.Counter[str] = collections.Counter()  # of machines, by folder
        self.noted: set[str] = set()  # messages that are the same for all trials
        self.lock = threading.Lock()
        self.error: Exception | None = None
        self.stopping = self.last_time = self.enough = False
        more = source.count if source is not None else 0
        self.all = len(trials) + more
        self.threads = min(len(self.workers), max(len(self.left) + more, 1))
        board.begin(list(self.left), self.all, self.threads, more)
        try:
            self._work()
        finally:
            board.end()
        return [self.ended[t.folder] for t in trials]  # type: ignore[misc]

    def _work(self) -> None:
        threads = [
            threading.Thread(target=self._guarded, args=(i, w), daemon=True)
            for i, w in enumerate(self.workers[: self.threads])
        ]
        with self._interrupts():
            finish(threads)
            if self.again and not self.stopping:
                self._once_more()
        if self.error is not None:
            raise self.error
        if self.stopping:
            raise Interrupted(
                f"stopped; {sum(d is not None for d in self.ended.values())} of {self.all} "
                f"runs are over, the others are saved in {self.out}. The same command with "
                "--resume goes on."
            )

    def _once_more(self) -> None:
        """One process tries the failed runs again, with all the memory for itself."""
        for worker in self.workers[1:]:
            worker.close()
        self.enough = True
        self.left, self.again = self.again, collections.deque()
        self.last_time = True
        finish([threading.Thread(target=self._guarded, args=(0, self.workers[0]), daemon=True)])

    @contextlib.contextmanager
    def _interrupts(self):
        """On Ctrl-C or SIGTERM the workers save and stop; a second one stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number, frame):
            if self.stopping:
                for worker in self.workers:
                    worker.kill()
                raise KeyboardInterrupt
            self.stopping = True
            self.board.note("stopping: runs under way are saved; Ctrl-C again stops at once")
            for worker in self.workers:
                worker.interrupt()

        before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)

    def _guarded(self, index: int, worker: "Worker | Remote") -> None:
        try:
            self._loop(index, worker)
        except Exception as error:  # raised by `_work`
            self.error = self.error or error
            self.stopping = True
            for other in self.workers:
                other.interrupt()

    def _loop(self, index: int, worker: "Worker | Remote") -> None:
        while worker.ready(self.out, self._wanted):
            with self.lock:
                trial = self._next()
            if trial is None:
                continue
            ended = done(trial, self.out)  # another command may have made it meanwhile
            if ended is None:
                answer = self._answer(index, worker, trial)
                if answer.get("busy"):
                    time.sleep(BUSY_SECONDS)
                    with self.lock:
                        self.left.append(trial)
                    continue
                if self.stopping and {"error", "died", "lost"} & answer.keys():  # it is saved
                    return
                if "lost" in answer:
                    self._lost(trial, answer["lost"])
                    continue
                if "died" in answer:
                    worker.replace()
                    self._died(trial, answer["died"])
                    continue
                if answer.get("on_request"):
                    self._stopped(trial, answer["error"])
                    continue
                if "error" in answer:
                    raise MixflError(f"{trial.label}: {answer['error']}")
                ended = done(trial, self.out)
                if ended is None:
                    raise MixflError(f"{self.out / trial.folder} is not what {trial.label} wrote.")
                remove_checkpoints(ended.folder)
            self._over(ended)
        if self.cluster is not None:
            worker.close()

    def _wanted(self) -> bool:
        more = self.source is not None and not self.enough
        return not self.stopping and (bool(self.left) or more)

    def _next(self) -> Trial | None:
        if self.left:
            return self.left.popleft()
        trial = self.source.more() if self.source is not None and not self.enough else None
        self.enough = trial is None
        if trial is not None:
            self.ended.setdefault(trial.folder, None)
            self.board.known(trial)
        return trial

    def _answer(self, index: int, worker: "Worker | Remote", trial: Trial) -> dict[str, Any]:
        tell = partial(self.board.running, index, trial)
        tell(0)
        judge = partial(self.source.judge, trial) if self.source is not None else None
        return worker.run(trial, self.out, tell, partial(self._note, trial), judge)

    def _lost(self, trial: Trial, reason: str) -> None:
        with self.lock:
            self.losses[trial.folder] += 1
            often = self.losses[trial.folder]
            if often < LOSSES:
                self.left.appendleft(trial)
        if often < LOSSES:
            self.board.note(f"{trial.label}: {reason}; another worker goes on with it")
        else:
            self._died(trial, f"{reason}, {often} times")

    def _note(self, trial: Trial, message: str, once: bool) -> None:
        with self.lock:
            repeated = once and message in self.noted
            self.noted.add(message)
        if not repeated:
            self.board.note(f"{trial.label}: {message}")

    def _died(self, trial: Trial, reason: str) -> None:
        if not self.last_time:
            self.board.note(f"{trial.label}: {reason}: it is tried again, alone, at the end")
            with self.lock:
                self.again.append(trial)
            return
        folder = self.out / trial.folder
        say_failed(folder, reason)
        self._stopped(trial, reason)

    def _stopped(self, trial: Trial, reason: str) -> None:
        """It is over for now, without a result."""
        folder = self.out / trial.folder
        self._over(Done(trial, folder, "failed", read_status(folder).get("round", 0), reason))

    def _over(self, ended: Done) -> None:
        with self.lock:
            self.ended[ended.trial.folder] = ended
            if self.source is not None:
                self.source.over(ended)
            self.board.over(ended)


def finish(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # signals are handled meanwhile
            thread.join(0.2)

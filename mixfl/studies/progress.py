"""How far many runs have got, and how long the rest will take."""

import sys
import time
from collections import defaultdict
from typing import Any

from mixfl.runs.wording import clock, summary


class Board:
    """This one prints nothing; it knows the time left."""

    def begin(self, left: list, total: int, jobs: int, unknown: int = 0) -> None:
        """`left`: the trials to make, out of `total`. `unknown`: how many more will follow."""
        self.left = {t.folder: t for t in left}
        self.total, self.jobs, self.unknown = total, jobs, unknown
        self.began: dict[str, float] = {}
        self.took: dict[tuple, list[float]] = defaultdict(list)

    def known(self, trial: Any) -> None:
        """One of the unknown."""
        self.left[trial.folder] = trial
        self.unknown -= 1

    @property
    def to_make(self) -> int:
        return len(self.left) + self.unknown

    def running(self, worker: int, trial: Any, round: int) -> None:
        self.began.setdefault(trial.folder, time.perf_counter())

    def over(self, done: Any) -> None:
        trial = done.trial
        self.left.pop(trial.folder, None)
        if trial.folder in self.began and done.status == "finished":
            self.took[kind(trial)].append(time.perf_counter() - self.began[trial.folder])

    def note(self, message: str) -> None: ...
    def end(self) -> None: ...

    def seconds_left(self) -> float | None:
        """Estimated from runs of the same kind; None until one has finished."""
        every = [t for times in self.took.values() for t in times]
        if not every:
            return None
        mean = sum(every) / len(every)
        now, work = time.perf_counter(), self.unknown * mean
        for trial in list(self.left.values()):  # threads change it
            times = self.took.get(kind(trial))
            expected = sum(times) / len(times) if times else mean
            work += max(expected - (now - self.began.get(trial.folder, now)), 0)
        return work / min(self.jobs, max(self.to_make, 1))

    def progress(self) -> str:
        left = self.seconds_left()
        over = self.total - self.to_make
        return f"{over}/{self.total} runs" + ("" if left is None else f", left {clock(left)}")


def kind(trial: Any) -> tuple:
    return trial.task, trial.algorithm, trial.preset, trial.rounds()


def ending(done: Any) -> str:
    if done.status == "diverged":
        return f"diverged at round {done.round}"
    if done.status == "failed":
        return f"failed: {done.reason}"
    rows = done.rows
    return summary(rows[-1]) if rows else "finished"


class Lines(Board):
    """A line for each run that ends."""

    def begin(self, left, total, jobs, unknown=0):
        super().begin(left, total, jobs, unknown)
        kept = f"{total - self.to_make} are done already, " if self.to_make < total else ""
        print(f"{total} runs: {kept}{self.to_make} to make, {jobs} at a time", flush=True)

    def over(self, done):
        super().over(done)
        print(f"{done.trial.label}: {ending(done)}  ({self.progress()})", flush=True)

    def note(self, message):
        print(message, file=sys.stderr, flush=True)


class Bars(Board):
    """On a terminal: a bar for all runs, and one for each that is being made."""

    def begin(self, left, total, jobs, unknown=0):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        super().begin(left, total, jobs, unknown)
        self.console = Console()
        columns = TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[said]}")
        self.bars = Progress(*columns, console=self.console)
        self.whole = self.bars.add_task("[bold]all runs", total=total, said=self.progress())
        self.bars.update(self.whole, completed=total - self.to_make)
        self.workers: dict[int, Any] = {}
        self.bars.start()

    def running(self, worker, trial, round):
        super().running(worker, trial, round)
        if worker not in self.workers:
            self.workers[worker] = self.bars.add_task("", said="")
        rounds = trial.rounds()
        self.bars.update(
            self.workers[worker], description=trial.label.replace("[", "\\["), completed=round,
            total=rounds, said=f"{round}/{rounds} rounds",
        )  # fmt: skip
        self.bars.update(self.whole, said=self.progress())

    def over(self, done):
        super().over(done)
        self.note(f"{done.trial.label}: {ending(done)}", style=None)
        self.bars.update(self.whole, completed=self.total - self.to_make, said=self.progress())

    def note(self, message, style="yellow"):
        self.console.print(message, style=style, highlight=False, markup=False)

    def end(self):
        self.bars.stop()


def board() -> Board:
    return Bars() if sys.stdout.isatty() else Lines()

"""Progress of a run: a bar on a terminal, plain lines elsewhere, or nothing. In a notebook:
notebook.py."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mixfl.runs.sinks.base import Detail, Quiet
from mixfl.runs.sinks.notebook import Notebook, in_notebook
from mixfl.runs.wording import clock, summary

WITHIN_SECONDS = 20  # between lines about a long round


class Logged(Quiet):
    """Shows no progress. Notes go to the logger `mixfl`: as infos if they ask for no action, or as
    warnings, which Python prints unless logging is set up otherwise."""

    def note(self, message):
        level = logging.INFO if isinstance(message, Detail) else logging.WARNING
        logging.getLogger("mixfl").log(level, "%s", message)


class Plain(Quiet):
    """A line per evaluation."""

    label = "mixfl"

    def begin(self, start):
        self.label, self.total, self.first = start.label, start.rounds, None
        self.said = time.perf_counter()
        super().begin(start)

    def advance(self, round):
        if self.first is None:  # the first round includes the compilation
            self.first, self.begun = round, time.perf_counter()
        self.done = round

    def within(self, progress):
        now = time.perf_counter()
        if now - self.said > WITHIN_SECONDS:
            self.said = now
            where = f"round {progress.round + 1}/{self.total}"
            print(f"{self.label}: {where}: {progress.words}", flush=True)

    def evaluated(self, row):
        # Rounds after the evaluated one may be done by now.
        done = max(self.done - self.first, 1)
        left = (time.perf_counter() - self.begun) / done * (self.total - self.done)
        print(
            f"{self.label}: round {row['round']}/{self.total}  {summary(row)}  left {clock(left)}",
            flush=True,
        )

    def note(self, message):
        print(f"{self.label}: {message}", file=sys.stderr, flush=True)


class Bar(Quiet):
    """A bar with the time left, on a terminal."""

    def __init__(self):
        from rich.console import Console

        self.console = Console()
        self.progress: Any = None

    def begin(self, start):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )  # fmt: skip

        self.progress = Progress(
            TextColumn("[bold]{task.description:<16}"), BarColumn(bar_width=24),
            MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"), console=self.console,
        )  # fmt: skip
        self.task = self.progress.add_task(
            start.label, total=start.rounds, completed=start.round, metrics=""
        )
        self.progress.start()
        super().begin(start)

    def advance(self, round):
        self.progress.update(self.task, completed=round)

    def within(self, progress):
        # A round counts as done when its numbers are there.
        done = progress.round + 0.99 * progress.share
        self.progress.update(self.task, completed=done, metrics=progress.words)

    def evaluated(self, row):
        self.progress.update(self.task, metrics=summary(row))

    def note(self, message):
        self.console.print(message, style="yellow", highlight=False, markup=False)

    def ended(self, error):
        if self.progress is not None:
            self.progress.stop()


def reporter(show: bool | None = None) -> Quiet:
    """True: always; False: never; None: only on a terminal or in a notebook. Notes are always
    told."""
    if show is not False and in_notebook():
        return Notebook()
    terminal = sys.stdout.isatty()
    if show is False or (show is None and not terminal):
        return Logged()
    return Bar() if terminal else Plain()


@contextlib.contextmanager
def steps() -> Iterator[Callable[[int, int, str], None]]:
    """Progress of work in steps: report(done, total, what). A line per step without a terminal."""
    if not sys.stdout.isatty():
        said: set[str] = set()

        def line(done: int, total: int, text: str) -> None:
            if text not in said:
                said.add(text)
                print(text, file=sys.stderr, flush=True)

        yield line
        return
    from rich.progress import Progress

    with Progress(transient=True) as bars:
        tasks: dict[str, Any] = {}

        def bar(done: int, total: int, text: str) -> None:
            if text not in tasks:
                tasks[text] = bars.add_task(text, total=total)
            bars.update(tasks[text], completed=done, total=total)

        yield bar

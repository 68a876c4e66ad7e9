"""Progress of a run: a bar on a terminal, plain lines elsewhere, nothing where not wanted."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# Shown while training, in this order, as far as a problem reports them.
SHOWN = ("eval/loss", "eval/auc", "eval/accuracy", "eval/central/accuracy", "eval/recall@10")

WITHIN_SECONDS = 20  # between lines about a long round


def summary(row: dict[str, Any]) -> str:
    keys = [k for k in SHOWN if row.get(k) is not None]
    keys = keys or [k for k in row if k.startswith(("eval/", "train/")) and row[k] is not None][:2]
    return "  ".join(f"{k.removeprefix('eval/')} {number(row[k])}" for k in keys)


def number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Quiet:
    def start(self, label: str, done: int, total: int) -> None: ...
    def advance(self, done: int) -> None: ...
    def within(self, round: int, part: float, words: str) -> None: ...
    def evaluated(self, row: dict[str, Any]) -> None: ...
    def note(self, message: str) -> None: ...
    def stop(self) -> None: ...


class Plain(Quiet):
    """A line per evaluation."""

    def start(self, label, done, total):
        self.label, self.total, self.first = label, total, None
        self.said = time.perf_counter()

    def advance(self, done):
        if self.first is None:  # the first round has the compilation in it
            self.first, self.begun = done, time.perf_counter()
        self.done = done

    def within(self, round, part, words):
        now = time.perf_counter()
        if now - self.said > WITHIN_SECONDS:
            self.said = now
            print(f"{self.label}: round {round + 1}/{self.total}: {words}", flush=True)

    def evaluated(self, row):
        # Rounds after the evaluated one may be done by now.
        done = max(self.done - self.first, 1)
        left = (time.perf_counter() - self.begun) / done * (self.total - self.done)
        print(
            f"{self.label}: round {row['round']}/{self.total}  {summary(row)}  left {clock(left)}",
            flush=True,
        )

    def note(self, message):
        print(f"{getattr(self, 'label', 'mixfl')}: {message}", file=sys.stderr, flush=True)


class Bar(Quiet):
    """A bar with the time left, on a terminal."""

    def __init__(self):
        from rich.console import Console

        self.console = Console()

    def start(self, label, done, total):
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
        self.task = self.progress.add_task(label, total=total, completed=done, metrics="")
        self.progress.start()

    def advance(self, done):
        self.progress.update(self.task, completed=done)

    def within(self, round, part, words):
        # A round counts as done when its numbers are there.
        self.progress.update(self.task, completed=round + 0.99 * part, metrics=words)

    def evaluated(self, row):
        self.progress.update(self.task, metrics=summary(row))

    def note(self, message):
        self.console.print(message, style="yellow", highlight=False, markup=False)

    def stop(self):
        self.progress.stop()


def reporter(show: bool | None = None) -> Quiet:
    """True: always; False: never; None: only on a terminal."""
    terminal = sys.stdout.isatty()
    if show is False or (show is None and not terminal):
        return Quiet()
    return Bar() if terminal else Plain()


@contextlib.contextmanager
def steps() -> Iterator[Callable[[int, int, str], None]]:
    """Progress of work in steps: report(done, total, what). Lines off a terminal, one per step."""
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

"""Progress of a run in a notebook: a bar and curves in the cell's output, which grow."""

import sys
import time
from collections.abc import Iterable
from html import escape
from typing import Any

from mixfl.errors import Interrupted
from mixfl.runs.html import FAINT, curves
from mixfl.runs.sinks.base import Detail, Quiet, Row
from mixfl.runs.wording import clock

REDRAWN_SECONDS = 0.3  # a notebook keeps up with so much


def in_notebook() -> bool:
    """Is this the kernel of a notebook? Without importing IPython, which it would have done."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class Shown:
    """What a cell shows: HTML, or a line where there is only text."""

    def __init__(self, html: str, text: str):
        self.html, self.text = html, text

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


class Notebook(Quiet):
    """One output per run. Notes are listed below the curves; those that ask for no action are
    folded."""

    def __init__(self):
        self._reset("mixfl", 0, 0, [])

    def _reset(self, label: str, total: int, done: int, rows: list[Row]) -> None:
        self.label, self.total, self.first, self.rows = label, total, done, rows
        self.done: float = done
        self.words = "compiling the first round"
        self.notes: list[str] = []
        self.handle: Any = None
        self.begun, self.drawn = time.perf_counter(), 0.0

    def begin(self, start):
        earlier = self.notes  # told before the run began
        self._reset(start.label, start.rounds, start.round, list(start.rows))
        self.notes = earlier
        super().begin(start)
        self._draw()

    def within(self, progress):
        self.done, self.words = progress.round + progress.share, progress.words
        self._draw_again()

    def advance(self, round):
        if self.words:  # the first round included the compilation
            self.first, self.begun, self.words = round, time.perf_counter(), ""
        self.done = round
        self._draw_again()

    def evaluated(self, row):
        self.rows.append(row)
        self._draw_again()

    def note(self, message):
        self.notes.append(message)
        if self.handle is not None:
            self._draw()

    def stopped(self, reason):
        self.words = reason

    def ended(self, error):
        if error is not None:
            kept = isinstance(error, Interrupted | KeyboardInterrupt)
            self.words = "interrupted" if kept else type(error).__name__
        elif self.done == self.total:
            self.words = "finished"
        if self.handle is not None:
            self._draw()
        self.handle, self.notes = None, []

    def _draw_again(self) -> None:
        if time.perf_counter() - self.drawn > REDRAWN_SECONDS:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import display

        self.drawn = time.perf_counter()
        shown = Shown(self._html(), f"{self.label}: round {self.done:g} of {self.total}")
        if self.handle is None:
            self.handle = display(shown, display_id=True)
        else:
            self.handle.update(shown)

    def _left(self) -> str:
        made = self.done - self.first
        if made <= 0 or self.done >= self.total:
            return ""
        return f"{clock((self.drawn - self.begun) / made * (self.total - self.done))} left"

    def _html(self) -> str:
        state = escape(", ".join(filter(None, [self.words, self._left()])))
        bar = f'<progress value="{self.done:g}" max="{max(self.total, 1)}"></progress>'
        head = f"<b>{escape(self.label)}</b> {bar} {int(self.done)} of {self.total} rounds"
        said = [n for n in self.notes if not isinstance(n, Detail)]
        details = [n for n in self.notes if isinstance(n, Detail)]
        folded = f"<details><summary>notes</summary>{_lines(details)}</details>" if details else ""
        return (
            f'<div>{head} <span style="{FAINT}">{state}</span>'
            f"{curves(self.rows, self.total)}{_lines(said)}{folded}</div>"
        )


def _lines(notes: Iterable[str]) -> str:
    return "".join(f'<div style="{FAINT}">{escape(note)}</div>' for note in notes)

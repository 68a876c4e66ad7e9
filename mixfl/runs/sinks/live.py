"""What `mixfl watch` follows: progress.json, how far a run is; log.jsonl, what it said.

Nothing depends on these files, so an error while writing them (a full disk) is ignored.
"""

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from mixfl.errors import Diverged, Interrupted
from mixfl.runs.sinks.base import Sink
from mixfl.runs.sinks.folder import words

PROGRESS, LOG = "progress.json", "log.jsonl"
TELL_SECONDS = 1.0  # between two times that progress is written
TEXT = 2000  # characters of a line in the log


class Live(Sink):
    def __init__(self, path: Path):
        self.path = path
        self.before: list[str] = []  # notes, until the run begins
        self.begun = False
        self.told = 0.0

    def begin(self, start):
        self.begun, self.rounds, self.done = True, start.rounds, start.round
        self.first: tuple[int, float] | None = None  # the first round's end: it compiles
        how = f"goes on from round {start.round}" if start.round else "begins"
        version = start.config.get("version", "")
        self._log(
            "begin", f"{how}: process {os.getpid()} on {socket.gethostname()}, mixfl {version}"
        )
        for message in (*self.before, *start.notes):
            self._log("note", message)
        self._progress(0.0)

    def advance(self, round):
        now = time.monotonic()
        self.done = round
        if self.first is None:
            self.first = (round, now)
        if now - self.told > TELL_SECONDS:
            self._progress(0.0)

    def within(self, progress):
        if time.monotonic() - self.told > TELL_SECONDS:
            self._progress(progress.share)

    def note(self, message):
        if self.begun:
            self._log("note", message)
        else:
            self.before.append(message)

    def stopped(self, reason):
        self._log("note", f"ends early: {reason}")

    def ended(self, error):
        if not self.begun:
            return
        with contextlib.suppress(OSError):
            (self.path / PROGRESS).unlink(missing_ok=True)
        kind = "end" if error is None else ENDS.get(type(error), "failed")
        self._log(kind, f"finished after round {self.done}" if error is None else words(error))

    def _log(self, kind: str, text: str) -> None:
        line = {
            "time": round(time.time(), 1),
            "round": self.done,
            "kind": kind,
            "text": text[:TEXT],
        }
        with contextlib.suppress(OSError), open(self.path / LOG, "ab", buffering=0) as file:
            file.write((json.dumps(line) + "\n").encode())

    def _progress(self, share: float) -> None:
        """`share`: of the round under way."""
        self.told = time.monotonic()
        content: dict[str, Any] = {
            "round": self.done, "rounds": self.rounds, "share": round(share, 3),
            "time": round(time.time(), 1),
        }  # fmt: skip
        done = self.done + share
        if self.first is not None and done > self.first[0]:
            seconds = (self.told - self.first[1]) / (done - self.first[0])
            content["left"] = round(seconds * (self.rounds - done), 1)
        partial = self.path / f".{PROGRESS}.partial"
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(content) + "\n")
            partial.replace(self.path / PROGRESS)


ENDS = {Interrupted: "stopped", Diverged: "diverged"}

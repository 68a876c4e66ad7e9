"""A run's folder as a sink: metrics.jsonl, status.json and the model."""

import contextlib

from mixfl.errors import Diverged, Interrupted, MixflError
from mixfl.runs.folder import MESSAGE, RunFolder
from mixfl.runs.reading import read_status
from mixfl.runs.sinks.base import Sink


class InFolder(Sink):
    """status.json always says how the run is doing, whatever ends it."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        earlier = read_status(folder.path)
        self.earlier = earlier.get("status", "running")
        self.begun = False
        self.round = earlier.get("round", 0)  # how far the run is
        self.kept = earlier.get("saved", 0)  # the round of its newest checkpoint
        self.alarms = earlier.get("alarms", 0)
        self.why = ""  # it ended before its last round

    def begin(self, start):
        self.begun = True
        self.alarms = max((row.get("alarms/loss", 0) for row in start.rows), default=0)
        self._running(start.round)

    def advance(self, round):
        self.round = round

    def evaluated(self, row):
        self.folder.add_metrics(row)
        self.alarms = row.get("alarms/loss", 0)

    def saved(self, round):
        self._running(round)

    def stopped(self, reason):
        self.why = reason

    def finished(self, params):
        self.folder.save_model(params)
        self.kept = 0  # there is nothing to resume
        self._set("finished", self.round)

    def ended(self, error):
        if error is None or (not self.begun and self.earlier != "running"):
            return  # its status is right already
        with contextlib.suppress(MixflError, OSError):  # the disk may be full
            if isinstance(error, Interrupted):
                self.kept = 0
                self.why = "on request" if error.on_request else ""
                self._set("interrupted", self.round)
            elif isinstance(error, Diverged):
                self._set("diverged", error.round, str(error))
            else:
                self._set("failed", self.round, words(error))

    def _running(self, round: int) -> None:
        self.round = self.kept = round
        self._set("running", round)

    def _set(self, status: str, round: int, message: str = "") -> None:
        self.folder.set_status(
            status, round, message, saved=self.kept, alarms=self.alarms, stopped=self.why[:MESSAGE]
        )


def words(error: BaseException) -> str:
    """Its message, and its type if it was not made for the user."""
    if isinstance(error, MixflError):
        return str(error)
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind

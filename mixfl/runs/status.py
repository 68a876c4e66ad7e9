"""What a run's status.json says, whatever ends the run."""

import contextlib

from mixfl.errors import Diverged, Interrupted, MixflError
from mixfl.runs.folder import RunDirectory, read_status


class Status:
    """`round` is how far the run is, `saved` the round of its newest checkpoint."""

    def __init__(self, directory: RunDirectory | None):
        self.directory = directory
        earlier = read_status(directory.path) if directory is not None else {}
        self.earlier = earlier.get("status", "running")
        self.begun = False
        self.round, self.saved = earlier.get("round", 0), earlier.get("saved", 0)
        self.alarms = earlier.get("alarms", 0)

    def running(self, round: int, saved: int) -> None:
        self.begun, self.round, self.saved = True, round, saved
        self._set("running", round)

    def interrupted(self, round: int) -> None:
        self._set("interrupted", round)

    def finished(self, round: int) -> None:
        self.saved = 0  # nothing is left to go on with
        self._set("finished", round)

    def ended_by(self, error: BaseException) -> None:
        """A full disk does not keep it from being said, if that can be helped."""
        if isinstance(error, Interrupted):
            return
        if not self.begun and self.earlier != "running":
            return  # it was not even begun, and is what it was
        with contextlib.suppress(MixflError, OSError):
            if isinstance(error, Diverged):
                self._set("diverged", error.round, str(error))
            else:
                self._set("failed", self.round, words(error))

    def _set(self, status: str, round: int, message: str = "") -> None:
        if self.directory is not None:
            saved = self.saved if status != "interrupted" else 0
            self.directory.set_status(status, round, message, saved=saved, alarms=self.alarms)


def words(error: BaseException) -> str:
    """Of its own, or with its kind where it was not made for the user."""
    if isinstance(error, MixflError):
        return str(error)
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind

"""What the trackers share."""

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mixfl.runs.folder import RunFolder
from mixfl.runs.sinks.base import Row, Sink, Start


class Tracker(Sink):
    """Each run has a run at the tracker, whose id is kept in the run folder. What the tracker has
    already is not logged again: a resumed run goes on in it. No method raises an error."""

    name: str  # as its users know it
    option: str  # as --track has it
    variables: Mapping[str, str]  # what it is to find in its environment, unless the user set it

    def __init__(self, folder: RunFolder, note: Callable[[str], None]):
        self.folder, self.say = folder, note
        self.run: Any = None  # None: nothing is logged (any more)
        self.logged = 0  # the last round that the tracker has

    def begin(self, start):
        self._try(lambda: self._begin(start))

    def evaluated(self, row):
        if self.run is not None and row["round"] > self.logged:
            self._try(lambda: self._add(row))

    def ended(self, error):
        if self.run is not None:
            self._try(lambda: self._end(error))
        self.run = None

    def _begin(self, start: Start) -> None:
        raise NotImplementedError

    def _add(self, row: Row) -> None:
        raise NotImplementedError

    def _end(self, error: BaseException | None) -> None:
        raise NotImplementedError

    def _try(self, action: Callable[[], None]) -> None:
        """A tracker that is gone does not end the training."""
        try:
            with environment(self.variables):
                action()
        except Exception as error:
            self.run = None
            self.say(self._failed(error))

    def _failed(self, error: Exception) -> str:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        folder = str(self.folder.path)
        later = ["mixfl", "run", "--config", f"{folder}/config.toml", "--out", folder]
        return (
            f"{self.name} failed ({lines[0][:200]}): going on without it. To log what is missing "
            f"there later: {shlex.join(later)} --resume --track {self.option}"
        )


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Trackers read variables at every call. They are taken back."""
    missing = {k: v for k, v in variables.items() if k not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for variable in missing:
            os.environ.pop(variable, None)

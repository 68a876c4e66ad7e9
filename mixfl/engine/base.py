"""What runs rounds: the simulator (simulator.py), or a deployment (deploy/flower/engine.py).

A run (runs/) knows its engine only through this protocol.
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mixfl.problem import Problem
from mixfl.settings import Settings


class RoundResult(NamedTuple):
    round: int  # rounds done so far
    state: Any  # has the model as .x
    info: dict[str, Any]  # numbers of this round, still on the device


class RoundBytes(NamedTuple):
    """What a client sends and receives in a round, on average."""

    down: float
    up: float


class Progress(NamedTuple):
    """How far a long round is."""

    round: int
    share: float  # of its work, done so far
    words: str  # such as "40 of 100 clients"


class KeepsNothing:
    """For engines whose clients keep nothing between rounds."""

    def keep(self, folder: Path, round: int) -> None: ...

    def flush(self) -> None: ...

    def saved(self, round: int, kept: Collection[int]) -> None: ...


class Engine(Protocol):
    problem: Problem
    on_progress: Callable[[Progress], None]  # called within long rounds

    def init(self) -> Any:
        """The state before the first round; it has the model as .x."""

    def shapes(self) -> Any:
        """The shapes of a state, without its values."""

    def rounds(self, state: Any, start: int, stop: int) -> Iterator[RoundResult]:
        """Rounds start .. stop - 1 from `state`, which is consumed."""

    def keep(self, folder: Path, round: int) -> None:
        """What clients keep between rounds is kept in this folder, and is now what it was after
        `round`. Nothing is made if they keep nothing."""

    def flush(self) -> None:
        """Called before a checkpoint."""

    def saved(self, round: int, kept: Collection[int]) -> None:
        """There is a checkpoint of this round; `kept` are the rounds of all checkpoints."""

    def resolved(self) -> Settings:
        """The settings, with every `auto` replaced by its value."""

    def round_bytes(self, round: int) -> RoundBytes:
        """Counted from the arrays that are sent. Call it after the round."""

    def repeated(self) -> int:
        """How many rounds may have been released a second time, with other noise, because the
        engine was started again. Called when there is a run folder."""

    def notes(self) -> Iterator[str]:
        """What the user should know before the first round: which exact shortcuts apply, and why
        others that the user may expect do not."""

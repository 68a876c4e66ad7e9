"""What a run tells, and to whom: the loop calls every sink for every event and knows none."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # commands that only print need not wait for JAX
    from mixfl.engine.base import Progress
    from mixfl.problem import Params

Row = dict[str, Any]  # a line of metrics.jsonl


class Detail(str):
    """A note on how the work is done, which asks for no action."""


class Start(NamedTuple):
    """What is known when a run begins or goes on."""

    label: str
    experiment: str  # the problem's name
    config: dict[str, Any]
    rounds: int  # in all
    notes: Sequence[str] = ()  # what the user should know; all trials of a run have the same
    round: int = 0  # rounds done so far
    rows: Sequence[Row] = ()  # evaluated so far


class Sink:
    """Ignores everything; a sink overrides what it needs. An error that it raises ends the run."""

    def begin(self, start: Start) -> None:
        """Before the first round."""

    def within(self, progress: "Progress") -> None:
        """How far a long round is. May come from another thread."""

    def advance(self, round: int) -> None:
        """So many rounds are done."""

    def evaluated(self, row: Row) -> None:
        """A round has its row. Later rounds may be done already."""

    def saved(self, round: int) -> None:
        """The checkpoint of a round is written."""

    def note(self, message: str) -> None:
        """Something that the user should know, also before `begin`."""

    def stopped(self, reason: str) -> None:
        """The run ends before its last round. It is finished all the same."""

    def finished(self, params: "Params") -> None:
        """All rounds are done, and this is the model."""

    def ended(self, error: BaseException | None) -> None:
        """The last call, whatever happened. None: the run has finished. Raises nothing."""


class Quiet(Sink):
    """Shows nothing. Others show the notes of a start once, also for several runs."""

    told: frozenset[str] = frozenset()

    def begin(self, start):
        for message in start.notes:
            if message not in self.told:
                self.note(message)
        self.told |= {*start.notes}


class Sinks(Sink):
    """Several sinks as one. Empty in all processes but the first (runs/first.py)."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self.sinks = sinks

    def begin(self, start: Start) -> None:
        self._tell(lambda sink: sink.begin(start))

    def within(self, progress: "Progress") -> None:
        self._tell(lambda sink: sink.within(progress))

    def advance(self, round: int) -> None:
        self._tell(lambda sink: sink.advance(round))

    def evaluated(self, row: Row) -> None:
        self._tell(lambda sink: sink.evaluated(row))

    def saved(self, round: int) -> None:
        self._tell(lambda sink: sink.saved(round))

    def note(self, message: str) -> None:
        self._tell(lambda sink: sink.note(message))

    def stopped(self, reason: str) -> None:
        self._tell(lambda sink: sink.stopped(reason))

    def finished(self, params: "Params") -> None:
        self._tell(lambda sink: sink.finished(params))

    def ended(self, error: BaseException | None) -> None:
        self._tell(lambda sink: sink.ended(error))

    def _tell(self, event: Callable[[Sink], None]) -> None:
        for sink in self.sinks:
            event(sink)

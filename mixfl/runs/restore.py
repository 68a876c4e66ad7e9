"""Where a run goes on: its newest good checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.runs import origin
from mixfl.runs.checkpoint import Checkpoints
from mixfl.runs.folder import RunFolder
from mixfl.runs.record import Record
from mixfl.settings import Settings


class Restored(NamedTuple):
    round: int
    state: Any
    record: Record


@dataclass(frozen=True)
class Restore:
    folder: RunFolder
    checkpoints: Checkpoints
    problem: Problem
    s: Settings
    changed_data: bool  # other data than before is wanted
    note: Callable[[str], None]
    algorithm: dict[str, Any]  # what an own algorithm depends on (engine/source.py)

    def __call__(self, state: Any) -> Restored:
        """`state` is the initial one. Nothing is changed before it is known that the run can go
        on."""
        newest = max(self.checkpoints.rounds(), default=0)
        made_with = origin.check(
            self.folder.path, self.problem, newest, self.changed_data, self.note, self.algorithm
        )
        start, state, record = self._latest(state)
        self.checkpoints.close()  # what a kill left
        origin.write(self.folder.path, made_with)
        record.rows = self.folder.keep_metrics(start)
        evaluated = {t for t in range(1, start + 1) if evaluates(self.s, t)}
        lost = evaluated - {row["round"] for row in record.rows}
        if lost:
            self.note(f"metrics.jsonl is damaged: round {min(lost)} is missing")
        return Restored(start, state, record)

    def _latest(self, state: Any) -> Restored:
        latest = self.checkpoints.latest(state)
        if latest is not None:
            round, state, meta = latest
            done = min(meta.get("done", round), round)
            record = Record(counts=meta["counts"], done=done, ended=meta.get("ended", ""))
            start = self._without_skipped(round, record)
            self.note(f"going on from the checkpoint of round {start}")
            return Restored(start, state, record)
        saved = self.folder.saved(self.s.checkpoint_every)
        if saved:
            raise MixflError(
                f"{self.checkpoints.path} has no checkpoint, but the run had one at about round "
                f"{saved}. Nothing was changed: restore it, or start over with --restart, which "
                "moves what is there aside."
            )
        return Restored(0, state, Record())

    def _without_skipped(self, round: int, record: Record) -> int:
        """Where to go on from a checkpoint. A run that failed because its last rounds were skipped
        repeats them; other skipped rounds are not repeated, as in a run without interruption."""
        if (round == self.s.rounds or record.ended) and record.failed(round):
            record.ended = ""
            self.checkpoints.rename(round, record.done)
            return record.done
        return round


def evaluates(s: Settings, round: int) -> bool:
    """Is the model evaluated after this round?"""
    return round % s.eval_every == 0 or round == s.rounds

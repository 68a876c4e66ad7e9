"""What a run knows about its rounds so far, in addition to the engine's state."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from mixfl.runs.alarm import jumped
from mixfl.runs.counts import too_many


class Record:
    """The same in all processes (only process 0 counts alarms). A checkpoint keeps `meta`, and
    metrics.jsonl has the rows."""

    def __init__(
        self, rows: Iterable[dict[str, Any]] = (), counts: Any = (), done: int = 0, ended: str = ""
    ):
        self.rows = list(rows)  # one per evaluated round
        self.counts: Counter[str] = Counter(dict(counts))  # of clients and rounds
        self.done = done  # the last round that was not skipped
        self.ended = ended  # why the run ended before its last round; "": it did not

    def meta(self) -> dict[str, Any]:
        more = {"ended": self.ended} if self.ended else {}
        return {"counts": dict(self.counts), "done": self.done, **more}

    def row(self, round: int) -> dict[str, Any]:
        """Of the model after a round; empty if it was not evaluated."""
        last = self.rows[-1] if self.rows else {"round": 0}
        return last if last["round"] == round else {}

    def losses(self) -> list[float]:
        return [r["eval/loss"] for r in self.rows if r.get("eval/loss") is not None]

    def jumps(self, loss: float | None) -> bool:
        """Is this loss far above the ones before it?"""
        return loss is not None and jumped([*self.losses(), loss])

    def skipped(self, rounds: int) -> str:
        """`rounds 4 to 12 were skipped`, up to the last round; nothing if the last was not."""
        if self.done >= rounds:
            return ""
        first = self.done + 1
        which = f"rounds {first} to {rounds} were" if first < rounds else f"round {rounds} was"
        return f"{which} skipped"

    def failed(self, rounds: int) -> bool:
        """Were so many rounds skipped at the end that there is no model?"""
        return too_many(rounds - self.done, rounds)

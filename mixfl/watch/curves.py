"""The metrics of a run as columns. Only what was added since the last look is read."""

import json
import math
from array import array
from pathlib import Path
from typing import Any

from mixfl.watch.run_state import is_number

NAN = math.nan
POINTS = 600  # in a line of a chart
MOST_BYTES = 1 << 28  # of a file at one look
LAST_ROUND = 1 << 62


class Columns:
    """`update` reads on. If the file was written anew (a resumed run drops rows that it makes
    again), everything is read again."""

    def __init__(self, path: Path):
        self.file = path / "metrics.jsonl"
        self._clear()

    def _clear(self) -> None:
        self.offset, self.last = 0, b""  # where we are, and the line before
        self.rounds = array("q")
        self.values: dict[str, array[float]] = {}

    def update(self) -> None:
        try:
            with open(self.file, "rb") as file:
                file.seek(self.offset - len(self.last))
                if file.read(len(self.last)) != self.last:
                    self._clear()
                    file.seek(0)
                self._add(file.read(MOST_BYTES))
        except OSError:
            self._clear()

    def _add(self, content: bytes) -> None:
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            self.offset, self.last = self.offset + len(line), line
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and _is_round(row.get("round")):
                self._row(row)

    def _row(self, row: dict[str, Any]) -> None:
        count = len(self.rounds)
        self.rounds.append(row.pop("round"))
        for key, value in row.items():
            if not is_number(value):
                continue
            column = self.values.setdefault(key, array("d"))
            column.extend([NAN] * (count - len(column)))
            column.append(float(value))

    def line(self, key: str) -> dict[str, list] | None:
        """Its points, thinned out; None if the run has no such metric."""
        column = self.values.get(key)
        if column is None:
            return None
        there = [i for i, v in enumerate(column) if math.isfinite(v)]
        kept = there[:: -(-len(there) // POINTS) or 1]
        if there and kept[-1] != there[-1]:
            kept.append(there[-1])
        return {
            "rounds": [self.rounds[i] for i in kept],
            "mean": [float(f"{column[i]:.6g}") for i in kept],
        }


def _is_round(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LAST_ROUND

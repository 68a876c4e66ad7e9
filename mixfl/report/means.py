"""Means over trials, for charts and tables."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mixfl.report.document import Row, Series, Table, Trial
from mixfl.report.style import metric_title
from mixfl.runs.wording import number
from mixfl.theory.intervals import half_width, interval

LONG_NAME = 36  # characters, above which a note would leave its chart


@dataclass(frozen=True)
class Mean:
    """A metric of a series, at the rounds that all of its trials have."""

    rounds: list[int]
    bytes: list[float]  # per client, both ways, in total so far; empty if unknown
    seconds: list[float]
    mean: list[float]
    low: list[float]  # of the 95 % interval; empty with one trial
    high: list[float]


def value(row: Row, key: str) -> float | None:
    """The row's value if it is a finite number, else None: files may hold anything."""
    stored = row.get(key)
    if isinstance(stored, bool) or not isinstance(stored, int | float):
        return None
    try:
        return float(stored) if math.isfinite(stored) else None
    except OverflowError:
        return None


def mean(series: Series, metric: str) -> Mean | None:
    trials = [(t, _by_round(t, metric)) for t in series.trials]
    trials = [(t, values) for t, values in trials if values]
    rounds = sorted(set.intersection(*(set(v) for _, v in trials))) if trials else []
    if not rounds:
        return None
    intervals = [interval([values[r] for _, values in trials]) for r in rounds]
    several = len(trials) > 1
    bytes = [_sums(t, ("comm/down_bytes", "comm/up_bytes")) for t, _ in trials]
    seconds = [_sums(t, ("time/round_ms",), 1e-3) for t, _ in trials]
    return Mean(
        rounds,
        _at(rounds, bytes),
        _at(rounds, seconds),
        [i.mean for i in intervals],
        [i.low for i in intervals] if several else [],
        [i.high for i in intervals] if several else [],
    )


def _by_round(trial: Trial, metric: str) -> dict[int, float]:
    values = ((row["round"], value(row, metric)) for row in trial.rows)
    return {r: v for r, v in values if v is not None}


def _sums(trial: Trial, keys: Sequence[str], scale: float = 1) -> dict[int, float]:
    """The total cost up to each row's round. A row has the cost of one round since the row before;
    if it has none, the cost in the row before applies."""
    rows = {row["round"]: [value(row, k) for k in keys] for row in trial.rows}
    costs = {r: sum(v for v in values if v is not None) for r, values in rows.items()
             if None not in values}  # fmt: skip
    if not costs:
        return {}
    each, total, before, sums = costs[min(costs)], 0.0, 0, {}
    for r in sorted(rows):
        each = costs.get(r, each)
        total += scale * each * (r - before)
        before, sums[r] = r, total
    return sums


def _at(rounds: list[int], trials: list[dict[int, float]]) -> list[float]:
    if not all(trials):
        return []
    return [float(np.mean([t[r] for t in trials])) for r in rounds]


def cap(
    metric: str, names: Sequence[str], means: Sequence[Mean | None]
) -> tuple[float, str] | None:
    """The end of the axis and a note, if one loss is so large that the others could not be told
    apart (FL alone often is)."""
    there = [(m.mean[-1], m.mean[0], n) for n, m in zip(names, means, strict=True) if m is not None]
    if not metric.endswith("loss") or len(there) < 3:
        return None
    *others, (end, _, name) = sorted(there)
    if end <= 3 * others[-1][0]:
        return None
    limit = 1.2 * max(others[-1][0], *(start for _, start, _ in others))
    name = name if len(name) <= LONG_NAME else f"{name[:LONG_NAME]}…"
    value = f"{end:.2f}" if end < 1e4 else f"{end:.1e}"
    return limit, f"off the scale: {name}, {value} at the end"


def final(series: Series, metric: str) -> str:
    """Mean ± half width after training, or how training ended if there is no number."""
    count = len(series.trials)
    diverged = [t.status for t in series.trials if t.status.startswith("diverged")]
    if diverged:
        return diverged[0] + (f" ({len(diverged)} of {count} trials)" if count > 1 else "")
    done = [t for t in series.trials if t.status == "finished"]
    values = [value(t.rows[-1], metric) for t in done or series.trials if t.rows]
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    text = number(float(np.mean(known)))
    if len(known) > 1:
        text += f" ± {number(half_width(known))}"
    if not done:
        text += " (unfinished)"
    elif len(known) < count:
        text += f" ({len(known)} of {count} trials)"
    return text


COSTS = (
    ("time/round_ms", "ms per round", 1), ("comm/down_bytes", "KB down", 1e3),
    ("comm/up_bytes", "KB up", 1e3),
)  # fmt: skip


def final_table(
    title: str, series: Sequence[Series], metrics: Sequence[str], costs: bool = True, **more: Any
) -> Table:
    """Final values of each series, and a client's costs per round."""
    header = ["", *map(metric_title, metrics), *(name for _, name, _ in COSTS if costs)]
    rows = []
    for s in series:
        cells = [s.name, *(final(s, m) for m in metrics)]
        for key, _, scale in COSTS if costs else ():
            known = [v for t in s.trials if t.rows and (v := value(t.rows[-1], key)) is not None]
            cells.append(_cost(float(np.mean(known)) / scale) if known else "-")
        rows.append(cells)
    return Table(title, header, rows, **more)


def _cost(cost: float) -> str:
    return f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}"


def remarks(series: Sequence[Series]) -> list[str]:
    """Notes on trials that did not finish."""
    lines = []
    for s in series:
        count = len(s.trials)
        for status, n in Counter(t.status for t in s.trials).items():
            if status != "finished":
                trials = f"{n} of {count} trials: " if count > 1 else ""
                lines.append(f"{s.name}: {trials}{status}")
    return lines

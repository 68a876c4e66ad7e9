"""The figures and runs that the page's script draws and saves."""

import json
from collections.abc import Sequence
from typing import Any

from mixfl.report.document import Curves, Document, Sweep, Trial
from mixfl.report.means import Mean, cap, mean, remarks, value
from mixfl.report.style import Style, metric_title, styles

RAW_NUMBERS = 150_000  # in all runs; beyond this, rows are left out
DRAWN_NUMBERS = 150_000  # in all charts
LINE_WIDTH = 2


def points_per_line(document: Document) -> int:
    """The most points per line that keep the page small."""
    parts = [part for section in document.sections for part in section.parts]
    lines = sum(len(p.series) * len(p.metrics) for p in parts if isinstance(p, Curves))
    return max(30, min(400, DRAWN_NUMBERS // (6 * max(lines, 1))))


def figure(part: Curves | Sweep, most: int) -> dict[str, Any]:
    drawn = _curves(part, most) if isinstance(part, Curves) else _sweep(part)
    return {"title": part.title, "label": part.label, "log": part.log, **drawn}


def _curves(part: Curves, most: int) -> dict[str, Any]:
    names = [s.name for s in part.series]
    means = [[mean(s, m) for s in part.series] for m in part.metrics]
    panels = []
    for metric, of_series in zip(part.metrics, means, strict=True):
        end, words = cap(metric, names, of_series) or (None, "")
        panels.append({"metric": metric, "title": metric_title(metric), "cap": end, "words": words})
    looks = styles([s.algorithm for s in part.series])
    return {
        "kind": "curves",
        "panels": panels,
        "notes": remarks(part.series),
        "lines": [
            {
                "name": s.name,
                "runs": [t.name for t in s.trials],
                **_look(look),
                "panels": [_drawn(of_series[k], most) for of_series in means],
            }
            for k, (s, look) in enumerate(zip(part.series, looks, strict=True))
        ],
    }


def _drawn(m: Mean | None, most: int) -> dict[str, Any] | None:
    if m is None:
        return None
    kept = _kept(len(m.rounds), -(-len(m.rounds) // most))
    return {key: [_short(column[i]) for i in kept] for key, column in m.__dict__.items() if column}


def _sweep(part: Sweep) -> dict[str, Any]:
    looks = styles([line.algorithm for line in part.lines])
    notes = [
        f"{line.name}, {part.x} = {p.x:g}: {p.note or 'diverged'}"
        for line in part.lines
        for p in line.points
        if p.note or p.mean is None
    ]
    return {
        "kind": "sweep",
        "x": part.x,
        "panels": [{"metric": part.y, "title": metric_title(part.y), "cap": None, "words": ""}],
        "log_x": part.log_x and all(p.x > 0 for line in part.lines for p in line.points),
        "notes": notes,
        "lines": [
            {
                "name": line.name,
                **_look(look),
                "points": [
                    [_short(v) for v in (p.x, p.mean, p.low, p.high)] + [p.note]
                    for p in sorted(line.points, key=lambda p: p.x)
                ],
            }
            for line, look in zip(part.lines, looks, strict=True)
        ],
    }


def _look(style: Style) -> dict[str, Any]:
    dash = ",".join(f"{LINE_WIDTH * d:g}px" for d in style.dashes)
    return {"light": style.light, "dark": style.dark, "dash": dash or "solid"} | (
        {"marker": style.marker} if style.marker else {}
    )


def runs(trials: Sequence[Trial]) -> dict[str, Any]:
    keys = {t.name: _metrics(t) for t in trials}
    numbers = sum(len(t.rows) * (len(keys[t.name]) + 1) for t in trials)
    every = -(-numbers // RAW_NUMBERS) or 1
    return {
        "every": every,
        "runs": [
            {
                "name": t.name,
                "status": t.status,
                "algorithm": str(t.config.get("algorithm", "")),
                "seed": str(t.config.get("seed", "")),
                "command": t.command,
                "config": "\n".join(
                    f"{k} = {json.dumps(v, ensure_ascii=False, default=str)}"
                    for k, v in t.config.items()
                ),
                "metrics": {
                    key: [_short(value(t.rows[i], key)) for i in _kept(len(t.rows), every)]
                    for key in ("round", *keys[t.name])
                },
            }
            for t in trials
        ],
    }


def _metrics(trial: Trial) -> list[str]:
    keys = dict.fromkeys(k for row in trial.rows for k in row if k != "round")
    return [k for k in keys if any(value(row, k) is not None for row in trial.rows)]


def _kept(count: int, every: int) -> list[int]:
    """Indices of every n-th row and of the last one."""
    kept = list(range(0, count, max(every, 1)))
    return kept if not kept or kept[-1] == count - 1 else [*kept, count - 1]


def _short(number: float | None) -> float | int | None:
    if number is None or number != number or abs(number) == float("inf"):
        return None
    if abs(number) < 1e15 and float(number).is_integer():
        return int(number)
    return float(f"{number:.6g}")

"""Rows of metrics as HTML, for notebooks: curves and a table. Texts are escaped, nothing is loaded.

Colors are the page's own (currentColor), so that it can be read in the light and in the dark.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mixfl.runs.wording import number, shown_keys

Row = Mapping[str, Any]
CHARTS = 2  # beside each other
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 330, 150, 52, 24, 20  # of a chart, and its margins
COLOR = "#0072B2"
FAINT = "opacity:0.65"


def curves(rows: Sequence[Row], rounds: int) -> str:
    """A chart of each of the first metrics, over the rounds."""
    keys = shown_keys(rows[-1])[:CHARTS] if rows else []
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:12px">'
        + "".join(_chart(key, _points(rows, key), rounds) for key in keys)
        + "</div>"
    )


def summary(config: Row, rows: Sequence[Row], words: Sequence[str] = ()) -> str:
    """What a result shows of itself: a line, the curves, and the last row as a table."""
    title = f"<b>{escape(str(config.get('algorithm', 'run')))}</b>"
    if not rows:
        return f"<div>{title}: no round has been evaluated</div>"
    last = rows[-1]
    total = int(config.get("rounds", last["round"]))
    line = ", ".join([f"round {last['round']} of {total}", *map(escape, words)])
    found = {k: v for k, v in last.items() if k != "round" and v is not None}
    cells = "".join(
        f'<tr><td style="text-align:left">{escape(k)}</td>'
        f'<td style="text-align:right">{escape(_value(v))}</td></tr>'
        for k, v in found.items()
    )
    return (
        f"<div>{title}: {line}{curves(rows, max(total, last['round']))}"
        f"<details><summary>all metrics of round {last['round']}</summary>"
        f"<table>{cells}</table></details></div>"
    )


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _points(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    return [(row["round"], row[key]) for row in rows if row.get(key) is not None]


def _chart(key: str, points: Sequence[tuple[int, float]], rounds: int) -> str:
    if not points:
        return ""
    values = [value for _, value in points]
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    bottom = HEIGHT - BOTTOM

    def place(round: int, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 8) * round / max(rounds, 1)
        return x, bottom - (bottom - TOP) * (value - low) / spread

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    x, y = place(*points[-1])
    text = 'fill="currentColor" font-size="11"'
    label = f"{escape(key.removeprefix('eval/'))} {number(values[-1])}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width:100%" role="img" '
        f'aria-label="{label}" xmlns="http://www.w3.org/2000/svg">'
        f'<path d="M{LEFT},{TOP} V{bottom} H{WIDTH - 8}" stroke="currentColor" fill="none" '
        'opacity="0.4"/>'
        f'<polyline points="{line}" fill="none" stroke="{COLOR}" stroke-width="2"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOR}"/>'
        f'<text x="{LEFT}" y="14" {text} font-weight="bold">{label}</text>'
        f'<text x="{LEFT - 4}" y="{TOP + 8}" {text} text-anchor="end">{number(high)}</text>'
        f'<text x="{LEFT - 4}" y="{bottom}" {text} text-anchor="end">{number(low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 5}" {text}>0</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 5}" {text} text-anchor="end">round {rounds}</text>'
        "</svg>"
    )

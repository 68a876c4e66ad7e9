"""Plots of runs as files."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure  # pyplot would choose a backend for the whole process
from matplotlib.ticker import MaxNLocator, NullLocator

from mixfl.report.document import Curves, Series, Sweep, Trial
from mixfl.report.means import cap, mean
from mixfl.report.style import NAMES, metric_title, styles

MARKERS = {"": "", "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^",
           "triangle-down": "v"}  # fmt: skip
# Text stays searchable and editable, and the same runs give the same bytes.
FILES: Any = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "mixfl"}
UNDATED = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


def curves(
    runs: Mapping[str, Sequence[list[dict[str, Any]]]], metrics: Sequence[str], path: Path,
    title: str = "",
) -> None:  # fmt: skip
    """Draw metrics rows, given per algorithm and trial."""
    series = [
        Series(NAMES.get(a, a), a, [Trial(str(k), {}, "", rows) for k, rows in enumerate(trials)])
        for a, trials in runs.items()
    ]
    draw(Curves(title, metrics, series), path)


def draw(part: Curves, path: Path) -> None:
    """One panel per metric over rounds, one line per series; with several trials, the mean and its
    95 % interval."""
    columns = min(len(part.metrics), 3)
    rows = -(-len(part.metrics) // columns)
    names = [s.name for s in part.series]
    across = min(3 if max(map(len, names), default=0) < 40 else 1, max(1, len(names)))
    legend = 0.24 * -(-len(names) // across) + 0.1  # inches
    size = (5.2 * columns, 3.4 * rows + legend + (0.3 if part.title else 0))
    figure = Figure(figsize=size)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(part.metrics) :]:
        axis.set_axis_off()
    handles: dict[str, Any] = {}
    for axis, metric in zip(axes.flat, part.metrics, strict=False):
        means = [mean(s, metric) for s in part.series]
        looks = styles([s.algorithm for s in part.series])
        for name, m, look in zip(names, means, looks, strict=True):
            if m is None:
                continue
            style: dict[str, Any] = dict(
                color=look.light, lw=1.8, marker=MARKERS[look.marker], ms=4.5,
                markevery=max(1, len(m.rounds) // 8),
            )  # fmt: skip
            (line,) = axis.plot(m.rounds, m.mean, **style)
            if look.dashes:
                line.set_dashes(look.dashes)
            if m.low:
                axis.fill_between(m.rounds, m.low, m.high, color=look.light, alpha=0.15, lw=0)
            handles.setdefault(name, line)
        if part.log:
            axis.set_yscale("log")
        axis.set_xlabel("round")
        axis.set_title(_text(metric_title(metric)), loc="left", fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if (cut := cap(metric, names, means)) and not part.log:
            axis.set_ylim(0, cut[0])
            axis.text(0.98, 0.94, _text(cut[1]), transform=axis.transAxes, ha="right", fontsize=9,
                      color="#555")  # fmt: skip
    figure.legend(list(handles.values()), list(map(_text, handles)), loc="lower center",
                  ncols=across, frameon=False, fontsize=9)  # fmt: skip
    if part.title:
        figure.suptitle(_text(part.title), x=0.01, ha="left", fontsize=12)
    figure.tight_layout(rect=(0, legend / size[1], 1, 1))
    _save(figure, path)


def sweeps(parts: Sequence[Sweep], path: Path) -> None:
    """Final values against a key: one panel per sweep, with 95 % intervals."""
    names = list(dict.fromkeys(line.name for part in parts for line in part.lines))
    across = min(len(names), 5 if len(parts) > 2 else 2)
    legend = 0.24 * -(-len(names) // across) + 0.1  # inches
    size = (5.2 * len(parts), 3.6 + legend)
    figure = Figure(figsize=size)
    handles: dict[str, Any] = {}
    for axis, part in zip(figure.subplots(1, len(parts), squeeze=False).flat, parts, strict=True):
        looks = styles([line.algorithm for line in part.lines])
        for line, look in zip(part.lines, looks, strict=True):
            points = [p for p in line.points if p.mean is not None]
            x = [p.x for p in points]
            style: dict[str, Any] = dict(color=look.light, lw=1.8, marker=MARKERS[look.marker])
            (drawn,) = axis.plot(x, [p.mean for p in points], ms=4.5, **style)
            if look.dashes:
                drawn.set_dashes(look.dashes)
            if points and all(p.low is not None for p in points):
                low, high = ([getattr(p, end) for p in points] for end in ("low", "high"))
                axis.fill_between(x, low, high, color=look.light, alpha=0.12, lw=0)
            handles.setdefault(line.name, drawn)
        axis.set_xscale("log" if part.log_x else "linear")
        axis.set_yscale("log" if part.log else "linear")
        values = sorted({p.x for line in part.lines for p in line.points})
        before = [-math.inf, *values]
        near = [v - b < 0.02 * abs(v) for v, b in zip(values, before, strict=False)]
        axis.set_xticks(values, ["" if n else f"{v:g}" for v, n in zip(values, near, strict=True)])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel(_text(part.x))
        axis.set_title(textwrap.fill(_text(part.title), 48), loc="left", fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(list(handles.values()), list(map(_text, handles)), loc="lower center",
                  ncols=across, frameon=False, fontsize=9)  # fmt: skip
    figure.tight_layout(rect=(0, legend / size[1], 1, 1))
    _save(figure, path)


def _text(text: str) -> str:
    """The text with dollars escaped: Matplotlib reads text between dollars as a formula."""
    return text.replace("$", r"\$")


def dissimilarity(
    rounds: Sequence[int], g2: np.ndarray, b2: np.ndarray, path: Path, title: str = ""
) -> None:
    """G~^2 and B~^2 over rounds: each simulation, and the maximum over them."""
    figure = Figure(figsize=(9.6, 3.4))
    axes = figure.subplots(1, 2)
    for axis, values, name in ((axes[0], g2, "G"), (axes[1], b2, "B")):
        values = np.atleast_2d(values)
        if len(values) > 1:
            axis.plot(rounds, values.T, color="#0072B2", alpha=0.25, lw=0.8)
        axis.plot(rounds, values.max(axis=0), color="#0072B2", lw=1.8)
        if values.max() > 20 * values.min():
            axis.set_yscale("log")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("round")
        axis.set_title(rf"$\tilde{{{name}}}_t^2$", loc="left", fontsize=12)
        axis.grid(alpha=0.25, which="both")
        axis.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.tight_layout()
    _save(figure, path)


def _save(figure, path: Path) -> None:
    """Write a temporary file first, so that no partial file is left."""
    partial = path.with_name("." + path.name)
    with matplotlib.rc_context(FILES):
        figure.savefig(
            partial, dpi=150, format=path.suffix[1:], metadata=UNDATED.get(path.suffix, {})
        )
    partial.replace(path)

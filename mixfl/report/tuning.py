"""A picture of a search: what each run reached, over time and against each key."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from mixfl.report.plots import FILES, UNDATED
from mixfl.report.style import NAMES, metric_title, styles


def draw(
    runs: Sequence[Any], metric: str, lower: bool, log: Mapping[str, bool], path: Path
) -> None:
    """`runs` have number, algorithm, keys, state and value; `log`: the keys, and whether their axes
    are logarithmic. Pruned runs are hollow."""
    known = [r for r in runs if r.value is not None]
    columns = min(len(log) + 1, 3)
    rows = -(-(len(log) + 1) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(log) + 1 :]:
        axis.set_axis_off()
    panels: list[tuple[str, bool]] = [("", False), *log.items()]
    ids = list(dict.fromkeys(r.algorithm for r in known))
    colors = {a: look.light for a, look in zip(ids, styles(ids), strict=True)}
    for axis, (key, logarithmic) in zip(axes.flat, panels, strict=False):
        _panel(axis, known, key, colors)
        axis.set_xlabel(key or "run")
        axis.set_ylabel(metric_title(metric))
        if logarithmic:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
        elif all(isinstance(r.keys.get(key, r.number), int) for r in known):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
    done = sorted((r for r in known if r.state == "finished"), key=lambda r: r.number)
    if done:
        best = np.minimum if lower else np.maximum
        axes.flat[0].step(
            [r.number for r in done], best.accumulate([r.value for r in done]), where="post",
            color="0.4", lw=1, zorder=0, label="best so far",
        )  # fmt: skip
    handles, labels = axes.flat[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    with matplotlib.rc_context(FILES):
        figure.savefig(path, dpi=150, metadata=UNDATED.get(path.suffix))


def _panel(axis: Any, runs: Sequence[Any], key: str, colors: Mapping[str, str]) -> None:
    shown = [r for r in runs if not key or key in r.keys]
    named = [str(r.keys[key]) for r in shown] if key else []
    texts = any(not isinstance(r.keys[key], (int, float)) for r in shown) if key else False
    for algorithm, color in colors.items():
        for finished in (True, False):
            of_it = [
                (named[i] if texts else r.keys[key] if key else r.number, r.value)
                for i, r in enumerate(shown)
                if r.algorithm == algorithm and (r.state == "finished") == finished
            ]
            if of_it:
                x, y = zip(*of_it, strict=True)
                name = NAMES.get(algorithm, algorithm) + ("" if finished else ", pruned")
                axis.scatter(
                    x, y, s=26, color=color if finished else "none", edgecolors=color, label=name
                )

"""Plots of runs. An algorithm has the same colour everywhere (Okabe and Ito's palette, which
colour-blind readers can tell apart)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

COLOURS = {
    "fedavg": "#7f7f7f", "pt": "#009E73", "1wgt": "#0072B2", "2wgt": "#CC79A7",
    "oracle": "#000000", "central": "#E69F00", "pretrain": "#D55E00",
    "example-transfer": "#56B4E9", "baseline": "#8C6D1F",
}  # fmt: skip
DASHES = {"fedavg": (4, 2), "oracle": (1, 1.5), "baseline": (1, 1.5)}
NAMES = {
    "fedavg": "FedAvg (FL alone)", "pt": "Parallel Training", "1wgt": "1-way Gradient Transfer",
    "2wgt": "2-way Gradient Transfer", "oracle": "Oracle", "central": "Central alone",
    "pretrain": "Central, then FedAvg", "example-transfer": "Example Transfer",
    "baseline": "Baseline (all at the client)",
}  # fmt: skip

TITLES = {"auc": "AUC", "loss": "loss on the evaluation data"}


def curves(
    runs: Mapping[str, Sequence[list[dict[str, Any]]]], metrics: Sequence[str], path: Path,
    title: str = "",
) -> None:  # fmt: skip
    """A panel per metric over rounds, a line per algorithm; with several trials, mean and range."""
    figure, axes = plt.subplots(1, len(metrics), figsize=(5.2 * len(metrics), 3.8), squeeze=False)
    for axis, metric in zip(axes[0], metrics, strict=True):
        for algorithm, trials in runs.items():
            rounds, values = _table(trials, metric)
            if not len(rounds):
                continue
            style: dict[str, Any] = dict(
                color=COLOURS.get(algorithm), lw=1.8, label=NAMES.get(algorithm, algorithm)
            )
            (line,) = axis.plot(rounds, np.nanmean(values, axis=0), **style)
            if algorithm in DASHES:
                line.set_dashes(DASHES[algorithm])
            if len(values) > 1:
                low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
                axis.fill_between(rounds, low, high, color=line.get_color(), alpha=0.15, lw=0)
        axis.set_xlabel("round")
        name = metric.removeprefix("eval/")
        axis.set_title(TITLES.get(name, name), loc="left", fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if metric.endswith("loss"):
            _cap(axis, runs, metric)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=min(3, max(1, len(labels))),
                  frameon=False, fontsize=9)  # fmt: skip
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    rows = -(-len(labels) // 3)
    figure.tight_layout(rect=(0, 0.03 + 0.055 * rows, 1, 1))
    _save(figure, path)


def dissimilarity(
    rounds: Sequence[int], g2: np.ndarray, b2: np.ndarray, path: Path, title: str = ""
) -> None:
    """G~^2 and B~^2 over rounds: each simulation, and the maximum over them."""
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.4))
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
    """Whole or not at all."""
    partial = path.with_name("." + path.name)
    figure.savefig(partial, dpi=150, format=path.suffix[1:])
    partial.replace(path)
    plt.close(figure)


def _table(trials, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Rounds that all trials have, and values [trials, rounds]."""
    by_round = [{r["round"]: r[metric] for r in t if r.get(metric) is not None} for t in trials]
    rounds = sorted(set.intersection(*map(set, by_round))) if by_round else []
    return np.array(rounds), np.array([[t[r] for r in rounds] for t in by_round])


def _cap(axis, runs, metric) -> None:
    """FL alone can have a loss so large that the others could not be told apart: it is cut off,
    and the panel says so."""
    ends = {
        a: float(np.mean([t[-1][metric] for t in trials if t and t[-1].get(metric) is not None]))
        for a, trials in runs.items()
        if any(t and t[-1].get(metric) is not None for t in trials)
    }
    order = sorted(ends, key=ends.__getitem__)
    if len(order) > 2 and ends[order[-1]] > 3 * ends[order[-2]]:
        rows = [r for a in order[:-1] for t in runs[a] for r in t[:1]]
        starts = [r[metric] for r in rows if r.get(metric) is not None] or [0.0]
        axis.set_ylim(0, 1.2 * max(ends[order[-2]], *starts))
        text = f"off the scale: {NAMES.get(order[-1], order[-1])}, {ends[order[-1]]:.2f} at the end"
        axis.text(0.98, 0.94, text, transform=axis.transAxes, ha="right", fontsize=9, color="#555")

"""Turns timings into rows, tables and a plot. Nothing here measures anything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-3
PEERS = ("fedjax", "pfl", "flower", "torch", "scan", "scan-dense")


@dataclass
class Measured:
    """The measurements of one engine on one task."""

    engine: str
    algorithm: str = "fedavg"
    ms: Sequence[float] = ()  # per round, one number per trial
    params: Mapping[str, np.ndarray] | None = None  # after the rounds that all engines share
    flops: float | None = None  # of a round on the plain path
    first_s: float = 0.0  # seconds of the first round, which compiles
    peak_mb: float = 0.0
    failed: str = ""  # why there are no timings
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return float(np.median(self.ms))


def difference(a: Mapping, b: Mapping, start: Mapping) -> float:
    """The distance between two results, relative to how far they moved from the start: the largest
    |a - b| / |b - start| over the parameters."""
    if set(a) != set(b) or any(a[k].shape != b[k].shape for k in a):
        return float("inf")
    distances = [
        np.linalg.norm(a[k].astype(np.float64) - b[k])
        / max(float(np.linalg.norm(b[k].astype(np.float64) - start[k])), 1e-30)
        for k in a
    ]
    worst = float(np.max(distances))
    return worst if np.isfinite(worst) else float("inf")


def rows(
    task: str, measured: Sequence[Measured], start: Mapping, limit: float | None,
    tolerance: float = TOLERANCE,
) -> list:  # fmt: skip
    """The rows of results.json. `limit` is the best rate of sgemm, in flop/s."""
    peers = [m for m in measured if m.engine in PEERS and m.ms]
    return [
        _row(task, m, {p.engine: p for p in peers if p.algorithm == m.algorithm},
             start, limit, tolerance)
        for m in measured
    ]  # fmt: skip


def _row(task, m: Measured, peers: Mapping[str, Measured], start, limit, tolerance) -> dict:
    row: dict[str, Any] = {
        "task": task, "engine": m.engine, "algorithm": m.algorithm, "ms_median": None,
        "ms_spread": None, "ratio_to": {}, "share_of_limit": None,
    }  # fmt: skip
    if not m.ms:
        return {**row, "why_not": m.failed or "not measured", **m.more}
    low, high = np.percentile(m.ms, [25, 75])
    row |= {"ms_median": round(m.median, 3), "ms_spread": round((high - low) / 2, 3)}
    if m.flops and limit:
        row["share_of_limit"] = round(m.flops / (m.median / 1000) / limit, 3)
    refused = {}
    for name, peer in peers.items():
        if name == m.engine:
            continue
        apart = (
            difference(m.params, peer.params, start)
            if m.params is not None and peer.params is not None
            else float("inf")
        )
        if apart <= tolerance:
            row["ratio_to"][name] = round(peer.median / m.median, 3)
        else:
            refused[name] = f"results differ by {apart:.1e}, more than {tolerance:.1g}"
    if refused:
        row["no_ratio"] = refused
    compile_s = max(0.0, m.first_s - m.median / 1000)
    return {
        **row, "peak_mb": round(m.peak_mb), "compile_s": round(compile_s, 2),
        "trials": len(m.ms), **m.more,
    }  # fmt: skip


def table(rows: Sequence[Mapping]) -> tuple[list[str], list[list[str]]]:
    """The header and cells of one task's table."""
    peers = [p for p in PEERS if any(r["engine"] == p for r in rows)]
    header = [
        "engine", "algorithm", "ms/round", "spread", *[f"x {p}" for p in peers], "share of limit",
        "peak MB", "compile s",
    ]  # fmt: skip
    cells = []
    for r in rows:
        line = [r["engine"], r["algorithm"]]
        if r["ms_median"] is None:
            cells.append([*line, "-", *[""] * (len(header) - 3)])
            continue
        share = r["share_of_limit"]
        cells.append([
            *line, f"{r['ms_median']:.3g}", f"± {r['ms_spread']:.2g}",
            *[_ratio(r, p) for p in peers], "" if share is None else f"{share:.2f}",
            str(r["peak_mb"]), f"{r['compile_s']:.1f}",
        ])  # fmt: skip
    return header, cells


def _ratio(row: Mapping, peer: str) -> str:
    if peer in row["ratio_to"]:
        return f"{row['ratio_to'][peer]:.3g}"
    return "differs" if peer in row.get("no_ratio", {}) else ""


def notes(rows: Sequence[Mapping]) -> list[str]:
    """Remarks below the table."""
    lines = []
    for r in rows:
        name = f"{r['task']}, {r['engine']} {r['algorithm']}"
        if r["ms_median"] is None:
            lines.append(f"{name}: no figures ({r['why_not']})")
        for peer, why in r.get("no_ratio", {}).items():
            lines.append(f"{name}: no ratio to {peer} ({why})")
        if r.get("disturbed"):
            lines.append(f"{name}: {r['disturbed']} of {r['trials']} trials were disturbed")
    return lines


def plot(rows: Sequence[Mapping], path: Path) -> None:
    """Milliseconds per round on a log scale, one panel per task, fastest first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter

    shown = [r for r in rows if r["ms_median"] is not None]
    tasks = list(dict.fromkeys(r["task"] for r in shown))
    if not tasks:
        return
    columns = min(len(tasks), 4)
    lines = -(-len(tasks) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.6 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(tasks) :]:
        axis.set_visible(False)
    for axis, task in zip(axes.flat, tasks, strict=False):
        of_task = sorted((r for r in shown if r["task"] == task), key=lambda r: -r["ms_median"])
        ms = [r["ms_median"] for r in of_task]
        names = [
            f"{r['engine']} {r['algorithm']}" if r["engine"] == "mixfl" else r["engine"]
            for r in of_task
        ]
        # Points: on a log scale the length of a bar says nothing.
        for mine, color in ((True, "#0072b2"), (False, "#8c8c8c")):
            y = [i for i, r in enumerate(of_task) if r["engine"].startswith("mixfl") == mine]
            spread = [of_task[i]["ms_spread"] for i in y]
            axis.errorbar([ms[i] for i in y], y, xerr=spread, fmt="o", color=color, markersize=7)
        axis.set_yticks(range(len(names)), names)
        axis.set(xscale="log", title=task, xlabel="ms per round (less is better)")
        axis.set_xlim(min(ms) / 1.6, max(ms) * 3)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(color="#e5e5e5")
        axis.set_axisbelow(True)
        for y, value in enumerate(ms):
            text = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
            axis.annotate(text, (value, y), xytext=(12, 0), textcoords="offset points",
                          va="center", fontsize=8)  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)

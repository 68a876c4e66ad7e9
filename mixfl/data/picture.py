"""A picture of who holds what: labels by client, and how many examples clients have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.data.examples import ClientData, Examples
from mixfl.data.partitioning import LABELS
from mixfl.errors import MixflError

FEW = 40  # clients that get a bar of their own
COLUMNS = 480  # of the heat map; more clients than that share columns
MOST = 24  # labels that are shown; the rest are one
OTHERS = "others"
INK, SOFT, BLUE = "#1f2933", "#7b8794", "#0072B2"
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D1F", "#5E4FA2",
          "#9aa5b1", "#1f2933")  # fmt: skip


def picture(
    data: ClientData, path: str | Path | None = None, *, label: str | None = None,
    names: Sequence[str] | None = None, title: str | None = None,
) -> Any:  # fmt: skip
    """A matplotlib figure of how labels and examples are spread over clients, saved to `path`
    (.png, .pdf, .svg) if given. Up to 40 clients have a bar each; more become a heat map.

    >>> columns = {"x": np.eye(100), "y": np.arange(100) % 10}
    >>> clients = mixfl.partition(columns, "dirichlet:0.3:5", label="y")
    >>> figure = mixfl.picture(clients, "who.png", label="y")

    `label` names a column of whole numbers (by default `label`, `y`, `target` or `smiling`, if
    there is one); without one, the figure has sizes only. `names` are the labels' names.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not len(data):
        raise MixflError("there is nothing to draw: the data has no clients.")
    counts, shown = _counts(data, label, names)
    figure = Figure(figsize=(10, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=0.1, h_pad=0.08)
    if counts is None:
        _sizes(figure.add_subplot(), data.sizes())
    elif len(data) <= FEW:
        _bars(figure.add_subplot(), counts, shown, [str(data.ids[i]) for i in range(len(data))])
    else:
        grid = figure.add_gridspec(2, 2, height_ratios=(3, 2), width_ratios=(5, 1))
        heat = figure.add_subplot(grid[0, 0])
        _heat(figure, heat, counts, shown)
        _totals(figure.add_subplot(grid[0, 1], sharey=heat), counts)
        _sizes(figure.add_subplot(grid[1, :]), data.sizes())
    said = f"{len(data):,} clients, {len(data.examples):,} examples"
    said += f" ({data.dropped:,} clients without examples are left out)" if data.dropped else ""
    figure.suptitle(
        f"{title}: {said}" if title else said, color=INK, fontsize=13, x=0.01, ha="left"
    )
    if path is not None:
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise MixflError(
                f"the picture {path} could not be written: {error}. Expected a name that ends in "
                ".png, .pdf or .svg, in a folder that exists."
            ) from None
    return figure


def _counts(
    data: ClientData, label: str | None, names: Sequence[str] | None
) -> tuple[np.ndarray | None, list[str]]:
    """[clients, labels], and the names of the labels."""
    columns = data.examples.columns
    if label is None:
        label = next((n for n in (*LABELS, "smiling") if n in columns), None)
        if label is None:
            return None, []
    elif label not in columns:
        raise MixflError(f"there is no column '{label}': the columns are {', '.join(columns)}.")
    column = columns[label]
    if column.shape or column.dtype.kind not in "biu":
        raise MixflError(
            f"the column '{label}' has {column.dtype} of shape {list(column.shape)}: expected one "
            "whole number per row."
        )
    values = Examples({label: column}, data.examples.rows).all()[label]
    found, codes = np.unique(values, return_inverse=True)
    shown = [str(names[v]) if names and 0 <= v < len(names) else str(v) for v in found.tolist()]
    if len(found) > MOST:
        common = np.sort(np.argsort(-np.bincount(codes), kind="stable")[: MOST - 1])
        place = np.full(len(found), MOST - 1)
        place[common] = np.arange(MOST - 1)
        codes, shown = (
            place[codes],
            [*(shown[i] for i in common), f"{len(found) - MOST + 1} {OTHERS}"],
        )
    client = np.repeat(np.arange(len(data)), data.sizes())
    flat = np.bincount(client * len(shown) + codes, minlength=len(data) * len(shown))
    return flat.reshape(len(data), -1), shown


def _colors(shown: list[str]) -> list[Any]:
    from matplotlib import colormaps

    n = len(shown)
    few = list(COLORS[:n]) if n <= len(COLORS) else None
    colors = few or list(colormaps["turbo"](np.linspace(0.05, 0.95, n)))
    return [*colors[:-1], "#cbd2d9"] if shown[-1].endswith(OTHERS) else colors


def _bars(axes: Any, counts: np.ndarray, shown: list[str], ids: list[str]) -> None:
    at, below = np.arange(len(counts)), np.zeros(len(counts))
    for column, name, color in zip(counts.T, shown, _colors(shown), strict=True):
        axes.bar(at, column, 0.82, below, color=color, label=name, linewidth=0)
        below += column
    short = [name if len(name) <= 14 else f"{name[:13]}…" for name in ids]
    turned = max(map(len, short)) > 3 and len(ids) > 10
    axes.set_xticks(at, short, rotation=90 if turned else 0)
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.set_xlabel("client")
    axes.set_ylabel("examples")
    axes.yaxis.set_major_formatter(_number)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], title="label", loc="upper left", bbox_to_anchor=(1.005, 1.02),
        frameon=False, fontsize=9 if len(shown) <= 12 else 7, title_fontsize=9,
    )  # fmt: skip
    _plain(axes)


def _heat(figure: Any, axes: Any, counts: np.ndarray, shown: list[str]) -> None:
    """Clients in order of their most frequent label, so that skew shows as a staircase."""
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    order = np.lexsort((-share.max(1), share.argmax(1)))
    parts = np.array_split(share[order], min(COLUMNS, len(share)))
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colors = LinearSegmentedColormap.from_list("share", ["#f5f7fa", "#7cc4e8", BLUE, "#0b2545"])
    # From 0 to 1, whatever the data: clients that are alike look so.
    image = axes.imshow(
        np.array([part.mean(0) for part in parts]).T, aspect="auto", cmap=colors,
        norm=PowerNorm(0.7, 0, 1), interpolation="nearest",
        extent=(0, len(counts), len(shown) - 0.5, -0.5),
    )  # fmt: skip
    axes.set_yticks(range(len(shown)), [name[:16] for name in shown],
                    fontsize=9 if len(shown) <= 12 else 6.5)  # fmt: skip
    axes.xaxis.set_major_formatter(_number)
    axes.set_xlabel("clients, in order of their most frequent label")
    axes.set_ylabel("label")
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.04)
    bar.set_label("share of its examples", color=INK)
    bar.ax.tick_params(length=0, colors=INK)
    bar.outline.set_visible(False)
    _plain(axes, grid=False)


def _totals(axes: Any, counts: np.ndarray) -> None:
    axes.barh(np.arange(counts.shape[1]), counts.sum(0), 0.7, color=BLUE, linewidth=0)
    axes.tick_params(labelleft=False)
    axes.set_xlabel("examples")
    axes.locator_params(axis="x", nbins=2)
    axes.xaxis.set_major_formatter(_number)
    _plain(axes, grid="x")


def _sizes(axes: Any, sizes: np.ndarray) -> None:
    low, high = max(int(sizes.min()), 1), int(sizes.max())
    wide = high > 20 * low
    bins = int(np.clip(2 * np.sqrt(len(sizes)), 12, 50))
    if high - low < bins:
        edges = np.arange(low, high + 2) - 0.5
    elif wide:
        edges = np.unique(np.geomspace(low, high + 1, bins + 1).round()) - 0.5
    else:
        edges = np.linspace(low, high, bins + 1)
    axes.hist(sizes, edges, color=BLUE, rwidth=0.92 if not wide else 1, linewidth=0)
    middle = float(np.median(sizes))
    axes.axvline(middle, color="#D55E00", linewidth=1.4)
    axes.annotate(
        f"median {middle:,.0f}", (middle, 1), xycoords=("data", "axes fraction"), xytext=(5, -4),
        textcoords="offset points", va="top", color="#D55E00", fontsize=9,
    )  # fmt: skip
    if wide:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_number)
    axes.yaxis.set_major_formatter(_number)
    if high - low < 6:  # a bar of ordinary width
        axes.set_xlim(low - 4, high + 4)
    axes.set_xlabel("examples of a client")
    axes.set_ylabel("clients")
    _plain(axes)


def _number(value: float, _: int) -> str:
    return f"{value:,.0f}" if value == round(value) else ""


def _plain(axes: Any, grid: str | bool = "y") -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom" and bool(grid))
        axes.spines[side].set_color(SOFT)
    axes.tick_params(length=0, colors=INK, which="both")
    axes.margins(y=0.14)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    if grid:
        axes.grid(axis=grid, color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)

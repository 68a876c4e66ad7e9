"""Names and looks of algorithms. An algorithm has the same color everywhere (Okabe and Ito's
palette, which color-blind readers can tell apart)."""

from collections.abc import Sequence
from typing import NamedTuple

COLORS = {
    "fedavg": "#7f7f7f", "pt": "#009E73", "1wgt": "#0072B2", "2wgt": "#CC79A7",
    "oracle": "#000000", "central": "#E69F00", "pretrain": "#D55E00",
    "example-transfer": "#56B4E9", "baseline": "#8C6D1F",
}  # fmt: skip
ON_DARK = {
    "fedavg": "#a3a3a3", "pt": "#1fbf8f", "1wgt": "#3b93e0", "2wgt": "#e394c1",
    "oracle": "#f5f5f5", "central": "#f0b030", "pretrain": "#f07f35",
    "example-transfer": "#93d6ff", "baseline": "#c9a54c",
}  # fmt: skip
OTHER = ("#5E4FA2", "#a99bf0")  # on light, on dark: an algorithm that is not listed
DASHES = {"fedavg": (4, 2), "oracle": (1, 1.5), "baseline": (1, 1.5)}
NAMES = {
    "fedavg": "FedAvg (FL alone)", "pt": "Parallel Training", "1wgt": "1-way Gradient Transfer",
    "2wgt": "2-way Gradient Transfer", "oracle": "Oracle", "central": "Central alone",
    "pretrain": "Central, then FedAvg", "example-transfer": "Example Transfer",
    "baseline": "Baseline (all at the client)", "server-learning": "Server learning",
    "fedclg": "FedCLG", "scaffold": "SCAFFOLD", "mimelite": "Mime-lite",
}  # fmt: skip

TITLES = {
    "auc": "AUC", "loss": "loss on the evaluation data", "theory/g2": "G~^2", "theory/b2": "B~^2",
    "privacy/epsilon": "epsilon spent so far",
}  # fmt: skip

WHAT = {  # is shown of a metric over clients
    "": "{} of a client", "p05": "{} of clients, 5th percentile", "p50": "median client's {}",
    "p95": "{} of clients, 95th percentile", "worst10": "worst tenth's {}",
}  # fmt: skip

PATTERNS: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.5), (6, 2, 1, 2), (9, 3))
MARKERS = ("circle", "square", "diamond", "triangle-up", "triangle-down")


def metric_title(metric: str) -> str:
    name = metric.removeprefix("eval/")
    if name.startswith("clients/"):
        name, _, what = name.removeprefix("clients/").partition("/")
        return WHAT.get(what, "{} of clients, " + what).format(name)
    return TITLES.get(name, name)


class Style(NamedTuple):
    light: str  # color on a light background
    dark: str
    dashes: tuple[float, ...]  # in line widths; empty: solid
    marker: str  # empty if the algorithm has one line


def styles(algorithms: Sequence[str]) -> list[Style]:
    """Styles for the lines of a chart. Lines of one algorithm share its hue and differ in
    lightness, dashes and markers."""
    looks = []
    for i, a in enumerate(algorithms):
        of_it = algorithms.count(a)
        k = algorithms[:i].count(a)
        light, dark = COLORS.get(a, OTHER[0]), ON_DARK.get(a, OTHER[1])
        if of_it == 1:
            looks.append(Style(light, dark, DASHES.get(a, ()), ""))
            continue
        shade = 0.35 * (2 * k / (of_it - 1) - 1)
        pattern, marker = PATTERNS[k % len(PATTERNS)], MARKERS[k % len(MARKERS)]
        looks.append(Style(_mixed(light, shade), _mixed(dark, -shade), pattern, marker))
    return looks


def _mixed(color: str, shade: float) -> str:
    """The color mixed with white (shade > 0) or black."""
    goal = 255 if shade > 0 else 0
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(p + abs(shade) * (goal - p)):02x}" for p in parts)

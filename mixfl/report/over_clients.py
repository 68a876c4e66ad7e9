"""The distribution of a metric over clients: whom does a model fail?"""

from collections.abc import Sequence

from mixfl.report.document import Curves, Line, Point, Series, Sweep, Table
from mixfl.report.means import final, mean
from mixfl.report.style import metric_title

START = "eval/clients/"
PERCENT = (5, 25, 50, 75, 95)
OVER_ROUNDS = ("p05", "p50", "p95", "worst10")


def of_clients(metric: str) -> bool:
    return metric.startswith(START)


def worst(metrics: Sequence[str]) -> list[str]:
    """The columns for tables: the mean of the worst tenth of the clients."""
    return [m for m in dict.fromkeys(metrics) if of_clients(m) and m.endswith("/worst10")]


def parts(series: Sequence[Series], metrics: Sequence[str]) -> list[Curves | Sweep | Table]:
    """What is shown of the metrics over clients, if there are any."""
    shown: list[Curves | Sweep | Table] = []
    for column in worst(metrics):
        name = column.removeprefix(START).removesuffix("/worst10")
        drawn = [Line(s.name, s.algorithm, _quantiles(s, name)) for s in series]
        shown.append(
            Sweep(
                f"Over clients: {name}", "percent of the clients below", START + name,
                [line for line in drawn if line.points], log_x=False, series=series,
                text=f"A client's {name} is the mean over its own examples, after training. A flat "
                "line serves all clients alike.",
            )
        )  # fmt: skip
        over = [m for q in OVER_ROUNDS if (m := f"{START}{name}/{q}") in metrics]
        shown.append(Curves(f"Over clients and rounds: {name}", over, series))
        groups = [m for m in metrics if m.startswith(f"{START}{name}/group/")]
        if groups:
            header = ["group", *(s.name for s in series)]
            rows = [
                [m.removeprefix(f"{START}{name}/group/"), *(final(s, m) for s in series)]
                for m in groups
            ]
            shown.append(Table(f"{metric_title(START + name)} by group", header, rows))
    return shown


def _quantiles(series: Series, name: str) -> list[Point]:
    points = []
    for percent in PERCENT:
        m = mean(series, f"{START}{name}/p{percent:02d}")
        if m is not None:
            low, high = (m.low[-1], m.high[-1]) if m.low else (None, None)
            points.append(Point(float(percent), m.mean[-1], low, high))
    return points

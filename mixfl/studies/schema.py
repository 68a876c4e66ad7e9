"""What a study's file must have and may have (docs/experiments.md).

Mistakes are reported before the first run begins.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from mixfl.errors import MixflError
from mixfl.validation import Count, NotNegative, check_tables

Names = str | list[str]
Part = Literal["end", "early", "curve", "largest"]


class Table(Struct, forbid_unknown_fields=True):
    """A field without a default is required."""


class Scale(Table):
    preset: str = ""
    trials: Count = 3
    round_ms: NotNegative = 0.0
    keys: dict[str, Any] = {}


class FullScale(Scale):
    real: Scale | None = None


class Changes(Table):
    name: str = ""
    task: str = ""
    keys: dict[str, Any] = {}
    over: dict[str, list[Any]] = {}
    zip: bool = False
    trials: Count = 3


class ScaledChanges(Changes):
    real: Changes | None = None


class Series(Changes, kw_only=True):
    algorithms: list[str]
    quick: ScaledChanges | None = None
    full: ScaledChanges | None = None


# What to show: a class for each kind, whose name it has


class Show(Table, tag_field="kind", tag=str.lower):
    label: str
    title: str = ""
    text: str = ""


class Curves(Show, kw_only=True):
    metrics: list[str]
    series: Names | None = None
    log: bool = False
    panel_per: Literal["algorithm"] | None = None


class Final(Show, kw_only=True):
    metric: str
    key: str
    series: Names | None = None
    at: Part = "end"
    log: bool = False


class OfMetrics(Show, kw_only=True):
    metrics: list[str]
    series: Names | None = None


class TableOf(OfMetrics, tag="table"):
    pass


class Largest(OfMetrics):
    pass


class Costs(Show, kw_only=True):
    tables: list[int]


class Bounds(Show, kw_only=True):
    table: int
    columns: list[str]


# Checks of a claim (claims.py)


class Check(Table, tag_field="kind", tag=str.lower):
    pass


class OfMetric(Check):
    metric: str
    at: Part = "end"


class Pair(OfMetric):
    of: Names | None = None
    than: str | None = None
    each: list[str] | None = None


class Better(Pair):
    same: float = 0.0


class Often(Pair):
    pass


class Close(Pair, kw_only=True):
    within: float


class Reaches(Pair, kw_only=True):
    within: float


class Contrast(OfMetric, kw_only=True):
    of: str
    less: str
    than: list[str]


class Above(OfMetric, kw_only=True):
    of: Names
    limit: float


class Below(OfMetric, kw_only=True):
    of: Names
    limit: float


class Order(Check):
    metric: str
    key: str
    of: list[str]
    limit: float


class Saving(Check):
    what: str
    how: Names
    limit: float


class Claim(Table):
    number: int | str
    says: str
    checks: list[Better | Often | Close | Reaches | Contrast | Above | Below | Order | Saving]


class StudyFile(Table):
    title: str
    text: str = ""
    task: str = ""
    data: str = ""
    quick: FullScale | None = None
    full: FullScale | None = None
    series: list[Series] = []
    show: list[Curves | Final | TableOf | Largest | Costs | Bounds] = []
    claim: list[Claim] = []
    bounds: dict[str, float] = {}


def check(content: Mapping[str, Any], path: Path) -> None:
    """Check the content of a study's file."""
    file = check_tables(content, StudyFile, path.name)
    for claim in file.claim:
        for one in claim.checks:
            if isinstance(one, Pair) and not one.each and not (one.of and one.than):
                raise MixflError(
                    f"a check of claim {claim.number} of {path.name} compares nothing: give `of` "
                    "and `than`, or `each`."
                )

"""The content of a report, in any output format. It is text and numbers: nothing in it is trusted
to be HTML or Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]  # of metrics.jsonl: flat keys, `round`, numbers or None


@dataclass(frozen=True)
class Trial:
    """One run."""

    name: str  # the run folder, relative to where the report is made
    config: Mapping[str, Any]
    command: str  # repeats the run
    rows: Sequence[Row]
    status: str = "finished"  # or running, interrupted, failed, "diverged at round 12"


@dataclass(frozen=True)
class Series:
    """The trials of one setting: a line with its 95 % band."""

    name: str  # for the legend, such as "2-way Gradient Transfer" or "1wgt, central_batch = 25"
    algorithm: str  # an id; it decides the color
    trials: Sequence[Trial]


@dataclass(frozen=True)
class Curves:
    """Metrics over rounds (or bytes, or seconds), one panel each."""

    title: str
    metrics: Sequence[str]  # names in the rows
    series: Sequence[Series]
    label: str = ""  # the paper's, such as fig.nmp
    text: str = ""  # what the reader should see
    log: bool = False  # whether the y axis is logarithmic at first


@dataclass(frozen=True)
class Point:
    x: float
    mean: float | None  # None: diverged
    low: float | None = None  # of the 95 % interval; None with one trial
    high: float | None = None
    note: str = ""  # such as "2 of 3 trials diverged"


@dataclass(frozen=True)
class Line:
    name: str
    algorithm: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Sweep:
    """A metric's final value against a key."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    label: str = ""
    text: str = ""
    log_x: bool = True
    log: bool = False  # whether the y axis is logarithmic at first
    series: Sequence[Series] = ()  # the runs behind it


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    label: str = ""
    text: str = ""


@dataclass(frozen=True)
class Finding:
    """A claim, and the verdict on one data set."""

    number: str
    says: str
    data: str  # such as "smile, synthetic"
    verdict: str  # agree, disagree, not decided
    evidence: Sequence[str]  # one line per check
    effect: str = ""  # of the check that decides, and its interval
    interval: str = ""
    trials: str = ""  # of that check
    setting: str = ""  # the paper's, or how it differs
    version: int = 1  # of the study's protocol


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[Curves | Sweep | Table]
    text: str = ""


@dataclass(frozen=True)
class Document:
    title: str
    facts: Sequence[tuple[str, str]]  # such as ("command", "mixfl reproduce --scale quick")
    findings: Sequence[Finding]
    sections: Sequence[Section]
    notes: Sequence[str] = field(default_factory=tuple)

    def trials(self) -> list[Trial]:
        """All runs in the document, each once."""
        trials: dict[str, Trial] = {}
        for section in self.sections:
            for part in section.parts:
                if not isinstance(part, Table):
                    for series in part.series:
                        trials.update({t.name: t for t in series.trials})
        return list(trials.values())

"""The interface of a format: records, and how a client's records become columns."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mixfl.data.formats.options import Options
from mixfl.data.formats.reading import Meter


class Record(NamedTuple):
    """The smallest unit that is read: a rating, a text, an image's name."""

    client: str
    payload: bytes
    order: int = 0  # position among the client's records; ties keep the order of reading
    label: str | None = None  # for a partition by label
    part: str = ""  # of the official split
    site: str = ""  # clients of different sites are never joined


class Format:
    options: tuple[str, ...] = ()  # in addition to those of all formats
    group = 1  # default number of clients joined into one
    minimum = 1  # records that a client needs to have an example
    natural = True  # the data says which client a record belongs to
    in_time = False  # a client's examples are in order of time: the last ones are for testing
    parts: tuple[str, ...] = ()  # of the official split

    def __init__(self, source: Path, options: Options, meter: Meter):
        self.source, self.given, self.meter = source, options, meter
        self.skipped: Counter[str] = Counter()  # reason: how often
        self.notes: list[str] = []
        self.extra_files: dict[str, Any] = {}  # file name: value, written as JSON to each store

    def records(self) -> Iterator[Record]:
        raise NotImplementedError

    def count(self, payloads: list[bytes]) -> int:
        """How many examples `build` makes from a client's records."""
        return len(payloads)

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        """The columns of one client, from its records in order."""
        raise NotImplementedError

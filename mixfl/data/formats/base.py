"""What every format gives."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mixfl.data.formats.options import Options
from mixfl.data.formats.reading import Meter


class Record(NamedTuple):
    """The smallest piece that is read: a rating, a text, an image's name."""

    client: str
    payload: bytes
    order: int = 0  # among the client's records; equal ones stay as they were read
    label: str | None = None  # for a partition by label
    part: str = ""  # of the data's own split
    site: str = ""  # clients of different sites are never joined


class Format:
    options: tuple[str, ...] = ()  # beside those that all formats have
    group = 1  # raw clients in a composite one, unless the options say
    minimum = 1  # records without which a client has no example
    natural = True  # the data says whose a record is
    in_time = False  # a client's examples are in order of time: the last ones are for testing
    parts: tuple[str, ...] = ()  # of the data's own split

    def __init__(self, source: Path, options: Options, meter: Meter):
        self.source, self.given, self.meter = source, options, meter
        self.skipped: Counter[str] = Counter()  # why, and how often
        self.notes: list[str] = []
        self.beside: dict[str, Any] = {}  # file: value, written as JSON into each store

    def records(self) -> Iterator[Record]:
        raise NotImplementedError

    def count(self, payloads: list[bytes]) -> int:
        """How many examples `build` makes of a client's records."""
        return len(payloads)

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        """The columns of one client, from its records in order."""
        raise NotImplementedError

"""Tables with a client column: Parquet, CSV (with a header), JSON lines.

Columns of numbers, of lists of numbers, or of arrays of one shape become columns of the store;
lists of different lengths become a ragged one. Others are left out and listed. The first row of a
CSV or JSONL file decides which columns have numbers. Whole numbers become int32, others float32;
Parquet's narrower types stay.
"""

import math
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.data.columns import Ragged
from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.images import csv_rows
from mixfl.data.formats.parquet import parquet_rows
from mixfl.data.formats.reading import files, json_lines, name, plain, wrong
from mixfl.data.limits import SHORT_LINE
from mixfl.errors import MixflError

NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")
EXACT = 2.0**53  # from here on, not every whole number is a 64-bit float
LARGEST = 2.0**127  # about the largest 32-bit number
SUFFIXES = (".parquet", ".csv", ".jsonl", ".ndjson")
Row = tuple[int, dict[str, Any]]  # its line (or row number) and its values


class Table(Format):
    options: tuple[str, ...] = ("client", "label", "partition")
    lengths_vary = True  # lists of different lengths are no error

    def __init__(self, *args):
        super().__init__(*args)
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the columns that are kept
        self.ragged: set[str] = set()  # columns of lists of different lengths
        self.kinds: dict[str, np.dtype] = {}  # from Parquet's schema; otherwise by the values
        self.fractions: set[str] = set()  # columns with a value that is not whole
        self.client = self.given.client or "client"
        self.label = self.given.label or "label"

    def records(self) -> Iterator[Record]:
        for path in files(self.source, *SUFFIXES):
            for number, row in self.rows(path):
                if not self.shapes:
                    self.choose(path, number, row)
                yield self.record(path, number, row)

    def rows(self, path: Path) -> Iterator[Row]:
        suffix = Path(path.name.removesuffix(".gz")).suffix
        if suffix == ".csv":
            rows = csv_rows(path, self.meter)
            return ((n, {c: self.field(c, v) for c, v in row.items()}) for n, row in rows)
        if suffix in (".jsonl", ".ndjson"):
            return json_lines(path, self.meter)
        if path.suffix == ".parquet":
            return parquet_rows(path, self.meter, self.wanted)
        raise MixflError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}.")

    def field(self, column: str, text: str) -> str | float:
        """A field of a CSV file, converted to a number if it is one."""
        if column != self.client and NUMBER.fullmatch(text):
            return float(text)
        return text

    def wanted(self, schema: Any) -> tuple[list[str], dict[str, int]]:
        """The columns of a Parquet file to read (numbers, the client and the label), and which of
        them are texts."""
        import pyarrow as pa

        names, texts = [], {}
        for field in schema:
            kind = _leaf(field.type)
            if pa.types.is_integer(kind) or pa.types.is_floating(kind):
                self.kinds.setdefault(field.name, np.dtype(kind.to_pandas_dtype()))
            elif field.name in (self.client, self.label) and pa.types.is_string(field.type):
                texts[field.name] = SHORT_LINE
            elif not pa.types.is_boolean(kind) and field.name not in (self.client, self.label):
                continue
            names.append(field.name)
        return names, texts

    def choose(self, path: Path, number: int, row: dict[str, Any]) -> None:
        others = []
        for column, value in row.items():
            if column == self.client:
                continue
            a = _array(value)
            if a is None or (not a.size and (a.ndim != 1 or not self.lengths_vary)):
                others.append(column)
            else:
                self.shapes[column] = a.shape
        if not self.shapes:
            raise wrong(
                path, number, f"none of the columns {', '.join(list(row)[:20])} has numbers: turn "
                "text and categories into numbers first."
            )  # fmt: skip
        if others:
            self.notes.append(f"columns without numbers are left out: {', '.join(others)}.")

    def record(self, path: Path, number: int, row: dict[str, Any]) -> Record:
        values = array("d")
        for column, shape in self.shapes.items():
            value = row.get(column)
            if not shape and isinstance(value, int | float) and abs(value) < LARGEST:
                values.append(value)
                if value % 1 or abs(value) >= EXACT:
                    self.fractions.add(column)
                continue
            a = _array(value)
            if a is not None and a.ndim == len(shape) == 1 and self.lengths_vary:
                if a.shape != shape and column not in self.ragged:
                    self.ragged.add(column)
                    self.notes.append(
                        f"column '{column}' has lists of different lengths: they are padded when "
                        f"they are read, and '{column}_length' is beside them."
                    )
            elif a is None or a.shape != shape:
                raise wrong(
                    path, number, f"column '{column}' has {str(row.get(column))[:40]!r}: expected "
                    f"{'a number' if not shape else f'numbers of the shape {list(shape)}'}, as in "
                    "the first row."
                )  # fmt: skip
            if column not in self.fractions and ((a % 1 != 0) | (np.abs(a) >= EXACT)).any():
                self.fractions.add(column)
            if len(shape) == 1:
                values.append(len(a))
            values.frombytes(a.tobytes())
        client = name(row.get(self.client))
        if client is None and self.given.partition is None:
            raise wrong(
                path, number, f"there is no client in the column '{self.client}' (the columns are "
                f"{', '.join(list(row)[:20])}): name it with the option client, or assign rows to "
                "clients with the option partition."
            )  # fmt: skip
        label = row.get(self.label)
        return Record(
            client or "all", values.tobytes(),
            label=None if label is None else plain(str(label)),
        )  # fmt: skip

    def build(self, payloads: list[bytes]) -> dict[str, Any]:
        if self.ragged:
            return self.build_lists(payloads)
        flat = np.frombuffer(b"".join(payloads), np.float64).reshape(len(payloads), -1)
        columns, at = {}, 0
        for column, shape in self.shapes.items():
            at += len(shape) == 1  # the list's length
            width = math.prod(shape)
            columns[column] = flat[:, at : at + width].reshape(len(flat), *shape).astype(
                self.dtype(column)
            )  # fmt: skip
            at += width
        return columns

    def build_lists(self, payloads: list[bytes]) -> dict[str, Any]:
        rows: dict[str, list[np.ndarray]] = {column: [] for column in self.shapes}
        for payload in payloads:
            flat, at = np.frombuffer(payload, np.float64), 0
            for column, shape in self.shapes.items():
                width = int(flat[at]) if len(shape) == 1 else math.prod(shape)
                at += len(shape) == 1
                rows[column].append(flat[at : at + width])
                at += width
        return {c: self.column(c, values) for c, values in rows.items()}

    def column(self, name: str, rows: list[np.ndarray]) -> Any:
        if name in self.ragged:
            ends = np.cumsum([0, *map(len, rows)])
            return Ragged([np.concatenate(rows).astype(self.dtype(name))], [ends])
        return np.stack(rows).reshape(len(rows), *self.shapes[name]).astype(self.dtype(name))

    def dtype(self, column: str) -> np.dtype:
        default = np.float64 if column in self.fractions else np.int64
        return self.kinds.get(column, np.dtype(default))


def _leaf(kind: Any) -> Any:
    """The type of the values inside nested lists or a dictionary."""
    while True:
        if hasattr(kind, "storage_type"):
            kind = kind.storage_type
        elif hasattr(kind, "value_type"):
            kind = kind.value_type
        else:
            return kind


def _array(value: Any) -> np.ndarray | None:
    """Finite 64-bit numbers (exact for whole ones up to 53 bits), or None."""
    try:
        a = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    if a.dtype.kind not in "biuf":
        return None
    return a.astype(np.float64) if (np.abs(a.astype(np.float64)) < LARGEST).all() else None

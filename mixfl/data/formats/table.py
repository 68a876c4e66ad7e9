"""Tables with a client column: Parquet, CSV (with a header), JSON lines.

Columns of numbers, or of lists of numbers of equal length, become columns of the store. Others are
left out and listed. The first row of a CSV or JSONL file decides which columns have numbers. Whole
numbers become int32, others float32; Parquet's narrower types stay.
"""

import math
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.images import csv_rows
from mixfl.data.formats.reading import files, json_lines, name, plain, wrong
from mixfl.data.limits import FOOTER, LISTS, ROWS, SHORT_LINE
from mixfl.errors import MixflError

NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\s*")
EXACT = 2.0**53  # from here on, not every whole number is a 64-bit float
LARGEST = 2.0**127  # about the largest 32-bit number
SUFFIXES = (".parquet", ".csv", ".jsonl", ".ndjson")
Row = tuple[int, dict[str, Any]]  # its line (or row number) and its values


class Table(Format):
    options: tuple[str, ...] = ("client", "label", "partition")

    def __init__(self, *args):
        super().__init__(*args)
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the columns that are kept
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
            return self.parquet(path)
        raise MixflError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}.")

    def field(self, column: str, text: str) -> str | float:
        """A field of a CSV file, converted to a number if it is one."""
        if column != self.client and NUMBER.fullmatch(text):
            return float(text)
        return text

    def parquet(self, path: Path) -> Iterator[Row]:
        import pyarrow.parquet as pq

        number = 0
        limits = {
            "thrift_string_size_limit": FOOTER, "thrift_container_size_limit": LISTS,
            "pre_buffer": False,
        }  # fmt: skip
        try:
            with pq.ParquetFile(path, **limits) as file:
                names = file.schema_arrow.names
                wanted, texts = self.wanted(file.schema_arrow)
            # A text that many rows share is in the file once, and stays so in a dictionary.
            with pq.ParquetFile(path, read_dictionary=texts, **limits) as file:
                total = max(file.metadata.num_rows, 1)
                for batch in file.iter_batches(batch_size=1024, columns=wanted):
                    if bad := _too_large(batch):
                        raise wrong(path, number + 1, bad)
                    for row in batch.to_pylist():
                        number += 1
                        yield number, dict.fromkeys(names) | row
                    self.meter.at(number, total, f"reading {path.name}")
        except (MixflError, GeneratorExit):
            raise
        except Exception as error:  # a damaged file can make Arrow raise anything
            raise wrong(path, number + 1, f"the Parquet file is damaged: {error}.") from None

    def wanted(self, schema: Any) -> tuple[list[str], list[str]]:
        """The columns of a Parquet file to read (numbers, the client and the label), and which of
        them are texts."""
        import pyarrow as pa

        names, texts = [], []
        for field in schema:
            kind = _leaf(field.type)
            if pa.types.is_integer(kind) or pa.types.is_floating(kind):
                self.kinds.setdefault(field.name, np.dtype(kind.to_pandas_dtype()))
            elif field.name in (self.client, self.label) and pa.types.is_string(field.type):
                texts.append(field.name)
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
            if a is None or not a.size:
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
            if a is None or a.shape != shape:
                raise wrong(
                    path, number, f"column '{column}' has {str(row.get(column))[:40]!r}: expected "
                    f"{'a number' if not shape else f'numbers of the shape {list(shape)}'}, as in "
                    "the first row."
                )  # fmt: skip
            if column not in self.fractions and ((a % 1 != 0) | (np.abs(a) >= EXACT)).any():
                self.fractions.add(column)
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

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        flat = np.frombuffer(b"".join(payloads), np.float64).reshape(len(payloads), -1)
        columns, at = {}, 0
        for column, shape in self.shapes.items():
            width = math.prod(shape)
            a = flat[:, at : at + width].reshape(len(flat), *shape)
            default = np.float64 if column in self.fractions else np.int64
            columns[column] = a.astype(self.kinds.get(column, np.dtype(default)))
            at += width
        return columns


def _too_large(batch: Any) -> str:
    """What is too large in these rows of a Parquet file; empty if nothing is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if batch.nbytes > ROWS:
        return f"{batch.num_rows} rows have more than {ROWS:,} bytes."
    for title, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type):
            longest = pc.max(pc.binary_length(column.dictionary)).as_py() or 0
            if longest > SHORT_LINE:
                return (
                    f"column '{title}' has a text of {longest:,} bytes, more than {SHORT_LINE:,}."
                )
    return ""


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

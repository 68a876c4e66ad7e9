"""Columns: rows of one shape and dtype, in memory or in a memory map, and their checks.

A column of lists of different lengths is `Ragged`: it keeps the lists as they are, and pads them
when rows are read. Beside a ragged column `tokens` there is always a column `tokens_length`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mixfl.errors import MixflError

ALIGNMENT = 64  # bytes
LONG = 1 << 16  # a list may be padded to this length, or to that of all lists together
PIECE = 1 << 16  # rows that are checked at a time: the data may be large


class Column:
    """Rows of one shape and dtype, in one or several parts. With a `dtype`, rows are converted to
    it when they are read."""

    def __init__(self, parts: Sequence[np.ndarray], dtype: Any = None):
        self.parts = list(parts)
        self.starts = np.cumsum([0] + [len(p) for p in self.parts])
        self.dtype = np.dtype(dtype) if dtype is not None else self.parts[0].dtype
        self.shape = self.parts[0].shape[1:]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: np.ndarray) -> np.ndarray:
        out = aligned((len(rows), *self.shape), self.dtype)
        if len(self.parts) == 1 and self.parts[0].dtype == self.dtype:
            return np.take(self.parts[0], rows, axis=0, out=out, mode="clip")
        for i, at in by_part(self.starts, rows):
            out[at] = np.take(self.parts[i], rows[at] - self.starts[i], axis=0, mode="clip")
        return out


class Ragged(Column):
    """A column of lists of numbers with different lengths, such as token ids.

    Rows are read as arrays of `length` numbers: shorter lists are filled up with `fill`, longer
    ones are cut. `length` is that of the longest list unless given. Give a plain list of lists
    where all of them are at hand; make a Ragged where its lists might have equal lengths by chance:

    >>> mixfl.Ragged.from_lists([[5, 2, 9], [7]]).take(np.arange(2))
    array([[5, 2, 9],
           [7, 0, 0]])
    """

    def __init__(
        self, values: Sequence[np.ndarray], ends: Sequence[np.ndarray], *,
        length: int | None = None, fill: float = 0, dtype: Any = None,
    ):  # fmt: skip
        """Part i has the lists values[i][ends[i][j] : ends[i][j + 1]]."""
        self.parts, self.ends = list(values), list(ends)
        self.starts = np.cumsum([0] + [len(e) - 1 for e in self.ends])
        self.dtype = np.dtype(dtype) if dtype is not None else self.parts[0].dtype
        self.length = self._longest() if length is None else length
        self.fill = fill
        if self.length < 1 or np.array(fill).astype(self.dtype) != fill:
            raise MixflError(
                f"a ragged column of {self.dtype} is padded to {self.length} numbers with {fill}: "
                "expected at least 1, and a number that the column can hold."
            )
        self.shape = (self.length,)

    @classmethod
    def from_lists(
        cls, lists: Iterable[Any], *, length: int | None = None, fill: float = 0
    ) -> "Ragged":
        """One list, or array, of numbers per row."""
        rows = [np.asarray(row) for row in lists]
        bad = next((i for i, r in enumerate(rows) if r.ndim != 1 or r.dtype.kind not in "biuf"), -1)
        if bad >= 0:
            raise MixflError(
                f"row {bad} of a ragged column has dtype {rows[bad].dtype} and shape "
                f"{rows[bad].shape}: expected a list of numbers in each row."
            )
        ends = np.cumsum([0] + [len(row) for row in rows])
        values = [r for r in rows if len(r)] or [np.zeros(0, np.int32)]  # [] says no dtype
        return cls([np.concatenate(values)], [ends], length=length, fill=fill)

    def _longest(self) -> int:
        return max([1, *(int(np.diff(e).max()) for e in self.ends if len(e) > 1)])

    def padded(self, length: int, fill: float = 0) -> "Ragged":
        """The same lists, padded with `fill` or cut to `length` when they are read."""
        most = max(LONG, sum(map(len, self.parts)))
        if not isinstance(length, int) or length > most:
            raise MixflError(f"a list can't be padded to {length!r} numbers: expected 1 to {most}.")
        return Ragged(self.parts, self.ends, length=length, fill=fill, dtype=self.dtype)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """These rows, padded."""
        values, lengths = self._read(rows)
        out = aligned((len(rows), self.length), self.dtype)
        out[...] = self.fill
        out[np.arange(self.length) < lengths[:, None]] = values
        return out

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """How many numbers of these rows are not padding."""
        return np.minimum(self._spans(rows)[1], self.length)

    def __getitem__(self, rows: Any) -> "Ragged":
        """The lists of these rows: an index, a mask or a slice."""
        values, lengths = self._read(np.arange(len(self))[rows])
        ends = np.concatenate([[0], np.cumsum(lengths)])
        return Ragged([values], [ends], length=self.length, fill=self.fill)

    @property
    def nbytes(self) -> int:
        """The bytes of all lists, without padding."""
        return sum(p.nbytes + e.nbytes for p, e in zip(self.parts, self.ends, strict=True))

    def _spans(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the list of each row begins in its part, and its length."""
        begin, length = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        for i, at in by_part(self.starts, rows):
            ends, within = self.ends[i], rows[at] - self.starts[i]
            begin[at], length[at] = ends[within], ends[within + 1] - ends[within]
            if (length[at] < 0).any() or (begin[at] < 0).any() or (
                (begin[at] + length[at]).max(initial=0) > len(self.parts[i])
            ):  # fmt: skip
                raise MixflError("a ragged column is damaged: a list ends before it begins.")
        return begin, length

    def _read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of all lists, one after another, and the length of each list."""
        begin, length = self._spans(rows)
        length = np.minimum(length, self.length)
        to = np.cumsum(length) - length
        out = np.empty(int(length.sum()), self.dtype)
        for i, at in by_part(self.starts, rows):
            within = np.arange(int(length[at].sum())) - np.repeat(
                np.cumsum(length[at]) - length[at], length[at]
            )
            source = np.repeat(begin[at], length[at]) + within
            out[np.repeat(to[at], length[at]) + within] = self.parts[i][source]
        return out, length


class Lengths(Column):
    """The lengths of a ragged column's lists, as they are read."""

    def __init__(self, of: Ragged):
        self.of, self.starts = of, of.starts
        self.dtype, self.shape = np.dtype(np.int32), ()

    def take(self, rows: np.ndarray) -> np.ndarray:
        out = aligned((len(rows),), self.dtype)
        out[...] = self.of.lengths(rows)
        return out


def by_part(starts: np.ndarray, rows: np.ndarray) -> Iterable[tuple[int, Any]]:
    """Each part that has some of the rows, and which rows these are."""
    if len(starts) == 2:
        return [(0, slice(None))]
    where = np.searchsorted(starts, rows, side="right") - 1
    order = np.argsort(where, kind="stable")
    ends = np.searchsorted(where[order], np.arange(len(starts)))
    return [(int(i), order[ends[i] : ends[i + 1]]) for i in np.flatnonzero(np.diff(ends))]


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that XLA can use in place. It copies arrays that are not aligned, which took
    7 % of a smile round's time."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)


def columns_of(arrays: Mapping[str, Any]) -> dict[str, Column]:
    """Checked arrays as columns, with the lengths of ragged ones."""
    columns: dict[str, Column] = {}
    for name, a in arrays.items():
        columns[name] = a if isinstance(a, Column) else Column([a])
        if isinstance(a, Ragged):
            length = f"{name}_length"
            if length in arrays:
                raise MixflError(
                    f"the column '{length}' is made for the ragged column '{name}', but the data "
                    "has one of that name: rename it."
                )
            columns[length] = Lengths(a)
    return columns


def kind(a: Any) -> str:
    """`float32 [28, 28]`, or `int32 [...]` if ragged."""
    if isinstance(a, Ragged):
        return f"{a.dtype} [...]"
    return f"{a.dtype} {list(a.shape[1:])}" if a.shape[1:] else str(a.dtype)


def lists_at(columns: Mapping[str, Column], rows: np.ndarray) -> dict[str, Any]:
    """The rows as they are stored: with lists instead of padded arrays."""
    return {
        name: column[rows] if isinstance(column, Ragged) else column.take(rows)
        for name, column in columns.items() if not isinstance(column, Lengths)
    }  # fmt: skip


def joined(arrays: Sequence[Any]) -> Any:
    """Checked arrays, one after another. If one is ragged, the result is."""
    if not any(isinstance(a, Ragged) for a in arrays):
        return np.concatenate(arrays)
    lists = [a if isinstance(a, Ragged) else Ragged.from_lists(a) for a in arrays]
    read = [a._read(np.arange(len(a))) for a in lists]
    values = [v for v, _ in read if len(v)] or [read[0][0]]  # an empty list says no dtype
    ends = np.concatenate([[0], np.cumsum(np.concatenate([n for _, n in read]))])
    longest = max(a.length for a in lists)
    return Ragged([np.concatenate(values)], [ends], length=longest, fill=lists[0].fill)


def checked(arrays: Mapping[str, Any], empty: bool = False) -> dict[str, Any]:
    """Columns of equal length, at most 32-bit and finite: NumPy arrays, or Ragged. Raises an error
    for anything else."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise MixflError(
            f"expected a dict of columns such as {{'x': x, 'y': y}}, got {type(arrays).__name__}."
        )
    out = {name: checked_column(name, a) for name, a in arrays.items()}
    lengths = {name: len(a) for name, a in out.items()}
    if len(set(lengths.values())) > 1:
        raise MixflError(f"the columns have different numbers of rows: {lengths}.")
    if not empty and not next(iter(lengths.values())):
        raise MixflError("the data has no rows.")
    return out


def checked_column(name: str, given: Any) -> Any:
    if isinstance(given, Ragged):
        dtypes = {check_values(name, part) for part in given.parts}
        (dtype,) = dtypes if len(dtypes) == 1 else (np.result_type(*dtypes),)
        return Ragged(
            given.parts, given.ends, length=given.length, fill=given.fill, dtype=dtype
        )  # fmt: skip
    a = _array(given)
    if isinstance(a, Ragged):
        return checked_column(name, a)
    if a.ndim == 0 or a.dtype.kind not in "biuf" or 0 in a.shape[1:]:
        raise MixflError(
            f"column '{name}' has dtype {a.dtype} and shape {a.shape}: expected numbers with one "
            "row per example. Turn text and categories into numbers first."
        )
    return a.astype(check_values(name, a), copy=False)


def _array(given: Any) -> Any:
    """An array; a Ragged if the rows are lists of numbers of different lengths."""
    try:
        a = np.asarray(given)
        if a.ndim == 2 and not a.size and isinstance(given, list):  # empty lists
            return Ragged.from_lists(given)
    except ValueError:  # lists of different lengths, or of different shapes
        a = np.empty(len(given), object)
        a[:] = [np.asarray(row) for row in given]
    if a.dtype.kind == "O" and a.ndim == 1 and len(a):
        rows = [np.asarray(row) for row in a if isinstance(row, list | tuple | np.ndarray)]
        if len(rows) == len(a) and all(row.dtype.kind in "biuf" for row in rows):
            shapes = {row.shape for row in rows}
            if len(shapes) == 1:
                return np.stack(rows)
            if all(len(shape) == 1 for shape in shapes):
                return Ragged.from_lists(rows)
    return a


def check_values(name: str, a: np.ndarray) -> np.dtype:
    """The dtype of at most 32 bits for these numbers; an error if one does not fit."""
    if a.dtype.kind == "f":
        dtype = np.dtype(np.float32) if a.dtype.itemsize > 4 else a.dtype.newbyteorder("=")
        for start in range(0, len(a), PIECE):
            with np.errstate(over="ignore"):  # too large numbers become infinite
                bad = ~np.isfinite(a[start : start + PIECE].astype(dtype, copy=False))
            if bad.any():
                row = start + int(np.argwhere(bad)[0][0])
                raise MixflError(
                    f"column '{name}' has a NaN or infinite value in row {row} (as a 32-bit "
                    "number): remove or replace such rows before training."
                )
        return dtype
    if a.dtype.itemsize < 8:
        return a.dtype.newbyteorder("=")
    for start in range(0, len(a), PIECE):
        piece = a[start : start + PIECE]
        if piece.size and (piece.max() >= 2**31 or piece.min() < -(2**31)):
            raise MixflError(
                f"column '{name}' has whole numbers that need more than 32 bits: renumber them."
            )
    return np.dtype(np.int32)

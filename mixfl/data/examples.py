"""Examples in columns, and examples grouped by client.

`Examples` is a dict of columns of equal length; one row across all of them is one example. A column
is a sequence of NumPy arrays (views of memory-mapped record batches, or one array in memory).
`ClientData` adds where each client's rows begin and end. Both may have an index of rows, so that a
subset needs no copy. Reading touches only the requested rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.errors import MixflError

ALIGNMENT = 64  # bytes


class Column:
    """Rows of one shape and dtype, in one or several parts."""

    def __init__(self, parts: Sequence[np.ndarray]):
        self.parts = list(parts)
        self.starts = np.cumsum([0] + [len(p) for p in self.parts])
        self.dtype, self.shape = self.parts[0].dtype, self.parts[0].shape[1:]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: np.ndarray) -> np.ndarray:
        out = aligned((len(rows), *self.shape), self.dtype)
        if len(self.parts) == 1:
            return np.take(self.parts[0], rows, axis=0, out=out, mode="clip")
        where = np.searchsorted(self.starts, rows, side="right") - 1
        order = np.argsort(where, kind="stable")  # groups the rows by part
        ends = np.searchsorted(where[order], np.arange(len(self.parts) + 1))
        for i in np.flatnonzero(np.diff(ends)):
            at = order[ends[i] : ends[i + 1]]
            out[at] = np.take(self.parts[i], rows[at] - self.starts[i], axis=0, mode="clip")
        return out


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that XLA can use in place. It copies arrays that are not aligned, which took
    7 % of a smile round's time."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True, eq=False)
class Examples:
    """Named columns of equal length, or a subset of their rows."""

    columns: dict[str, Column]
    rows: np.ndarray | None = None  # a subset, as an index into the columns

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Examples":
        return cls({name: Column([a]) for name, a in checked(arrays).items()})

    def __len__(self) -> int:
        return len(self.rows) if self.rows is not None else len(next(iter(self.columns.values())))

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `rows` (any shape of index): a dict of arrays [*rows.shape, ...]."""
        flat = np.ravel(rows) if self.rows is None else self.rows[np.ravel(rows)]
        return {
            name: column.take(flat).reshape(*np.shape(rows), *column.shape)
            for name, column in self.columns.items()
        }

    def all(self) -> dict[str, np.ndarray]:
        return self.take(np.arange(len(self)))

    def subset(self, rows: np.ndarray) -> "Examples":
        rows = np.asarray(rows, np.int64)
        return Examples(self.columns, rows if self.rows is None else self.rows[rows])

    @property
    def example_bytes(self) -> int:
        return sum(c.dtype.itemsize * int(np.prod(c.shape)) for c in self.columns.values())


@dataclass(frozen=True, eq=False)
class ClientData:
    """Examples grouped by client: client i has the rows offsets[i] to offsets[i + 1] - 1."""

    examples: Examples
    offsets: np.ndarray  # [clients + 1]
    ids: Any  # [clients], names for messages and splits
    dropped: int = 0  # clients left out because they have no usable example

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], client) -> "ClientData":
        """Makes client data from columns and a column with each row's client (numbers or
        strings)."""
        columns = checked(arrays)
        client = np.asarray(client)
        n = len(next(iter(columns.values())))
        if client.shape != (n,):
            raise MixflError(
                f"the client column has shape {client.shape}, the data has {n} rows: give one "
                "client per row."
            )
        try:
            missing = (client != client) | (client == None)  # noqa: E711 (NaN or None)
            if missing.any():
                raise MixflError("the client column has missing values: every row needs a client.")
            ids, where, counts = np.unique(client, return_inverse=True, return_counts=True)
        except TypeError:
            raise MixflError(
                "the client column mixes kinds of values: give numbers only, or strings only."
            ) from None
        if not (np.diff(where) >= 0).all():
            order = np.argsort(where, kind="stable")
            columns = {name: a[order] for name, a in columns.items()}
        examples = Examples({name: Column([a]) for name, a in columns.items()})
        return cls(examples, np.concatenate([[0], np.cumsum(counts)]), ids)

    @classmethod
    def from_clients(cls, clients: Mapping[str, Mapping[str, np.ndarray]]) -> "ClientData":
        """Makes client data from one dict of columns per client. Clients without examples are
        dropped and counted."""
        kept = {}
        for c, columns in clients.items():
            try:
                arrays = checked(columns, empty=True) if columns else {}
            except MixflError as error:
                raise MixflError(f"client {c!r}: {error}") from None
            if any(len(a) for a in arrays.values()):
                kept[c] = arrays
        if not kept:
            raise MixflError(f"none of the {len(clients)} clients has an example.")
        first = next(iter(kept.values()))
        expected = {k: a.shape[1:] for k, a in first.items()}
        for c, arrays in kept.items():
            shapes = {k: a.shape[1:] for k, a in arrays.items()}
            if shapes != expected:
                raise MixflError(
                    f"client {c!r} has columns with the shapes {shapes}, expected {expected}."
                )
        joined = {k: np.concatenate([a[k] for a in kept.values()]) for k in first}
        offsets = np.cumsum([0] + [len(next(iter(a.values()))) for a in kept.values()])
        return cls(Examples.from_arrays(joined), offsets, list(kept), len(clients) - len(kept))

    @classmethod
    def open(cls, path: str | Path) -> "ClientData":
        """Opens a store written by `write` or `mixfl data prepare`. It is memory-mapped."""
        from mixfl.data.store import open_store

        return open_store(Path(path))

    def write(self, path: str | Path) -> None:
        from mixfl.data.store import StoreWriter

        with StoreWriter(Path(path)) as store:
            for i in np.flatnonzero(self.sizes()).tolist():
                store.add(self.ids[i], self.examples.take(self.rows(i)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    def rows(self, i: int) -> np.ndarray:
        return np.arange(self.offsets[i], self.offsets[i + 1])

    def where(self, keep: Callable[[dict[str, np.ndarray]], np.ndarray], *names: str):
        """The examples for which keep(columns) holds, reading only the columns in `names`."""
        small = Examples({n: self.examples.columns[n] for n in names}, self.examples.rows)
        kept = np.asarray(keep(small.all()), bool)
        offsets = np.concatenate([[0], np.cumsum(kept)])[self.offsets]
        subset = self.examples.subset(np.flatnonzero(kept))
        return ClientData(subset, offsets, self.ids, self.dropped)

    def select(self, clients: np.ndarray) -> "ClientData":
        """Only the given clients (by position)."""
        clients = np.asarray(clients, np.int64)
        rows = np.concatenate([clients[:0], *(self.rows(i) for i in clients)])
        offsets = np.cumsum([0, *self.sizes()[clients]])
        ids = [self.ids[i] for i in clients]
        return ClientData(self.examples.subset(rows), offsets, ids, self.dropped)

    def usable(self) -> "ClientData":
        """The clients that have examples. The others are counted in `dropped`."""
        full = np.flatnonzero(self.sizes() > 0)
        if len(full) == len(self):
            return self
        # An empty client has no rows, so the examples stay the same.
        offsets = np.append(self.offsets[full], self.offsets[-1])
        ids = [self.ids[i] for i in full]
        return ClientData(self.examples, offsets, ids, self.dropped + len(self) - len(full))


def checked(arrays: Mapping[str, np.ndarray], empty: bool = False) -> dict[str, np.ndarray]:
    """Columns as NumPy arrays of equal length, at most 32-bit and finite. Raises an error for
    anything else."""
    if not isinstance(arrays, Mapping) or not arrays:
        raise MixflError(
            f"expected a dict of columns such as {{'x': x, 'y': y}}, got {type(arrays).__name__}."
        )
    out = {name: _checked_column(name, np.asarray(a)) for name, a in arrays.items()}
    lengths = {name: len(a) for name, a in out.items()}
    if len(set(lengths.values())) > 1:
        raise MixflError(f"the columns have different numbers of rows: {lengths}.")
    if not empty and not next(iter(lengths.values())):
        raise MixflError("the data has no rows.")
    return out


def _checked_column(name: str, a: np.ndarray) -> np.ndarray:
    if a.ndim == 0 or a.dtype.kind not in "biuf" or 0 in a.shape[1:]:
        raise MixflError(
            f"column '{name}' has dtype {a.dtype} and shape {a.shape}: expected numbers with one "
            "row per example. Turn text and categories into numbers first."
        )
    if a.dtype.kind == "f":
        if a.dtype.itemsize > 4:
            with np.errstate(over="ignore"):  # too large numbers become infinite; caught below
                a = a.astype(np.float32)
        for start in range(0, len(a), 1 << 16):  # in pieces: the data may be large
            bad = ~np.isfinite(a[start : start + (1 << 16)])
            if bad.any():
                row = start + int(np.argwhere(bad)[0][0])
                raise MixflError(
                    f"column '{name}' has a NaN or infinite value in row {row} (as a 32-bit "
                    "number): remove or replace such rows before training."
                )
    elif a.dtype.itemsize == 8:
        if a.size and (a.max() >= 2**31 or a.min() < -(2**31)):
            raise MixflError(
                f"column '{name}' has whole numbers that need more than 32 bits: renumber them."
            )
        return a.astype(np.int32)
    return a.astype(a.dtype.newbyteorder("="), copy=False)

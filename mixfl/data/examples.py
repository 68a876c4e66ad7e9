"""Examples in columns, and examples grouped by client.

`Examples` is a dict of columns of equal length; one row across all of them is one example. A column
is a sequence of NumPy arrays (views of memory-mapped record batches, or one array in memory;
columns.py).
`ClientData` adds where each client's rows begin and end. Both may have an index of rows, so that a
subset needs no copy. Reading touches only the requested rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.data.columns import Column, Lengths, Ragged, checked, columns_of, joined, lists_at
from mixfl.errors import MixflError


@dataclass(frozen=True, eq=False)
class Examples:
    """Named columns of equal length, or a subset of their rows.

    Only the rows that are taken are read.

    >>> examples = mixfl.Examples.from_arrays({"x": np.eye(3), "y": np.arange(3)})
    >>> len(examples), examples.take(np.array([2]))["y"]
    (3, array([2], dtype=int32))
    """

    columns: dict[str, Column]
    rows: np.ndarray | None = None  # a subset, as an index into the columns

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Examples":
        """From columns with a row per example."""
        return cls(columns_of(checked(arrays)))

    def __len__(self) -> int:
        return len(self.rows) if self.rows is not None else len(next(iter(self.columns.values())))

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """The examples at `rows` (any shape of index): a dict of arrays [*rows.shape, ...]."""
        flat = np.ravel(rows) if self.rows is None else self.rows[np.ravel(rows)]
        return {
            name: column.take(flat).reshape(*np.shape(rows), *column.shape)
            for name, column in self.columns.items()
        }

    def lists(self, rows: np.ndarray) -> dict[str, Any]:
        """As `take`, but with the lists of ragged columns instead of padded arrays."""
        flat = rows if self.rows is None else self.rows[rows]
        return lists_at(self.columns, flat)

    def all(self) -> dict[str, np.ndarray]:
        """All rows of all columns, in memory."""
        return self.take(np.arange(len(self)))

    def subset(self, rows: np.ndarray) -> "Examples":
        """Only these rows, which are not copied."""
        rows = np.asarray(rows, np.int64)
        return Examples(self.columns, rows if self.rows is None else self.rows[rows])

    @property
    def example_bytes(self) -> int:
        """The bytes of one example."""
        return sum(c.dtype.itemsize * int(np.prod(c.shape)) for c in self.columns.values())


@dataclass(frozen=True, eq=False)
class ClientData:
    """Examples grouped by client: client i has the rows offsets[i] to offsets[i + 1] - 1.

    What is opened is memory-mapped: only the rows that are taken are read.

    >>> clients = mixfl.ClientData.from_arrays({"x": np.eye(3)}, client=["ann", "bob", "ann"])
    >>> clients.write("store")
    >>> len(mixfl.ClientData.open("store")), clients.sizes()
    (2, array([2, 1]))
    """

    examples: Examples
    offsets: np.ndarray  # [clients + 1]
    ids: Any  # [clients], names for messages and splits
    dropped: int = 0  # clients left out because they have no usable example

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], client) -> "ClientData":
        """Makes client data from columns and a column with each row's client (numbers or
        strings).

            clients = mixfl.ClientData.from_arrays({"x": x, "y": y}, client=user)
        """
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
        return cls(Examples(columns_of(columns)), np.concatenate([[0], np.cumsum(counts)]), ids)

    @classmethod
    def from_clients(
        cls, clients: Mapping[Any, Mapping[str, Any]] | Sequence[Mapping[str, Any]]
    ) -> "ClientData":
        """Makes client data from one dict of columns per client. Clients in a list are numbered
        from 0. Clients without examples are dropped and counted.

            clients = mixfl.ClientData.from_clients({"ann": {"x": xa, "y": ya}, "bob": ...})
        """
        if not isinstance(clients, Mapping):
            clients = dict(enumerate(clients))
        kept = {}
        for c, columns in clients.items():
            if not isinstance(columns, Mapping):
                raise MixflError(
                    f"client {c!r}: expected a dict of columns such as {{'x': ..., 'y': ...}}, got "
                    f"{type(columns).__name__}."
                )
            try:
                arrays = checked(columns, empty=True) if columns else {}
            except MixflError as error:
                raise MixflError(f"client {c!r}: {error}") from None
            if any(len(a) for a in arrays.values()):
                kept[c] = arrays
        if not kept:
            raise MixflError(f"none of the {len(clients)} clients has an example.")
        first = next(iter(kept.values()))
        ragged = {k for arrays in kept.values() for k, a in arrays.items() if isinstance(a, Ragged)}

        def shape(k: str, a: Any) -> Any:
            lists = isinstance(a, Ragged) or (k in ragged and a.ndim == 2)
            return "[...]" if lists else a.shape[1:]

        expected = {k: shape(k, a) for k, a in first.items()}
        for c, arrays in kept.items():
            shapes = {k: shape(k, a) for k, a in arrays.items()}
            if shapes != expected:
                raise MixflError(
                    f"client {c!r} has columns with the shapes {shapes}, expected {expected}. "
                    "Lists of different lengths may be given as mixfl.Ragged."
                )
        columns = {k: joined([a[k] for a in kept.values()]) for k in first}
        offsets = np.cumsum([0] + [len(next(iter(a.values()))) for a in kept.values()])
        return cls(Examples.from_arrays(columns), offsets, list(kept), len(clients) - len(kept))

    @classmethod
    def from_pandas(
        cls, frame: Any, client: str, columns: Sequence[str] | None = None
    ) -> "ClientData":
        """Makes client data from a frame with a client column.

            clients = mixfl.ClientData.from_pandas(frame, client="user")

        `columns` are those to keep; all others by default. Cells may be lists (a ragged column) or
        arrays of one shape.
        """
        from mixfl.data.sources import from_pandas

        return from_pandas(frame, client, columns)

    @classmethod
    def from_huggingface(
        cls, dataset: Any, client: str, columns: Sequence[str] | None = None
    ) -> "ClientData":
        """Makes client data from a `datasets.Dataset` with a client column.

            data = datasets.load_from_disk("reviews")
            clients = mixfl.ClientData.from_huggingface(data, client="user")

        What is memory-mapped stays on disk. Images are unpacked when they are read.
        """
        from mixfl.data.huggingface import from_huggingface

        return from_huggingface(dataset, client, columns)

    @classmethod
    def from_flower(
        cls, source: Any, split: str | None = None, columns: Sequence[str] | None = None
    ) -> "ClientData":
        """Makes client data from a partitioner of flwr-datasets that has a data set, or from a
        FederatedDataset (with `split`, if it has several): a client per partition.

            partitioner = DirichletPartitioner(10, partition_by="label", alpha=0.3)
            partitioner.dataset = dataset
            clients = mixfl.ClientData.from_flower(partitioner)
        """
        from mixfl.data.huggingface import from_flower

        return from_flower(source, split, columns)

    @classmethod
    def from_torch(
        cls, data: Any, client: Any = None, columns: Sequence[str] | None = None
    ) -> "ClientData":
        """Makes client data from a map-style PyTorch data set and its items' clients, or from a
        data set per client (a list or a dict).

            clients = mixfl.ClientData.from_torch(dataset, client=ids)             # an id per item
            clients = mixfl.ClientData.from_torch({"ann": ann, "bob": bob}, columns=("x", "y"))

        Each item is read once, so random transforms are drawn once: augment in the loss instead.
        `columns` name the fields of items that are tuples; by default `x` and `y`.
        """
        from mixfl.data.sources import from_torch

        return from_torch(data, client, columns)

    @classmethod
    def open(cls, path: str | Path) -> "ClientData":
        """Opens a store written by `write` or `mixfl data prepare`. It is memory-mapped."""
        from mixfl.data.store import open_store

        return open_store(Path(path))

    def write(self, path: str | Path) -> None:
        """As a client store in a new folder (docs/data.md)."""
        from mixfl.data.writer import StoreWriter

        with StoreWriter(path) as store:
            for i in np.flatnonzero(self.sizes()).tolist():
                store.add_whole(self.ids[i], self.examples.lists(self.rows(i)))

    def pad(self, column: str, length: int, fill: float = 0) -> "ClientData":
        """The same data, in which a ragged column is read as arrays of `length` numbers: shorter
        lists are filled up with `fill`, longer ones are cut. Costs nothing.

            clients = mixfl.ClientData.open("tweets").pad("text", 140)
        """
        ragged = self.examples.columns.get(column)
        if not isinstance(ragged, Ragged):
            names = [n for n, c in self.examples.columns.items() if isinstance(c, Ragged)]
            raise MixflError(
                f"the column '{column}' is not ragged. Ragged are: {', '.join(names) or 'none'}."
            )
        padded = ragged.padded(length, fill)
        new = {column: padded, f"{column}_length": Lengths(padded)}
        columns = {**self.examples.columns, **new}
        return replace(self, examples=replace(self.examples, columns=columns))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sizes(self) -> np.ndarray:
        """The number of examples of each client."""
        return np.diff(self.offsets)

    def rows(self, i: int) -> np.ndarray:
        """Where the examples of client `i` are in `examples`."""
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

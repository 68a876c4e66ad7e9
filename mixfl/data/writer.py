"""Writes client stores piece by piece, in bounded memory."""

import contextlib
import json
import re
import shutil
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mixfl.data.columns import Ragged, check_values, checked, joined, kind, lists_at
from mixfl.data.store import FORMAT, LISTS, read_columns
from mixfl.errors import MixflError
from mixfl.format_versions import STORE

BATCH_BYTES = 32 << 20
PENDING = 4096  # small pieces that are joined, so that they take no more room than their numbers
DECLARED = re.compile(r"(bool|u?int(?:8|16|32)|float(?:16|32))\s*(?:\[([\d\s,]*|\.\.\.)\])?")


class StoreWriter:
    """Writes a client store piece by piece, for data larger than memory.

    Clients may come in any order, and again and again: their rows are brought together at the end,
    on disk. The store appears at `path` when the block ends without an error; otherwise nothing is
    left. In memory are at most 32 MiB of rows, the clients' names, and 16 bytes for each call.

    >>> with mixfl.StoreWriter("my-store", {"x": "float32 [28, 28]", "y": "int32"}) as store:
    ...     for user in ("ann", "bob", "ann"):
    ...         store.add(user, {"x": np.zeros((2, 28, 28)), "y": np.array([0, 1])})
    >>> len(mixfl.ClientData.open("my-store"))
    2

    `columns` is optional. Without it, the first piece decides. `int32 [...]` declares a ragged
    column: its rows are lists of different lengths.
    """

    def __init__(self, path: str | Path, columns: Mapping[str, str] | None = None):
        path = Path(path)
        if path.exists():
            raise MixflError(f"{path} already exists: choose another path, or remove it.")
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self.file: Any = None
        self.kinds = {name: _declared(name, text) for name, text in (columns or {}).items()}
        self.declared = bool(self.kinds)
        self.padding: dict[str, tuple[int, float]] = {}  # of ragged columns: length, fill
        self.pending: list[dict[str, Any]] = []
        self.joined: list[dict[str, Any]] = []
        self.pending_bytes = self.rows = 0
        self.ids: list[str] = []
        self.known: dict[str, int] = {}  # positions in ids
        self.owners, self.ends = array("q"), array("q")  # of each run of rows: client, end

    def __enter__(self) -> "StoreWriter":
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return self

    def add(self, client: object, columns: Mapping[str, Any]) -> None:
        """Adds rows of a client, which may have rows already."""
        name = str(client)
        rows = self._fitted(client, columns)
        self._append(self.known.setdefault(name, len(self.ids)), name, rows)

    def add_whole(self, client: object, columns: Mapping[str, Any]) -> None:
        """Adds a client with all its rows, even if another one has the same name."""
        self._append(len(self.ids), str(client), self._fitted(client, columns))

    def _fitted(self, client: object, columns: Mapping[str, Any]) -> dict[str, Any]:
        arrays = checked(columns)
        if not self.kinds:
            self.kinds = {name: kind(a) for name, a in arrays.items()}
        if arrays.keys() != self.kinds.keys():
            raise self._other(client, arrays)
        for name, a in arrays.items():
            if kind(a) != self.kinds[name]:
                a = _converted(name, a, self.kinds[name]) if self.declared else None
                if a is None:
                    raise self._other(client, arrays)
                arrays[name] = a
            if isinstance(a, Ragged):
                length, fill = self.padding.get(name, (1, a.fill))
                self.padding[name] = max(length, a.length), fill
        return arrays

    def _append(self, position: int, name: str, arrays: dict[str, Any]) -> None:
        if position == len(self.ids):
            self.ids.append(name)
        self.rows += len(next(iter(arrays.values())))
        if self.owners and self.owners[-1] == position:
            self.ends[-1] = self.rows
        else:
            self.owners.append(position)
            self.ends.append(self.rows)
        self.pending.append(arrays)
        self.pending_bytes += sum(a.nbytes for a in arrays.values())
        if self.pending_bytes >= BATCH_BYTES:
            self._flush()
        elif len(self.pending) >= PENDING:
            self.joined.append(self._join(self.pending))
            self.pending = []

    def _join(self, pieces: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: joined([p[name] for p in pieces]) for name in self.kinds}

    def _flush(self) -> None:
        if pieces := self.joined + self.pending:
            self._write(self._join(pieces))
        self.pending, self.joined, self.pending_bytes = [], [], 0

    def _write(self, arrays: dict[str, Any], file: str = "data.arrow") -> None:
        try:
            if self.file is None:
                self.file = pa.ipc.new_file(str(self.partial / file), _schema(arrays))
            columns = [_stored(a) for a in arrays.values()]
            self.file.write_batch(pa.record_batch(columns, schema=_schema(arrays)))
        except OSError as error:
            raise self._failed(error) from None

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self._complete()
        except OSError as error:
            raise self._failed(error) from None
        finally:
            with contextlib.suppress(OSError):
                self._close()
            shutil.rmtree(self.partial, ignore_errors=True)  # gone already if it was renamed

    def _close(self) -> None:
        file, self.file = self.file, None
        if file is not None:
            file.close()

    def _complete(self) -> None:
        if not self.ids:
            raise MixflError("no client has data: nothing was written.")
        self._flush()
        self._close()
        owners, ends = np.frombuffer(self.owners, np.int64), np.frombuffer(self.ends, np.int64)
        sizes = np.zeros(len(self.ids), np.int64)
        np.add.at(sizes, owners, np.diff(ends, prepend=0))
        if len(owners) > len(self.ids):
            self._group(owners, ends)
        table = pa.table({"id": self.ids, "end": pa.array(np.cumsum(sizes), pa.int64())})
        table = table.replace_schema_metadata({LISTS: json.dumps(self.padding)})
        with pa.ipc.new_file(str(self.partial / "clients.arrow"), table.schema) as clients:
            clients.write_table(table)
        self.partial.rename(self.path)

    def _group(self, owners: np.ndarray, ends: np.ndarray) -> None:
        """Copies the rows into another file, in which those of a client are together."""
        path = self.partial / "data.arrow"
        columns = read_columns(path, self.padding)
        step = max(1, BATCH_BYTES * self.rows // path.stat().st_size)
        for rows in _in_order_of(owners, ends, step):
            self._write(lists_at(columns, rows), "grouped.arrow")
        self._close()
        (self.partial / "grouped.arrow").replace(path)

    def _other(self, client: object, arrays: dict[str, Any]) -> MixflError:
        found = {name: kind(a) for name, a in arrays.items()}
        if self.declared:
            return MixflError(
                f"client {client!r} has the columns {found}, but declared are {self.kinds}."
            )
        return MixflError(
            f"client {client!r} has the columns {found}, but earlier clients have {self.kinds}. "
            "Declare columns where pieces differ by chance: "
            "StoreWriter(path, columns={'x': 'float32 [3]', 'tokens': 'int32 [...]'})."
        )

    def _failed(self, error: OSError) -> MixflError:
        return MixflError(f"the client store {self.path} could not be written: {error}.")


def _declared(name: str, text: str) -> str:
    match = DECLARED.fullmatch(str(text).strip())
    if not match:
        raise MixflError(
            f"the column '{name}' is declared as {text!r}: expected a type of at most 32 bits and "
            "a shape, such as 'int32', 'uint8 [28, 28]' or, for lists of different lengths, "
            "'int32 [...]'."
        )
    dtype, shape = match.groups()
    if shape == "...":
        return f"{dtype} [...]"
    sizes = [int(n) for n in re.findall(r"\d+", shape or "")]
    return f"{dtype} {sizes}" if sizes else dtype


def _converted(name: str, a: Any, wanted: str) -> Any:
    """The array as declared; None if it has another shape, or numbers that would change."""
    dtype = np.dtype(wanted.partition(" ")[0])
    if wanted.endswith("[...]") and not isinstance(a, Ragged):
        a = Ragged.from_lists(a) if a.ndim == 2 else a
    values = a.parts[0] if isinstance(a, Ragged) else a
    with np.errstate(over="ignore", invalid="ignore"):
        new = values.astype(dtype)
    if dtype.kind in "biu" and (new != values).any():
        return None
    check_values(name, new)
    if isinstance(a, Ragged):
        new = Ragged([new], a.ends, length=a.length, fill=a.fill)
    return new if kind(new) == wanted else None


def _in_order_of(owners: np.ndarray, ends: np.ndarray, step: int) -> Iterator[np.ndarray]:
    """The rows of all runs, ordered by owner, `step` rows at a time."""
    sizes = np.diff(ends, prepend=0)
    order = np.argsort(owners, kind="stable")
    begins, passed = (ends - sizes)[order], np.concatenate([[0], np.cumsum(sizes[order])])
    for start in range(0, int(passed[-1]), step):
        places = np.arange(start, min(start + step, int(passed[-1])))
        run = np.searchsorted(passed, places, side="right") - 1
        yield begins[run] + places - passed[run]


def _plain(a: np.ndarray) -> np.ndarray:
    """Booleans as bytes: Arrow would pack them into bits, which can't be read in place."""
    return a.view(np.uint8) if a.dtype == bool else a


def _stored(a: Any) -> pa.Array:
    if isinstance(a, Ragged):
        return pa.LargeListArray.from_arrays(pa.array(a.ends[0]), pa.array(_plain(a.parts[0])))
    flat = pa.array(_plain(np.ascontiguousarray(a)).reshape(-1))
    width = int(np.prod(a.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(flat, width) if a.ndim > 1 else flat


def _schema(arrays: Mapping[str, Any]) -> pa.Schema:
    fields = []
    for name, a in arrays.items():
        lists = isinstance(a, Ragged)
        leaf = pa.from_numpy_dtype(np.uint8 if a.dtype == bool else a.dtype)
        shape = a.shape[1:]
        if lists:
            stored = pa.large_list(leaf)
        else:
            stored = pa.list_(leaf, int(np.prod(shape))) if shape else leaf
        meta = {"shape": json.dumps("..." if lists else shape), "dtype": str(a.dtype)}
        fields.append(pa.field(name, stored, metadata=meta))
    return pa.schema(fields, metadata={FORMAT: str(STORE)})

"""The client store: a folder that is memory-mapped, so that opening it costs nothing.

    data.arrow      Arrow IPC file, a column per field, rows grouped by client
    clients.arrow   Arrow IPC file, `id` and `end` (the row after the client's last)

A writer fills a folder beside the target and renames it when all is there, so that an
interrupted preparation leaves no store that looks complete.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa

from mixfl.data.examples import ClientData, Column, Examples, checked
from mixfl.errors import MixflError

BATCH_BYTES = 32 << 20


class StoreWriter:
    """Writes clients one after the other; memory stays at one batch of rows."""

    def __init__(self, path: Path):
        if path.exists():
            raise MixflError(f"{path} exists already: choose another place or remove it.")
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self.data = self.clients = self.schema = None
        self.pending: list[dict[str, np.ndarray]] = []
        self.pending_bytes = 0
        self.ids: list[str] = []
        self.ends: list[int] = []

    def __enter__(self):
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return self

    def add(self, client: object, arrays: dict[str, np.ndarray]) -> None:
        arrays = checked(arrays)
        arrays = {k: a.view(np.uint8) if a.dtype == bool else a for k, a in arrays.items()}
        if self.data is None:
            self.schema = _schema(arrays)
            self.data = pa.ipc.new_file(str(self.partial / "data.arrow"), self.schema)
        n = len(next(iter(arrays.values())))
        self.ids.append(str(client))
        self.ends.append((self.ends[-1] if self.ends else 0) + n)
        self.pending.append(arrays)
        self.pending_bytes += sum(a.nbytes for a in arrays.values())
        if self.pending_bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self):
        if not self.pending:
            return
        columns = []
        for f in self.schema:
            parts = [a[f.name] for a in self.pending]
            shape = tuple(json.loads(f.metadata[b"shape"]))
            if any(p.shape[1:] != shape or pa.from_numpy_dtype(p.dtype) != _leaf(f) for p in parts):
                got = sorted({f"{p.dtype}{list(p.shape[1:])}" for p in parts})
                raise MixflError(f"column '{f.name}' changes its shape or dtype: {got}.")
            flat = pa.array(np.ascontiguousarray(np.concatenate(parts)).reshape(-1))
            width = int(np.prod(shape))
            columns.append(pa.FixedSizeListArray.from_arrays(flat, width) if shape else flat)
        self.data.write_batch(pa.record_batch(columns, schema=self.schema))
        self.pending, self.pending_bytes = [], 0

    def __exit__(self, kind, *_):
        if kind is None and not self.ids:
            kind = MixflError
        if kind is None:
            self._flush()
        if self.data is not None:
            self.data.close()
        if kind is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            if kind is MixflError and not self.ids:
                raise MixflError("no client has data: nothing was written.")
            return
        table = pa.table({"id": self.ids, "end": pa.array(self.ends, pa.int64())})
        with pa.ipc.new_file(str(self.partial / "clients.arrow"), table.schema) as clients:
            clients.write_table(table)
        self.partial.rename(self.path)


def _schema(arrays: dict[str, np.ndarray]) -> pa.Schema:
    fields = []
    for name, a in arrays.items():
        leaf = pa.from_numpy_dtype(a.dtype)
        shape = a.shape[1:]
        kind = pa.list_(leaf, int(np.prod(shape))) if shape else leaf
        fields.append(pa.field(name, kind, metadata={"shape": json.dumps(shape)}))
    return pa.schema(fields)


def _leaf(f: pa.Field) -> pa.DataType:
    return f.type.value_type if pa.types.is_fixed_size_list(f.type) else f.type


def open_store(path: Path) -> ClientData:
    if not (path / "clients.arrow").exists():
        raise MixflError(f"{path} is not a client store (no clients.arrow in it).")
    try:
        data = pa.ipc.open_file(pa.memory_map(str(path / "data.arrow")))
        parts = [data.get_batch(i) for i in range(data.num_record_batches)]
        clients = pa.ipc.open_file(pa.memory_map(str(path / "clients.arrow"))).read_all()
        columns = {f.name: Column([_view(p.column(f.name), f) for p in parts]) for f in data.schema}
    except (pa.ArrowInvalid, OSError, KeyError, IndexError) as error:
        raise MixflError(f"the client store {path} is damaged: {error}. Prepare it again.") from None
    ends = clients["end"].to_numpy()
    offsets = np.concatenate([[0], ends])
    if len(next(iter(columns.values()))) != offsets[-1] or (np.diff(offsets) < 0).any():
        raise MixflError(f"the client store {path} is damaged: rows and clients disagree.")
    return ClientData(Examples(columns), offsets, Ids(clients["id"]))


def _view(array: pa.Array, f: pa.Field) -> np.ndarray:
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    shape = tuple(json.loads(f.metadata[b"shape"]))
    return flat.to_numpy(zero_copy_only=True).reshape(-1, *shape)


class Ids:
    """Client names, left in the memory map until one is asked for."""

    def __init__(self, names: pa.ChunkedArray):
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i) -> str:
        return self.names[int(i)].as_py()

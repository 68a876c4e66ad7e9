"""The client store: a memory-mapped folder, so opening it is cheap.

    data.arrow      Arrow IPC file, a column per field, rows grouped by client; the schema's
                    metadata has the store's format
    clients.arrow   Arrow IPC file, `id` and `end` (the row after the client's last)

A writer fills a folder beside the target and renames it when it is complete, so that an
interrupted preparation leaves no store that looks complete.
"""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa

from mixfl.data.examples import ClientData, Column, Examples, checked
from mixfl.errors import MixflError
from mixfl.format_versions import STORE, check_format

BATCH_BYTES = 32 << 20
FORMAT = "mixfl_format"  # in the metadata of the schema


class StoreWriter:
    """Writes clients one after another. It holds at most one batch of rows in memory."""

    def __init__(self, path: Path):
        if path.exists():
            raise MixflError(f"{path} already exists: choose another path, or remove it.")
        self.path, self.partial = path, path.with_name(path.name + ".partial")
        self.data = self.schema = None
        self.kinds: dict[str, str] = {}
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
        kinds = {name: f"{a.dtype}{list(a.shape[1:])}" for name, a in arrays.items()}
        if self.data is None:
            self.kinds, self.schema = kinds, _schema(arrays)
            self.data = pa.ipc.new_file(str(self.partial / "data.arrow"), self.schema)
        if kinds != self.kinds:
            raise MixflError(
                f"client {client!r} has the columns {kinds}, but earlier clients have {self.kinds}."
            )
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
            joined = np.concatenate([a[f.name] for a in self.pending])
            flat = pa.array(_stored(joined).reshape(-1))
            width = int(np.prod(joined.shape[1:]))
            columns.append(
                pa.FixedSizeListArray.from_arrays(flat, width) if joined.ndim > 1 else flat
            )
        try:
            self.data.write_batch(pa.record_batch(columns, schema=self.schema))
        except OSError as error:
            raise self._failed(error) from None
        self.pending, self.pending_bytes = [], 0

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self._complete()
        except OSError as error:
            raise self._failed(error) from None
        finally:
            if self.data is not None:
                with contextlib.suppress(OSError):
                    self.data.close()
            shutil.rmtree(self.partial, ignore_errors=True)  # gone already if it was renamed

    def _complete(self):
        if not self.ids:
            raise MixflError("no client has data: nothing was written.")
        self._flush()
        self.data.close()
        table = pa.table({"id": self.ids, "end": pa.array(self.ends, pa.int64())})
        with pa.ipc.new_file(str(self.partial / "clients.arrow"), table.schema) as clients:
            clients.write_table(table)
        self.partial.rename(self.path)

    def _failed(self, error: OSError) -> MixflError:
        return MixflError(f"the client store {self.path} could not be written: {error}.")


def _stored(a: np.ndarray) -> np.ndarray:
    """Booleans as bytes: Arrow would pack them into bits, which can't be read in place."""
    return a.view(np.uint8) if a.dtype == bool else a


def _schema(arrays: dict[str, np.ndarray]) -> pa.Schema:
    fields = []
    for name, a in arrays.items():
        leaf = pa.from_numpy_dtype(_stored(a).dtype)
        shape = a.shape[1:]
        kind = pa.list_(leaf, int(np.prod(shape))) if shape else leaf
        meta = {"shape": json.dumps(shape), "dtype": str(a.dtype)}
        fields.append(pa.field(name, kind, metadata=meta))
    return pa.schema(fields, metadata={FORMAT: str(STORE)})


def open_store(path: Path) -> ClientData:
    if not (path / "clients.arrow").exists():
        raise MixflError(f"{path} is not a client store (no clients.arrow in it).")
    try:
        data = pa.ipc.open_file(pa.memory_map(str(path / "data.arrow")))
        check_format(path, _format(data.schema), STORE, "prepare the data again")
        parts = [data.get_batch(i) for i in range(data.num_record_batches)]
        clients = pa.ipc.open_file(pa.memory_map(str(path / "clients.arrow"))).read_all()
        clients.validate(full=True)
        columns = {f.name: Column([_view(p, f) for p in parts]) for f in data.schema}
        if clients["end"].type != pa.int64() or clients["id"].type != pa.string():
            raise ValueError("clients.arrow has columns of the wrong type")
        if clients["end"].null_count or clients["id"].null_count:
            raise ValueError("clients.arrow has missing values")
        offsets = np.concatenate([[0], clients["end"].to_numpy()])
        ids = Ids(clients["id"])
        rows = {len(column) for column in columns.values()}
    except MixflError:
        raise
    except Exception as error:  # whatever a damaged file makes Arrow raise
        raise MixflError(
            f"the client store {path} is damaged: {error}. Prepare it again."
        ) from None
    if rows != {int(offsets[-1])} or (np.diff(offsets) < 0).any():
        raise MixflError(f"the client store {path} is damaged: rows and clients disagree.")
    return ClientData(Examples(columns), offsets, ids)


def _format(schema: pa.Schema) -> int | None:
    number = (schema.metadata or {}).get(FORMAT.encode())
    return None if number is None else int(number)


def _view(batch: pa.RecordBatch, f: pa.Field) -> np.ndarray:
    """The column as a view of the memory map."""
    array = batch.column(f.name)
    array.validate()
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    shape, dtype = json.loads(f.metadata[b"shape"]), np.dtype(f.metadata[b"dtype"].decode())
    if dtype.kind not in "biuf":
        raise ValueError(f"column {f.name} claims the type {dtype}, which is not a number")
    return flat.to_numpy(zero_copy_only=True).view(dtype).reshape(batch.num_rows, *shape)


class Ids:
    """Client names, read from the memory map one at a time."""

    def __init__(self, names: pa.ChunkedArray):
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i) -> str:
        return self.names[int(i)].as_py()

"""The client store: a memory-mapped folder, so opening it is cheap.

    data.arrow      Arrow IPC file, a column per field, rows grouped by client; the schema's
                    metadata has the store's format
    clients.arrow   Arrow IPC file, `id` and `end` (the row after the client's last); the schema's
                    metadata has the length and the fill value of ragged columns

A writer fills a folder beside the target and renames it when it is complete, so that an
interrupted preparation leaves no store that looks complete.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mixfl.data.columns import Column, Ragged, columns_of
from mixfl.data.examples import ClientData, Examples
from mixfl.errors import MixflError
from mixfl.format_versions import STORE, check_format

FORMAT = "mixfl_format"  # in the metadata of data.arrow
LISTS = "mixfl_lists"  # in the metadata of clients.arrow: {column: [length, fill]}


def open_store(path: Path) -> ClientData:
    if not (path / "clients.arrow").exists():
        raise MixflError(f"{path} is not a client store (no clients.arrow in it).")
    try:
        clients = pa.ipc.open_file(pa.memory_map(str(path / "clients.arrow"))).read_all()
        clients.validate(full=True)
        padding = json.loads((clients.schema.metadata or {}).get(LISTS.encode(), b"{}"))
        columns = read_columns(path / "data.arrow", padding)
        if clients["end"].type != pa.int64() or clients["id"].type != pa.string():
            raise ValueError("clients.arrow has columns of the wrong type")
        if clients["end"].null_count or clients["id"].null_count:
            raise ValueError("clients.arrow has missing values")
        offsets = np.concatenate([[0], *map(_numbers, clients["end"].chunks)])
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


def read_columns(path: Path, padding: Mapping[str, Any]) -> dict[str, Column]:
    """The columns of data.arrow, as views of the memory map."""
    data = pa.ipc.open_file(pa.memory_map(str(path)))
    check_format(path.parent, _format(data.schema), STORE, "prepare the data again")
    parts = [data.get_batch(i) for i in range(data.num_record_batches)]
    columns = {}
    for f in data.schema:
        views = [_view(p, f) for p in parts]
        columns[f.name] = _ragged(f.name, views, padding) if _lists(f.type) else Column(views)
    return columns_of(columns)


def _lists(type: pa.DataType) -> bool:
    return pa.types.is_large_list(type)


def _ragged(name: str, views: list[tuple], padding: Mapping[str, Any]) -> Ragged:
    values, ends = [v for v, _ in views], [e for _, e in views]
    length, fill = padding[name]
    try:
        return Ragged(values, ends, length=1).padded(length, fill)
    except MixflError as error:
        raise ValueError(f"column {name}: {str(error).rstrip('.')}") from None


def _view(batch: pa.RecordBatch, f: pa.Field) -> Any:
    """The column as a view of the memory map; of lists, their values and ends."""
    array = batch.column(f.name)
    array.validate()
    shape, dtype = json.loads(f.metadata[b"shape"]), np.dtype(f.metadata[b"dtype"].decode())
    if dtype.kind not in "biuf":
        raise ValueError(f"column {f.name} claims the type {dtype}, which is not a number")
    if _lists(array.type):
        if array.null_count:
            raise ValueError(f"column {f.name} has missing values")
        return _numbers(array.values).view(dtype), _numbers(array.offsets)
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    return _numbers(flat).view(dtype).reshape(batch.num_rows, *shape)


def _numbers(array: pa.Array) -> np.ndarray:
    """A view. (Arrow's own `to_numpy` imports pandas if it is there, which takes half a second.)"""
    if array.null_count:
        raise ValueError("there are missing values")
    dtype = np.dtype(array.type.to_pandas_dtype())
    if dtype.kind not in "iuf" or array.type.bit_width != 8 * dtype.itemsize:
        raise ValueError(f"numbers are kept as {array.type}")
    if not len(array):
        return np.zeros(0, dtype)
    buffer = array.buffers()[1]
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


class Ids:
    """Client names, read from the memory map one at a time."""

    def __init__(self, names: pa.ChunkedArray):
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i) -> str:
        return self.names[int(i)].as_py()

"""Arrow tables as columns, without copying what is memory-mapped."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mixfl.data.columns import Column, Ragged, aligned, check_values, columns_of
from mixfl.data.formats.images import read_image
from mixfl.errors import MixflError, unknown


def arrow_columns(table: pa.Table, names: Sequence[str] | None, without: str = "") -> dict:
    """The named columns, or all but `without`. Reads all numbers once, to check them."""
    chosen = [n for n in table.column_names if n != without] if names is None else list(names)
    for name in chosen:
        if name not in table.column_names:
            raise unknown("column", name, table.column_names)
    if not chosen:
        raise MixflError("the data has no columns besides the client's.")
    return columns_of({name: _column(name, table[name]) for name in chosen})


def _column(name: str, data: pa.ChunkedArray) -> Column:
    chunks = [_storage(c) for c in data.chunks if len(c)]
    if any(c.null_count for c in chunks):
        raise MixflError(f"column '{name}' has missing values: remove or replace such rows.")
    if not chunks:
        raise MixflError("the data has no rows.")
    if pa.types.is_struct(chunks[0].type) and {f.name for f in chunks[0].type} == {"bytes", "path"}:
        return Images(name, chunks)
    sizes: list[int] = []
    while _is_list(chunks[0].type):
        lengths = [c.value_lengths().to_numpy(zero_copy_only=False) for c in chunks] if not (
            pa.types.is_fixed_size_list(chunks[0].type)
        ) else [np.full(len(c), c.type.list_size) for c in chunks]  # fmt: skip
        widths = {int(w) for n in lengths if len(n) for w in (n.min(), n.max())}
        inner = [_storage(c.flatten()) for c in chunks]
        if len(widths) > 1 or widths == {0}:
            if sizes or _is_list(inner[0].type):
                raise MixflError(
                    f"column '{name}' has nested lists of different lengths: expected numbers, "
                    "arrays of one shape, or lists of numbers."
                )
            return _ragged(name, inner, lengths)
        sizes.append(widths.pop())
        chunks = inner
    values = [_numbers(name, c) for c in chunks]
    parts = [v.reshape(-1, *sizes) for v in values]
    return Column(parts, _dtype(name, parts))


def _ragged(name: str, values: list[pa.Array], lengths: list[np.ndarray]) -> Ragged:
    parts = [_numbers(name, v) for v in values]
    ends = [np.concatenate([[0], np.cumsum(n, dtype=np.int64)]) for n in lengths]
    return Ragged(parts, ends, dtype=_dtype(name, parts))


def _dtype(name: str, parts: list[np.ndarray]) -> np.dtype:
    return np.result_type(*{check_values(name, part) for part in parts})


def _numbers(name: str, a: pa.Array) -> np.ndarray:
    kind = a.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise MixflError(
            f"column '{name}' has the type {kind}: expected numbers, lists of numbers or images. "
            "Turn text and categories into numbers first, or choose others with `columns`."
        )
    if a.null_count:
        raise MixflError(f"column '{name}' has missing values: remove or replace such rows.")
    return a.to_numpy(zero_copy_only=False)


def _is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def _storage(a: pa.Array) -> pa.Array:
    return a.storage if isinstance(a, pa.ExtensionArray) else a


class Images(Column):
    """Encoded images, which are unpacked when they are read: uint8, all of one size."""

    def __init__(self, name: str, chunks: list[pa.StructArray]):
        self.name, self.chunks = name, chunks
        self.starts = np.cumsum([0] + [len(c) for c in chunks])
        first = self._image(0)
        self.dtype, self.shape = first.dtype, first.shape

    def take(self, rows: np.ndarray) -> np.ndarray:
        out = aligned((len(rows), *self.shape), self.dtype)
        for i, row in enumerate(rows.tolist()):
            image = self._image(row)
            if image.shape != self.shape:
                raise MixflError(
                    f"column '{self.name}': the image in row {row} has the shape "
                    f"{list(image.shape)}, the first {list(self.shape)}: resize them before."
                )
            out[i] = image
        return out

    def _image(self, row: int) -> np.ndarray:
        part = int(np.searchsorted(self.starts, row, side="right") - 1)
        value = self.chunks[part][row - int(self.starts[part])].as_py()
        content = value["bytes"]
        if content is None and not value["path"]:
            raise MixflError(f"column '{self.name}': row {row} has no image.")
        source = Path(value["path"]) if content is None else io.BytesIO(content)
        return read_image(source, None, gray=True, called=f"column '{self.name}', row {row}")


def row_numbers(indices: Any) -> np.ndarray:
    """A table of one column, such as a data set's choice of rows, as numbers."""
    return np.asarray(indices.column(0).to_numpy(), np.int64)

"""Rows to predict for, and predictions, as files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mixfl.errors import MixflError
from mixfl.runs.files import write_whole

READS = "a client store, or a file that ends in .npz, .parquet, .csv or .jsonl"
WRITES = (".npz", ".parquet", ".csv", ".jsonl")
MOST_TEXT = 100_000  # characters of a text


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """Columns of equal length. Text becomes code points, padded with 0, as in the text task."""
    if path.is_dir():
        from mixfl.data.examples import ClientData

        return ClientData.open(path).examples.all()
    if not path.is_file():
        raise MixflError(f"there is no file {path}: give {READS}.")
    try:
        columns = _npz(path) if path.suffix == ".npz" else _table(path)
    except MixflError:
        raise
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise MixflError(f"{path} can't be read: {error}") from None
    lengths = {k: len(a) for k, a in columns.items()}
    if not columns or len({*lengths.values()}) > 1:
        raise MixflError(f"{path}: expected columns of equal length, got {lengths}.")
    return columns


def _npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {k: file[k] for k in file.files}


def _table(path: Path) -> dict[str, np.ndarray]:
    match path.suffix:
        case ".parquet":
            import pyarrow.parquet as parquet

            table = parquet.read_table(path)
        case ".csv":
            import pyarrow.csv as csv

            table = csv.read_csv(path)
        case ".jsonl":
            import pyarrow.json as jsonl

            table = jsonl.read_json(path)
        case _:
            raise MixflError(f"{path}: expected {READS}.")
    return {name: _array(path, name, table[name]) for name in table.column_names}


def _array(path: Path, name: str, column: Any) -> np.ndarray:
    if column.null_count:
        raise MixflError(f"{path}: the column {name} has {column.null_count} empty cells.")
    values = column.to_pylist()
    if values and isinstance(values[0], str):
        return _code_points(path, name, values)
    try:
        array = np.array(values)
    except ValueError:
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise MixflError(
            f"{path}: the column {name} is not numbers of one shape: pad its rows to one length."
        )
    return array


def _code_points(path: Path, name: str, values: list[str]) -> np.ndarray:
    longest = max(1, *map(len, values))
    if longest > MOST_TEXT:
        raise MixflError(f"{path}: the column {name} has a text of {longest} characters.")
    array = np.zeros((len(values), longest), np.int32)
    for row, text in zip(array, values, strict=True):
        row[: len(text)] = [ord(c) for c in text]
    return array


def check_ending(path: Path) -> None:
    if path.suffix not in WRITES:
        raise MixflError(f"--out {path}: expected an ending of {', '.join(WRITES)}.")


def write_columns(columns: dict[str, np.ndarray], path: Path) -> None:
    """By its ending. A column of arrays is a list per row; in a CSV, one column per number."""
    import io

    buffer = io.BytesIO()
    match path.suffix:
        case ".npz":
            np.savez(buffer, **columns)  # type: ignore[arg-type]
        case ".parquet":
            import pyarrow.parquet as parquet

            parquet.write_table(pa.table({k: a.tolist() for k, a in columns.items()}), buffer)
        case ".csv":
            import pyarrow.csv as csv

            csv.write_csv(pa.table(flat(columns)), buffer)
        case _:
            rows = zip(*(a.tolist() for a in columns.values()), strict=True)
            for row in rows:
                buffer.write((json.dumps(dict(zip(columns, row, strict=True))) + "\n").encode())
    write_whole(path, buffer.getvalue())


def flat(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`scores` of shape [n, 3] becomes scores_0, scores_1, scores_2."""
    parts = {}
    for name, a in columns.items():
        if a.ndim == 1:
            parts[name] = a
        else:
            parts |= {f"{name}_{i}": c for i, c in enumerate(a.reshape(len(a), -1).T)}
    return parts

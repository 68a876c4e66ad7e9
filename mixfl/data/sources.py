"""pandas frames and PyTorch data sets as client data. Neither library is imported."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mixfl.data.examples import ClientData
from mixfl.errors import MixflError, unknown


def from_pandas(frame: Any, client: str, columns: Sequence[str] | None) -> ClientData:
    names = [str(c) for c in getattr(frame, "columns", ())]
    if not hasattr(frame, "to_numpy") or not names:
        raise MixflError(f"expected a frame with columns, got {type(frame).__name__}.")
    if len(set(names)) < len(names):
        raise MixflError(f"the frame has two columns of one name: {', '.join(names)}.")
    chosen = [n for n in names if n != client] if columns is None else list(columns)
    for name in (client, *chosen):
        if name not in names:
            raise unknown("column of the frame", name, names)
    of = dict(zip(names, frame.columns, strict=True))
    return ClientData.from_arrays(
        {name: _values(name, frame[of[name]]) for name in chosen},
        _values(client, frame[of[client]]),
    )


def _values(name: str, series: Any) -> np.ndarray:
    if hasattr(series, "isna") and series.isna().any():
        raise MixflError(
            f"column '{name}' has missing values: remove such rows (dropna) or fill them (fillna)."
        )
    values = series.to_numpy()
    if values.dtype.kind == "O" and len(values) and isinstance(values[0], bool | int | float):
        return np.array(values.tolist())  # nullable types that miss nothing
    return values


def from_torch(data: Any, client: Any, columns: Sequence[str] | None) -> ClientData:
    """Of a data set with a client per item, or of a data set per client (a list or a dict)."""
    if isinstance(data, Mapping | list | tuple):
        if client is not None:
            raise MixflError("there is a data set for each client: client is for a single one.")
        given: Mapping[Any, Any] = data if isinstance(data, Mapping) else dict(enumerate(data))
        return ClientData.from_clients({c: _arrays(d, columns) for c, d in given.items()})
    if client is None:
        raise MixflError(
            "name each item's client: client=ids with an id per item, or the name of a field if "
            "items are dicts. Or give a data set for each client, as a list or a dict."
        )
    arrays = _arrays(data, None if isinstance(client, str) else columns)
    if isinstance(client, str):
        if client not in arrays:
            raise unknown("field of the items", client, arrays)
        ids = arrays.pop(client)
        chosen = arrays if columns is None else {n: arrays[n] for n in columns}
        return ClientData.from_arrays(chosen, ids)
    return ClientData.from_arrays(arrays, client=np.asarray(client))


def _arrays(data: Any, columns: Sequence[str] | None) -> dict[str, Any]:
    """Each item is read once."""
    if hasattr(data, "tensors"):  # TensorDataset
        return _named([_array(t) for t in data.tensors], columns)
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise MixflError(
            f"expected a data set with a length and items by number, got {type(data).__name__}. "
            "Write a stream to a store with mixfl.StoreWriter."
        )
    items = [data[i] for i in range(len(data))]
    if not items:
        return {}
    if isinstance(items[0], Mapping):
        names = list(items[0]) if columns is None else list(columns)
        return {str(n): _stacked([_field(item, n) for item in items]) for n in names}
    rows = [item if isinstance(item, tuple | list) else (item,) for item in items]
    if len({len(row) for row in rows}) > 1:
        raise MixflError("the items have different numbers of fields.")
    return _named([_stacked(list(field)) for field in zip(*rows, strict=True)], columns)


def _field(item: Mapping, name: str) -> Any:
    if name not in item:
        raise unknown("field of the items", name, map(str, item))
    return item[name]


def _named(fields: list, columns: Sequence[str] | None) -> dict[str, Any]:
    names = columns or {1: ("x",), 2: ("x", "y")}.get(len(fields))
    if names is None or len(names) != len(fields):
        raise MixflError(
            f"items have {len(fields)} fields: name them with columns, such as "
            "columns=('image', 'age', 'label')."
        )
    return dict(zip(names, fields, strict=True))


def _stacked(values: list) -> Any:
    if isinstance(values[0], str):
        return np.array(values)
    rows = [_array(v) for v in values]
    return np.stack(rows) if len({row.shape for row in rows}) == 1 else rows


def _array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MixflError(
            f"a {type(value).__name__} of the data set can't become an array ({error}): expected "
            "tensors, arrays, images or numbers."
        ) from None

"""Hugging Face data sets and flwr-datasets' partitions as client data.

Neither library is imported: their objects hold Arrow tables. What is memory-mapped stays so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from mixfl.data.arrow import arrow_columns, row_numbers
from mixfl.data.examples import ClientData, Examples
from mixfl.errors import MixflError, unknown


def from_huggingface(dataset: Any, client: str, columns: Sequence[str] | None) -> ClientData:
    table, rows = _table(dataset)
    if client not in table.column_names:
        raise unknown("client column", client, table.column_names)
    codes, ids = _codes(table[client])
    examples = Examples(arrow_columns(table, columns, without=client))
    owner = codes if rows is None else codes[rows]
    order = np.argsort(owner, kind="stable")
    order = order if rows is None else rows[order]
    sizes = np.bincount(owner, minlength=len(ids))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    present = np.flatnonzero(sizes)  # those of other rows are no clients here
    return ClientData(
        examples.subset(order), np.append(offsets[present], offsets[-1]), [ids[i] for i in present]
    )


def from_flower(source: Any, split: str | None, columns: Sequence[str] | None) -> ClientData:
    """Of a Partitioner with a data set, or of a FederatedDataset."""
    if not hasattr(source, "load_partition"):
        raise MixflError(
            f"expected a partitioner or a FederatedDataset of flwr-datasets (an object with "
            f"load_partition), got {type(source).__name__}."
        )
    if hasattr(source, "partitioners"):
        splits = list(source.partitioners)
        if split is None and len(splits) != 1:
            raise MixflError(f"name one of the splits {', '.join(splits)} with split.")
        split = splits[0] if split is None else split
        if split not in splits:
            raise unknown("split", split, splits)
        source.load_partition(0, split)  # gives the partitioner its data set
        source = source.partitioners[split]
    elif split is not None:
        raise MixflError("a partitioner has one data set: split is for a FederatedDataset.")
    try:
        partitions = [source.load_partition(i) for i in range(source.num_partitions)]
    except AttributeError as error:
        raise MixflError(f"the partitioner has no data set: {error}") from None
    names = getattr(source, "partition_id_to_natural_id", None) or {}
    return _joined(partitions, [names.get(i, i) for i in range(len(partitions))], columns)


def _joined(partitions: list, ids: list, columns: Sequence[str] | None) -> ClientData:
    """Partitions that choose rows of one table share it."""
    tables: dict[tuple, tuple[int, pa.Table]] = {}
    total, chosen = 0, []
    for partition in partitions:
        table, rows = _table(partition)
        key = _place(table)
        if key not in tables:
            tables[key], total = (total, table), total + len(table)
        first = tables[key][0]
        chosen.append(first + (np.arange(len(table)) if rows is None else rows))
    schemas = {table.schema.remove_metadata() for _, table in tables.values()}
    if len(schemas) > 1:
        raise MixflError("the partitions have different columns: clients need the same ones.")
    whole = pa.concat_tables([table for _, table in tables.values()])
    examples = Examples(arrow_columns(whole, columns))
    offsets = np.cumsum([0] + [len(rows) for rows in chosen])
    data = ClientData(examples.subset(np.concatenate(chosen)), offsets, ids)
    return data.usable()


def _place(table: pa.Table) -> tuple:
    """Tells tables apart by where their first column is in memory."""
    chunks = table.column(0).chunks
    return tuple((c.offset, len(c), *(b and b.address for b in c.buffers())) for c in chunks)


def _table(dataset: Any) -> tuple[pa.Table, np.ndarray | None]:
    """Its Arrow table, and the rows of it that are meant (None: all)."""
    if isinstance(dataset, Mapping):
        raise MixflError(
            f"this is a dict of splits ({', '.join(map(str, dataset))}): give one of them, such as "
            f"data[{next(iter(dataset), 'train')!r}]."
        )
    table = getattr(getattr(dataset, "data", None), "table", None)
    if not isinstance(table, pa.Table):
        raise MixflError(
            f"expected a datasets.Dataset, got {type(dataset).__name__}. Write a stream to a store "
            "with mixfl.StoreWriter."
        )
    if dataset.format["type"] == "custom":
        raise MixflError(
            "the data set has a transform that runs when rows are read (set_transform): apply it "
            "with map, and give the result."
        )
    indices = dataset._indices  # of select, shuffle, filter; there is no public way without a copy
    return table, None if indices is None else row_numbers(indices)


def _codes(names: pa.ChunkedArray) -> tuple[np.ndarray, list]:
    """The client of each row, as a number, and the clients in order."""
    if names.null_count:
        raise MixflError("the client column has missing values: every row needs a client.")
    kind = names.type
    if not (
        pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ):
        raise MixflError(f"the client column has the type {kind}: expected numbers or strings.")
    encoded = names.dictionary_encode().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], kind).dictionary_encode()
    ids = encoded.dictionary.to_pylist()
    order = sorted(range(len(ids)), key=ids.__getitem__)
    place = np.empty(len(ids), np.int64)
    place[order] = np.arange(len(ids))
    return place[encoded.indices.to_numpy()], [ids[i] for i in order]

"""Rows of Parquet files, with bounds on what a few rows may cost."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mixfl.data.formats.reading import Meter, wrong
from mixfl.data.limits import FOOTER, LISTS, ROWS
from mixfl.errors import MixflError

Choose = Callable[[Any], tuple[list[str], Mapping[str, int]]]


def parquet_rows(path: Path, meter: Meter, choose: Choose) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered rows. `choose` gets the schema, and returns the columns to read, and the texts among
    them with the most bytes that one may have. Other columns are None."""
    import pyarrow.parquet as pq

    number = 0
    limits = {
        "thrift_string_size_limit": FOOTER, "thrift_container_size_limit": LISTS,
        "pre_buffer": False,
    }  # fmt: skip
    try:
        with pq.ParquetFile(path, **limits) as file:
            names = file.schema_arrow.names
            wanted, texts = choose(file.schema_arrow)
        # A text that many rows share is in the file once, and stays so in a dictionary.
        with pq.ParquetFile(path, read_dictionary=list(texts), **limits) as file:
            total = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                if bad := _too_large(batch, texts):
                    raise wrong(path, number + 1, bad)
                for row in batch.to_pylist():
                    number += 1
                    yield number, dict.fromkeys(names) | row
                meter.at(number, total, f"reading {path.name}")
    except (MixflError, GeneratorExit):
        raise
    except Exception as error:  # a damaged file can make Arrow raise anything
        raise wrong(path, number + 1, f"the Parquet file is damaged: {error}.") from None


def _too_large(batch: Any, texts: Mapping[str, int]) -> str:
    """What is too large in these rows of a Parquet file; empty if nothing is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    size = batch.nbytes
    for title, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_dictionary(column.type) and title in texts:
            lengths = pc.binary_length(column.dictionary)
            longest = pc.max(lengths).as_py() or 0
            if longest > texts[title]:
                return (
                    f"column '{title}' has a text of {longest:,} bytes, more than {texts[title]:,}."
                )
            size += pc.sum(lengths.take(column.indices)).as_py() or 0
    if size > ROWS:
        return f"{batch.num_rows} rows have more than {ROWS:,} bytes."
    return ""

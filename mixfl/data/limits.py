"""Limits on what one file may cost its reader, because the file may be malicious.

The limits are far above what data sets have. An error says which limit was exceeded.
"""

from pathlib import Path
from typing import Any

from mixfl.errors import MixflError

LONGEST = 32 << 20  # bytes of a line, characters of a JSON value
SHORT_LINE = 1 << 16  # bytes of a line with a few fields
COMMAS = 1 << 22  # in a JSON value: each may mean a number of 32 bytes or more in memory
LISTS = 1 << 20  # lists and objects in a JSON value: up to 200 bytes each
DEPTH = 64  # of nested lists and objects; NumPy's arrays have at most as many axes
COLUMNS = 1 << 20  # of a CSV file
GROWTH = 200  # a compressed file may unpack to this many times its size, beyond LONGEST bytes
PIXELS = 1 << 26  # of an image
EXAMPLE = 4 << 20  # bytes of a value in an SQLite file
FOOTER = 16 << 20  # bytes of a text in a Parquet file's metadata
ROWS = 512 << 20  # bytes of the 1024 rows of a Parquet file that are read at a time
SMALL = 16 << 20  # bytes of a JSON file in a store or a run folder
TOML = 64 << 10  # bytes: the standard library's parser takes seconds for some files of this size


def grows_too_much(unpacked: int, packed: int) -> str:
    """What is wrong with a compressed file; empty if nothing is."""
    if unpacked <= max(LONGEST, GROWTH * packed):
        return ""
    return (
        f"the compressed file unpacks to more than {GROWTH} times its size: if you trust it, "
        "unpack it first (gunzip)"
    )


def too_much_json(text: str, start: int = 0) -> str:
    """What is too large in the JSON value that begins at `start`; empty if nothing is."""
    if len(text) - start > LONGEST:
        return f"a value has more than {LONGEST:,} characters"
    if text.count(",", start) > COMMAS:
        return f"a value has more than {COMMAS:,} commas"
    if text.count("[", start) + text.count("{", start) > LISTS:
        return f"a value has more than {LISTS:,} lists and objects"
    return ""


TOO_DEEP = f"lists and objects are nested more than {DEPTH} deep"


def too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(DEPTH):
        if not level:
            return False
        level = [
            v for inner in level for v in (inner.values() if type(inner) is dict else inner)
            if type(v) is list or type(v) is dict
        ]  # fmt: skip
    return bool(level)


def read_small(path: Path, most: int = SMALL) -> str:
    """The text of a file that must be small."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise MixflError(f"{path} is larger than {most:,} bytes: mixfl did not write this file.")
    return data.decode("utf-8")

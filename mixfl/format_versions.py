"""The formats of mixfl's files, by number (table in docs/runs.md).

A file says the number of its format; one without a number has format 1. A number goes up when an
older mixfl could not read the file. mixfl reads all formats up to its own.
"""

from pathlib import Path
from typing import Any

from mixfl.errors import MixflError

STORE = 3  # client stores: in the schema of data.arrow; 3: ragged columns
CHECKPOINT = 2  # mixfl.json of a checkpoint
RUN_FOLDER = 2  # `format` in config.toml, for all files of the run folder
UNNUMBERED = 1


def check_format(path: Path, number: Any, reads: int, otherwise: str) -> None:
    """An error if `path` has a format that this mixfl does not know; `otherwise` is what to do if
    mixfl can't be updated."""
    number = UNNUMBERED if number is None else number
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise MixflError(
            f"{path} has the format {number!r}: expected a number from 1 to {reads}. It is damaged "
            f"or was not made by mixfl: {otherwise}."
        )
    if number > reads:
        raise MixflError(
            f"{path} was made by a newer mixfl (format {number}, this one reads up to {reads}): "
            f"update mixfl, or {otherwise}."
        )

"""The run folders in and below a folder."""

import os
from collections.abc import Iterator
from pathlib import Path

DEPTH = 8  # folders below


def runs_below(folder: Path) -> list[Path]:
    """Sorted. A run folder is not looked into, nor are hidden folders and links to folders."""
    return sorted(_below(os.fspath(folder), DEPTH))


def _below(folder: str, depth: int) -> Iterator[Path]:
    if os.path.isfile(os.path.join(folder, "config.toml")):
        yield Path(folder)
        return
    if not depth:
        return
    try:
        with os.scandir(folder) as entries:
            folders = [e.path for e in entries if not e.name.startswith(".") and _is_folder(e)]
    except OSError:  # gone by now, or we may not look
        return
    for path in folders:
        yield from _below(path, depth - 1)


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False

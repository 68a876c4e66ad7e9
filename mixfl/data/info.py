"""`mixfl data info`: what a store holds."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.data.columns import Column, Ragged
from mixfl.data.limits import read_small
from mixfl.data.store import open_store
from mixfl.errors import MixflError

BARS, WIDTH = 12, 40


def info(store: Path) -> list[str]:
    """Lines that describe a store, or each store in a folder (a split, or the text task's two)."""
    store = Path(store)
    inner = sorted(p.parent for n in (1, 2) for p in store.glob("*/" * n + "clients.arrow"))
    if inner and not (store / "clients.arrow").exists():
        return [line for path in inner for line in [*info(path), ""]][:-1]
    data = open_store(store)
    sizes = data.sizes()
    if not len(sizes):
        raise MixflError(f"the client store {store} has no clients: prepare it again.")
    stored = sum(p.stat().st_size for p in store.iterdir())
    columns = data.examples.columns
    width = max(len(printed(name)) for name in columns)
    lines = [
        str(store),
        f"  clients    {len(sizes):,}",
        f"  examples   {len(data.examples):,}",
        f"  bytes      {stored:,} ({data.examples.example_bytes:,} per example)",
        "  columns",
        *(f"    {printed(name):<{width}}  {described(c)}" for name, c in columns.items()),
        f"  examples per client: min {sizes.min():,}, median {np.median(sizes):,.0f}, "
        f"mean {sizes.mean():,.1f}, max {sizes.max():,}",
        *histogram(sizes),
    ]
    return lines + names(store)


def draw(store: Path, path: Path, label: str | None = None) -> None:
    """A picture of a store's clients."""
    from mixfl.data.picture import picture

    found = _json(Path(store) / "labels.json")
    names = found if isinstance(found, list) else None
    picture(open_store(Path(store)), path, label=label, names=names, title=printed(store.name))


def described(column: Column) -> str:
    if isinstance(column, Ragged):
        return f"{column.dtype} [...], padded to {column.length}"
    return f"{column.dtype} {list(column.shape)}"


def printed(name: object) -> str:
    """The name, shortened and without characters that could control a terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in str(name)[:80])


def histogram(sizes: np.ndarray) -> list[str]:
    """Clients by their number of examples. Bins have equal width, or grow if sizes vary widely."""
    low, high = int(sizes.min()), int(sizes.max())
    if high - low < BARS:
        edges = np.arange(low, high + 2)
    elif high > 20 * max(low, 1):
        edges = np.unique(np.geomspace(max(low, 1), high + 1, BARS + 1).round().astype(int))
        edges[0] = low
    else:
        edges = np.unique(np.linspace(low, high + 1, BARS + 1).round().astype(int))
    counts = np.histogram(sizes, edges)[0]
    names = [
        f"{a:,}" if a + 1 == b else f"{a:,} to {b - 1:,}" for a, b in itertools.pairwise(edges)
    ]
    width, wide = max(map(len, names)), max(len(f"{c:,}") for c in counts)
    return [
        f"    {name:>{width}}  {count:>{wide},}  {'#' * int(np.ceil(WIDTH * count / counts.max()))}"
        for name, count in zip(names, counts.tolist(), strict=True)
    ]


def names(store: Path) -> list[str]:
    """The names of classes and the titles of movies, if the store has them."""
    lines = []
    for key, most in (("labels", 20), ("titles", 3)):
        value = _json(store / f"{key}.json")
        if not isinstance(value, dict | list):
            continue
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        shown = ", ".join(
            f"{printed(i)} = {printed(name)}" for i, name in itertools.islice(pairs, most)
        )
        lines.append(f"  {key}     {shown}{', ...' if len(value) > most else ''}")
    return lines


def _json(path: Path) -> Any:
    try:
        return json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):
        return None

"""`mixfl data prepare`: turns a data set in an official format into client stores.

Records are read into a temporary database (spill.py) and grouped by client. Then, one client at a
time, they are turned into columns, joined into composite clients, and written. Memory does not grow
with the input.
"""

import contextlib
import itertools
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mixfl.data.columns import joined
from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.options import Options, parse
from mixfl.data.formats.partition import deal
from mixfl.data.formats.reading import Meter
from mixfl.data.formats.spill import Spill
from mixfl.data.info import info
from mixfl.data.partitioning import ADVICE
from mixfl.data.split import HeldOutRows, group_sizes, held_out_clients
from mixfl.data.writer import StoreWriter
from mixfl.errors import MixflError, unknown

__all__ = ["FORMATS", "Prepared", "info", "prepare"]

FORMATS = {
    "celeba": "celeba:CelebA",
    "images": "images:Images",
    "leaf": "leaf:Leaf",
    "movielens": "movielens:MovieLens",
    "table": "table:Table",
    "text-by-user": "text:TextByUser",
    "tff-celeba": "tff:TffCelebA",
    "tff-hdf5": "hdf5:TffHdf5",
    "tff-stackoverflow": "tff:TffStackOverflow",
    "wikipedia": "wikipedia:Wikipedia",
}


class Size(NamedTuple):
    clients: int
    examples: int


@dataclass
class Prepared:
    stores: dict[Path, Size]
    skipped: Counter[str]  # reason: how often
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """What the command prints."""
        stores = [f"{p}: {s.clients:,} clients, {s.examples:,} examples" for p, s in
                  self.stores.items()]  # fmt: skip
        return stores + [f"skipped: {n:,} {why}" for why, n in self.skipped.items()] + self.notes


def prepare(
    format: str,
    source: Path,
    target: Path,
    *,
    options: Mapping[str, Any] | None = None,
    report: Callable[[int, int, str], None] | None = None,
) -> Prepared:
    """Writes a store to `target`; with a split, one store per part in that folder."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    module, kind = FORMATS[format].split(":")
    chosen: type[Format] = getattr(import_module(f"mixfl.data.formats.{module}"), kind)
    given = parse(format, chosen.options, options or {}, chosen.group)
    source, target = Path(source), Path(target)
    if not source.exists():
        raise MixflError(f"{source} does not exist: give the file or folder with the data.")
    if target.exists():
        raise MixflError(f"{target} already exists: choose another path, or remove it.")
    try:
        reader = chosen(source, given, Meter(report))
        _check(format, reader, given)
        with Spill() as spill:
            spill.fill(_records(reader, given))
            if not spill.records:
                skipped = ", ".join(f"{n:,} {why}" for why, n in reader.skipped.items())
                why = f" (skipped: {skipped})" if skipped else ""
                raise MixflError(f"{source} has no usable rows{why}.")
            spill.index()
            if given.partition and (empty := given.partition.clients - sum(spill.count("", 1))):
                reader.skipped["clients that the partition left without an example"] += empty
                reader.notes.append(f"{ADVICE}, if each client should have examples.")
            return _write(reader, given, spill, target)
    except sqlite3.Error as error:
        raise MixflError(
            f"the temporary file could not be written ({error}): set TMPDIR to a folder with "
            "more space."
        ) from None
    except OSError as error:
        raise MixflError(f"{error.filename or source}: {error.strerror or error}.") from None


def _check(format: str, reader: Format, given: Options) -> None:
    official = given.split is not None and given.split.by == "official"
    if official and not reader.parts:
        raise MixflError(
            f"format '{format}' has no official split: use client:FRACTION or example:FRACTION."
        )
    if official and given.partition:
        raise MixflError(
            "the option partition assigns rows to new clients, so the official split does not "
            "apply: split by client or by example."
        )
    if not reader.natural and given.partition is None:
        raise MixflError(
            f"{reader.source} does not say which client an example belongs to: assign examples to "
            "clients with the option partition, such as iid:100 or dirichlet:0.3:100."
        )


def _records(reader: Format, given: Options) -> Iterator[Record]:
    records: Iterator[Record] = itertools.islice(reader.records(), given.limit)
    if given.partition:
        records = deal(records, given.partition, given.seed)
    if reader.parts and (given.split is None or given.split.by != "official"):
        records = (r._replace(part="") for r in records)
    return records


def _write(reader: Format, given: Options, spill: Spill, target: Path) -> Prepared:
    """Writes the stores. Those of a split appear together: they are written next to the target and
    renamed when complete."""
    split, sources = given.split, [""]
    if split is not None and split.by == "official":
        sources = [part for part in reader.parts if sum(spill.count(part, 1))]
    partial = target.with_name(target.name + ".partial")
    names = sources if split is None or split.by == "official" else ["train", "test"]
    paths = {name: partial / name if split else target for name in names}
    shutil.rmtree(partial, ignore_errors=True)  # left by a preparation that was killed
    try:
        with contextlib.ExitStack() as stack:
            stores = {n: stack.enter_context(StoreWriter(path)) for n, path in paths.items()}
            for part in sources:
                for name, client, columns in _pieces(reader, given, spill, part):
                    try:
                        stores[name].add_whole(client, columns)
                    except MixflError as error:
                        raise MixflError(f"{reader.source}, client {client}: {error}") from None
            for name, store in stores.items():
                if not store.ids:
                    where = f" for '{name}': choose another fraction, or smaller groups"
                    raise MixflError(f"{reader.source}: no examples{where if name else ''}.")
                for file, value in reader.extra_files.items():
                    text = json.dumps(value, ensure_ascii=False)
                    (store.partial / file).write_text(text, encoding="utf-8")
        if split:
            partial.rename(target)
    finally:
        if split:
            shutil.rmtree(partial, ignore_errors=True)  # nothing is left here if it was renamed
    sizes = {target / n: Size(len(store.ids), store.rows) for n, store in stores.items()}
    return Prepared(sizes, reader.skipped, reader.notes)


def _pieces(reader: Format, given: Options, spill: Spill, part: str) -> Iterator[tuple]:
    """Yields the name of a store, a client and its columns."""
    enough, fewer = spill.count(part, reader.minimum)
    if fewer:
        reader.skipped[f"clients with fewer than {reader.minimum} records"] += fewer
    groups = _groups(reader, given, spill, part, enough)
    clients = _composite(reader, spill.clients(part, reader.minimum), groups)
    if given.split is None or given.split.by == "official":
        yield from ((part, client, columns) for _, client, columns in clients)
    elif given.split.by == "client":
        testing = held_out_clients(len(groups), given.split.fraction, given.seed)
        yield from (("test" if testing[i] else "train", c, columns) for i, c, columns in clients)
    else:
        held_out = HeldOutRows(given.split.fraction, given.seed, reader.in_time)
        for _, client, columns in clients:
            testing = held_out.choose(len(next(iter(columns.values()))))
            for name, rows in (("train", ~testing), ("test", testing)):
                if rows.any():
                    yield name, client, {c: a[rows] for c, a in columns.items()}


def _groups(reader: Format, given: Options, spill: Spill, part: str, clients: int) -> list[int]:
    """The sizes of the composite clients. Examples are counted only if they matter."""
    sites = spill.sites(part, reader.minimum)
    if given.group_examples == 1:
        return group_sizes(((site, 1) for site in sites), given.group)

    def counted() -> Iterator[tuple[str, int]]:
        records = spill.clients(part, reader.minimum)
        for i, (site, (_, payloads)) in enumerate(zip(sites, records, strict=True), 1):
            yield site, reader.count(payloads)
            reader.meter.at(i, clients, "counting examples")

    return group_sizes(counted(), given.group, given.group_examples)


def _composite(reader: Format, clients: Iterator[tuple], groups: list[int]) -> Iterator[tuple]:
    """Yields number, name and columns of each group of clients, except groups without rows."""
    for i, size in enumerate(groups):
        members = list(itertools.islice(clients, size))
        built = [reader.build(payloads) for _, payloads in members]
        columns = {c: joined([b[c] for b in built]) for c in built[0]}
        first, last = members[0][0], members[-1][0]
        if len(next(iter(columns.values()))):
            yield i, first if size == 1 else f"{first}..{last}", columns
        else:
            reader.skipped["clients without an example"] += 1
        reader.meter.at(i + 1, len(groups), "writing clients")

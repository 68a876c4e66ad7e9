"""TFF's HDF5 files: a group `examples` with a group per client, and in it a data set per column.

    EMNIST        pixels float32 [28, 28], label          fed_emnist_train.h5, fed_emnist_test.h5
    CIFAR-100     image uint8 [32, 32, 3], label, coarse_label
    Shakespeare   snippets: texts                         -> text, as in the text formats

Columns of numbers keep their names. A file whose name has `test` in it is the official test part.
An HDF5 file can refer to other files and to programs that unpack it: neither is followed.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.data.columns import joined
from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.reading import files, name, plain
from mixfl.data.formats.text import sequences, windows
from mixfl.data.limits import GROWTH, LONGEST, ROWS
from mixfl.errors import MixflError

FILTERS = (1, 2, 3, 32000)  # deflate, shuffle, checksums, LZF: all in h5py; others load programs
TEXT = "snippets"


class TffHdf5(Format):
    options = ("partition", "label", "length")
    parts = ("train", "test")

    def __init__(self, *args):
        super().__init__(*args)
        self.files: list[Path] = []
        self.open: list[Any] = []
        self.label = self.given.label or "label"
        self.last: tuple[Any, dict[str, Any]] = (None, {})
        self.text = False

    def records(self) -> Iterator[Record]:
        self.files = files(self.source, ".h5", ".hdf5")
        for number, path in enumerate(self.files):
            try:
                yield from self.of_file(number, path)
            except (MixflError, GeneratorExit):
                raise
            except Exception as error:  # a damaged file can make HDF5 raise anything
                raise wrong(path, f"it is damaged: {error}") from None

    def of_file(self, number: int, path: Path) -> Iterator[Record]:
        part = "test" if "test" in path.stem else "train"
        examples = self.examples(path)
        clients, unpacked, most = len(examples), 0, max(LONGEST, GROWTH * path.stat().st_size)
        for i, client in enumerate(examples, 1):
            columns = self.columns(path, examples, client)
            unpacked += sum(d.size * max(d.dtype.itemsize, 1) for d in columns.values())
            if unpacked > most:
                raise wrong(path, f"its examples have more than {GROWTH} times its bytes")
            rows = {len(d) for d in columns.values()}
            if len(rows) != 1:
                raise wrong(path, f"client {client[:40]!r} has columns of different lengths")
            by_label = self.given.partition and self.label in columns
            labels = columns[self.label][...] if by_label else None
            for row in range(rows.pop()):
                place = f"{number}\0{client}\0{row}".encode("utf-8", "surrogateescape")
                label = None if labels is None else str(labels[row])
                yield Record(name(client) or "all", place, label=label, part=part)
            self.meter.at(i, clients, f"reading {path.name}")

    def examples(self, path: Path) -> Any:
        try:
            import h5py
        except ImportError:
            raise MixflError(
                "HDF5 files are read with h5py, which is not installed: pip install 'mixfl[hdf5]'."
            ) from None
        with path.open("rb") as file:
            if file.read(8) != b"\x89HDF\r\n\x1a\n":
                raise wrong(path, "this is another kind of file (unpack .bz2 and .lzma first)")
        self.open.append(h5py.File(path, "r"))
        return member(path, self.open[-1], "examples", h5py.Group)

    def columns(self, path: Path, examples: Any, client: str) -> dict[str, Any]:
        """The data sets of a client, none of them read yet."""
        import h5py

        group = member(path, examples, client, h5py.Group)
        found = {}
        for column in itertools.islice(group, 100):
            data = member(path, group, column, h5py.Dataset)
            if why := unsafe(data):
                raise wrong(path, f"column {column[:40]!r} {why}")
            text = column == TEXT and data.dtype.kind in "OS" and data.ndim == 1
            if text or (data.dtype.kind in "biuf" and data.ndim):
                found[column] = data
            else:
                self.skip(column)
        if TEXT in found:
            found, self.text = {TEXT: found[TEXT]}, True
        if not found:
            raise wrong(path, f"client {client[:40]!r} has no columns of numbers or `{TEXT}`")
        return found

    def skip(self, column: str) -> None:
        note = f"the column {column[:40]!r}, which has no numbers, is left out."
        if note not in self.notes:
            self.notes.append(note)

    def arrays(self, number: str, client: str) -> dict[str, Any]:
        """All rows of a client in a file; those of the last one are kept."""
        if self.last[0] != (number, client):
            path, file = self.files[int(number)], self.open[int(number)]
            try:
                columns = self.columns(path, file["examples"], client)
                read = {c: texts(path, d) if self.text else d[...] for c, d in columns.items()}
            except MixflError:
                raise
            except Exception as error:
                raise wrong(path, f"it is damaged: {error}") from None
            self.last = (number, client), read
        return self.last[1]

    def chosen(self, payloads: list[bytes]) -> Iterator[tuple[dict[str, Any], list[int]]]:
        places = [p.decode("utf-8", "surrogateescape").split("\0") for p in payloads]
        for (number, client), rows in itertools.groupby(places, key=lambda place: place[:2]):
            yield self.arrays(number, client), [int(row) for *_, row in rows]

    def count(self, payloads: list[bytes]) -> int:
        if not self.text:
            return len(payloads)
        pairs = self.chosen(payloads)
        return sum(sequences(a[TEXT][i], self.given.length) for a, rows in pairs for i in rows)

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        if self.text:
            found = [np.zeros((0, self.given.length + 1), np.int32)]
            for arrays, rows in self.chosen(payloads):
                long = [arrays[TEXT][i] for i in rows if len(arrays[TEXT][i]) > 1]
                found += [windows(text, self.given.length) for text in long]
                if len(long) < len(rows):
                    self.skipped["texts shorter than two characters"] += len(rows) - len(long)
            return {"text": np.concatenate(found)}
        pieces = [{c: a[rows] for c, a in arrays.items()} for arrays, rows in self.chosen(payloads)]
        for piece in pieces:
            if piece.keys() != pieces[0].keys():
                raise wrong(self.source, f"clients have different columns: {sorted(piece)} and "
                            f"{sorted(pieces[0])}")  # fmt: skip
        return {c: joined([p[c] for p in pieces]) for c in pieces[0]}


def texts(path: Path, data: Any) -> list[str]:
    """One at a time: many rows may refer to the same long text."""
    found, size = [], 0
    for i in range(len(data)):
        value = data[i]
        size += len(value)
        if len(value) > LONGEST or size > ROWS:
            raise wrong(path, f"a client's texts have more than {ROWS:,} bytes")
        found.append(plain(value.decode("utf-8") if isinstance(value, bytes) else str(value)))
    return found


def member(path: Path, group: Any, key: str, kind: type) -> Any:
    """A member of a group that is in this file, and of this kind."""
    import h5py

    link = group.get(key, getlink=True)
    if link is None:
        raise wrong(path, f"it has no {key!r}")
    if not isinstance(link, h5py.HardLink):
        raise wrong(path, f"{key[:40]!r} is a link to another place")
    found = group.get(key)
    if not isinstance(found, kind):
        raise wrong(path, f"{key[:40]!r} is not a {kind.__name__.lower()}")
    return found


def unsafe(data: Any) -> str:
    """Why a data set is not read; empty if it is."""
    plan = data.id.get_create_plist()
    if data.is_virtual or plan.get_external_count():
        return "has its numbers in other files"
    if any(plan.get_filter(i)[0] not in FILTERS for i in range(plan.get_nfilters())):
        return "is packed in a way that needs other programs (expected gzip, LZF or nothing)"
    chunk = int(np.prod(data.chunks)) if data.chunks else 0
    if max(data.size, chunk) * max(data.dtype.itemsize, 1) > ROWS:
        return f"has more than {ROWS:,} bytes for one client"
    return ""


def wrong(path: Path, what: str) -> MixflError:
    return MixflError(
        f"{path}: expected one of TFF's HDF5 files, examples/CLIENT/COLUMN, but {what}."
    )

"""TFF's SQLite files: examples(split_name, client_id, serialized_example_proto).

tff-celeba makes the columns of `celeba`; tff-stackoverflow makes those of the text formats from its
tokens. Unless the official split is requested, every example is used once.

A database can contain more than data: views, triggers and virtual tables run when a table is read.
Only plain tables are read here, and nothing that the file itself defines is run.
"""

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.example_proto import Feature, parse_example
from mixfl.data.formats.reading import name, plain
from mixfl.data.formats.text import sequences, windows
from mixfl.data.limits import EXAMPLE
from mixfl.errors import MixflError

Used = TypeVar("Used")
# SQLite recognizes the entries of a schema by these texts. Virtual tables are not among them.
KNOWN = (
    b"CREATE TABLE ", b"CREATE INDEX ", b"CREATE UNIQUE INDEX ", b"CREATE VIEW ", b"CREATE TRIGGER "
)  # fmt: skip


class Tff(Format):
    """A format whose records are row numbers: the examples themselves stay in the file."""

    splits: dict[str, str] = {}  # TFF's name: ours

    def records(self) -> Iterator[Record]:
        self.check()
        any_example = False
        try:
            self.db = connect(self.source)
            if bad := not_plain(self.db):
                raise self.wrong(bad)
            for row, split, client in self.rows():
                part = self.splits.get(self.text(row, split))
                if part is None:
                    continue
                any_example, user = True, name(self.text(row, client))
                if user is None:
                    raise MixflError(f"{self.source}, row {row}: client_id is empty.")
                yield Record(user, b"%d" % row, part=part)
        except (sqlite3.Error, OverflowError) as error:
            raise self.wrong(str(error)) from None
        if not any_example:
            raise MixflError(
                f"{self.source}: no row has a split_name of {', '.join(self.splits)}: is this "
                "another data set's file?"
            )

    def rows(self) -> Iterator[tuple[int, Any, Any]]:
        """Rows in order. If pages of the file formed a cycle, rows would never end: an error."""
        scan = "FROM examples NOT INDEXED ORDER BY rowid"
        last = self.db.execute(f"SELECT rowid {scan} DESC LIMIT 1").fetchone() or (0,)
        before = None
        for row, split, client in self.db.execute(f"SELECT rowid, split_name, client_id {scan}"):
            if before is not None and row <= before:
                raise self.wrong(f"row {row} comes after row {before}: the file is damaged")
            yield row, split, client
            before = row
            self.meter.at(max(row, 0), max(last[0], 1), f"reading {self.source.name}")

    def check(self) -> None:
        """Checks the file's header and length: SQLite itself reads a missing end as zeros."""
        if not self.source.is_file():
            raise self.wrong("this is a folder")
        with self.source.open("rb") as file:
            head = file.read(100)
        if len(head) < 100 or not head.startswith(b"SQLite format 3\0"):
            raise self.wrong("this is another kind of file (unpack .lzma first)")
        page = int.from_bytes(head[16:18], "big")
        expected = (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")
        size = self.source.stat().st_size
        if head[24:28] == head[92:96] and size < expected:
            raise self.wrong(f"it is truncated: {size:,} of {expected:,} bytes")

    def wrong(self, what: str) -> MixflError:
        return MixflError(
            f"{self.source}: expected one of TFF's SQLite files, with a table examples(split_name, "
            f"client_id, serialized_example_proto), but {what}."
        )

    def text(self, row: int, value: Any) -> str:
        try:
            return plain((value if isinstance(value, bytes) else str(value).encode()).decode())
        except UnicodeDecodeError:
            raise MixflError(f"{self.source}, row {row}: a name is not UTF-8 text.") from None

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        rows = [self.read(row, self.example) for row in payloads]
        return {c: np.concatenate([r[c] for r in rows]) for c in rows[0]}

    def read(self, row: bytes, use: Callable[[dict[str, Feature]], Used]) -> Used:
        """Applies `use` to the features of a row."""
        query = "SELECT serialized_example_proto FROM examples WHERE rowid = ?"
        try:
            proto = self.db.execute(query, (int(row),)).fetchone()[0]
            if not isinstance(proto, bytes):
                raise ValueError("it is not a serialized example")
            return use(parse_example(proto))
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            what = f"no feature {error}" if isinstance(error, KeyError) else str(error)
            raise MixflError(
                f"{self.source}, row {int(row)}: the example is damaged, or from another data set "
                f"({what})."
            ) from None

    def example(self, features: dict[str, Feature]) -> dict[str, np.ndarray]:
        raise NotImplementedError


def connect(path: Path) -> sqlite3.Connection:
    """Opens the file read-only, as SQLite advises for files of unknown origin."""
    uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
    db = sqlite3.connect(uri, uri=True)
    db.text_factory = bytes
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, EXAMPLE)
    db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0"):
        db.execute(f"PRAGMA {setting}")
    db.set_authorizer(_reads_only)
    return db


def not_plain(db: sqlite3.Connection) -> str:
    """Why `examples` is not a plain table of data; empty if it is."""
    for kind, called, sql in db.execute("SELECT type, name, sql FROM sqlite_master"):
        if sql is not None and not (isinstance(sql, bytes) and sql.startswith(KNOWN)):
            return f"it contains more than tables: {str(sql)[:60]}"
        if kind == b"view" and isinstance(called, bytes) and called.lower() == b"examples":
            return "its examples is a view, which runs queries of its own"
    for _, column, _, _, _, _, hidden in db.execute("PRAGMA table_xinfo(examples)"):
        if hidden or column.lower() == b"rowid":
            return f"its column {column.decode(errors='replace')!r} is not a plain one"
    return ""


def _reads_only(action: int, what: str | None, *more: str | None) -> int:
    """Whether SQLite may perform a step of a query: no functions, recursion or views."""
    *_, view = more
    allowed = {
        sqlite3.SQLITE_SELECT: (None,),
        sqlite3.SQLITE_READ: ("examples", "sqlite_master"),
        sqlite3.SQLITE_PRAGMA: ("table_xinfo",),
    }
    good = view is None and (what and what.lower()) in allowed.get(action, ())
    return sqlite3.SQLITE_OK if good else sqlite3.SQLITE_DENY


class TffCelebA(Tff):
    splits = {"split_by_clients_train": "train", "split_by_clients_test": "test"}
    parts = ("train", "test")
    group = 3  # as in the paper

    def example(self, features):
        image, smiling = np.asarray(features["image"]), np.asarray(features["smiling"])
        whole = image.dtype == np.int64 and smiling.dtype == np.int64
        if not whole or image.shape != (84 * 84 * 3,) or smiling.shape != (1,):
            raise ValueError(f"image has {image.shape}, smiling {smiling.shape} values")
        if image.min() < 0 or image.max() > 255:
            raise ValueError("image has values outside 0 to 255")
        pixels = image.astype(np.uint8).reshape(1, 84, 84, 3)
        return {"image": pixels, "smiling": (smiling != 0).astype(np.uint8)}


class TffStackOverflow(Tff):
    options = ("length",)
    splits = {"train": "train", "heldout": "heldout", "test": "test"}
    parts = ("train", "heldout", "test")

    def count(self, payloads):
        texts = (self.read(row, tokens) for row in payloads)
        return sum(sequences(text, self.given.length) for text in texts)

    def example(self, features):
        text = tokens(features)
        if len(text) < 2:
            self.skipped["texts shorter than two characters"] += 1
            return {"text": np.zeros((0, self.given.length + 1), np.int32)}
        return {"text": windows(text, self.given.length)}


def tokens(features: dict[str, Feature]) -> str:
    texts = features["tokens"]
    if not isinstance(texts, list) or len(texts) != 1:
        raise ValueError("tokens is not one text")
    return plain(texts[0].decode("utf-8"))

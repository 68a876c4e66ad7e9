"""TFF's SQLite files: examples(split_name, client_id, serialized_example_proto).

tff-celeba gives the columns of `celeba`, tff-stackoverflow (its tokens) those of the text
formats. Unless the official split is asked for, all examples are taken, each once.
"""

import sqlite3
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.example_proto import Feature, parse_example
from mixfl.data.formats.reading import plain
from mixfl.data.formats.text import sequences, windows
from mixfl.errors import MixflError

Used = TypeVar("Used")


class Tff(Format):
    """A record is the number of a row: the examples themselves stay where they are."""

    splits: dict[str, str] = {}  # TFF's name: ours

    def records(self) -> Iterator[Record]:
        self.check()
        try:
            uri = f"file:{quote(str(self.source.resolve()))}?mode=ro&immutable=1"
            self.db = sqlite3.connect(uri, uri=True)
            self.db.text_factory = bytes
            marks = ", ".join("?" * len(self.splits))
            where = f"FROM examples WHERE split_name IN ({marks})"
            total = self.db.execute(f"SELECT count(*) {where}", [*self.splits]).fetchone()[0]
            rows = self.db.execute(
                f"SELECT rowid, split_name, client_id {where} ORDER BY rowid", [*self.splits]
            )
            for done, (row, split, client) in enumerate(rows, 1):
                name = self.text(row, client)
                if not name:
                    raise MixflError(f"{self.source}, row {row}: client_id is empty.")
                yield Record(name, b"%d" % row, part=self.splits[self.text(row, split)])
                self.meter.at(done, total, f"reading {self.source.name}")
        except (sqlite3.Error, OverflowError) as error:
            raise self.wrong(str(error)) from None
        if not total:
            raise MixflError(
                f"{self.source}: no row has one of the split_name {', '.join(self.splits)}: is "
                "this the file of another data set?"
            )

    def check(self) -> None:
        """SQLite itself reads what is cut off as zeros."""
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
            raise self.wrong(f"it is cut off: {size:,} of {expected:,} bytes")

    def wrong(self, what: str) -> MixflError:
        return MixflError(
            f"{self.source}: expected an SQLite file of TFF with a table examples(split_name, "
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
        """What `use` makes of the features in a row."""
        query = "SELECT serialized_example_proto FROM examples WHERE rowid = ?"
        try:
            proto = self.db.execute(query, (int(row),)).fetchone()[0]
            if not isinstance(proto, bytes):
                raise ValueError("it is not a serialized example")
            return use(parse_example(proto))
        except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
            what = f"no feature {error}" if isinstance(error, KeyError) else str(error)
            raise MixflError(
                f"{self.source}, row {int(row)}: the example is damaged or of another data set "
                f"({what})."
            ) from None

    def example(self, features: dict[str, Feature]) -> dict[str, np.ndarray]:
        raise NotImplementedError


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
            raise ValueError("image has values beyond 0 to 255")
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
    found = features["tokens"]
    if not isinstance(found, list) or len(found) != 1:
        raise ValueError("tokens is not one text")
    return plain(found[0].decode("utf-8"))

"""LEAF: JSON files with `users`, `num_samples` and `user_data` {user: {"x": [...], "y": [...]}}.

    x, y   numbers: int32 or float32, with their own shape
    text   if x is text and y the character after it (Shakespeare): code points, as in other formats
    text, label
           if x is [id, date, query, user, text] (Sent140): code points, ragged, and y

A file is read one user at a time.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.data.columns import Ragged
from mixfl.data.formats.base import Record
from mixfl.data.formats.json_stream import JsonStream
from mixfl.data.formats.reading import files, name, plain, whole
from mixfl.data.formats.table import Table
from mixfl.data.formats.text import sequences, windows
from mixfl.errors import MixflError


class Leaf(Table):
    options = ("partition", "length")
    lengths_vary = False

    def __init__(self, *args):
        super().__init__(*args)
        self.label, self.text, self.tweets = "y", False, False

    def records(self) -> Iterator[Record]:
        for path in files(self.source, ".json"):
            stream = JsonStream(path, self.meter)
            users: Any = None
            keys: list[str] = []
            seen = 0
            for key in stream.members():
                keys = [*keys, key[:40]][:8]
                if key != "user_data":
                    value = stream.value()
                    users = value if key == "users" else users
                    continue
                for user in stream.members():
                    at, seen = stream.line(), seen + 1
                    yield from self.examples(path, at, user, stream.value())
            if not isinstance(users, list) or not seen:
                raise MixflError(
                    f"{path}: expected an object with users, num_samples and user_data (and "
                    f"users in it), found {', '.join(keys) or 'nothing'}."
                )
            if len(users) != seen:
                raise MixflError(
                    f"{path}: users has {len(users)} names, but user_data has {seen}: the file is "
                    "damaged, or was merged incorrectly."
                )

    def examples(self, path: Path, at: int, user: str, data: Any) -> Iterator[Record]:
        place = f"{path}, line {at}, user {user[:40]!r}"
        x, y = (data.get("x"), data.get("y")) if isinstance(data, dict) else (None, None)
        client = name(user)
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not client:
            raise MixflError(f'{place}: expected {{"x": [...], "y": [...]}} of equal length.')
        for i, (a, b) in enumerate(zip(x, y, strict=True)):
            if isinstance(a, str):
                yield self.text_record(f"{place}, example {i + 1}", client, a, b)
                continue
            if isinstance(a, list) and len(a) >= 5 and all(isinstance(v, str) for v in a):
                yield self.tweet(f"{place}, example {i + 1}", client, a[4], b)
                continue
            row = {"x": a, "y": b, "client": client}
            if (
                self.text
                or self.tweets
                or not all(isinstance(v, int | float | list) for v in (a, b))
            ):
                raise MixflError(f"{place}, example {i + 1}: expected numbers in x and y.")
            if not self.shapes:
                self.choose(path, at, row)
            if len(self.shapes) < 2:
                raise MixflError(f"{place}, example {i + 1}: expected numbers in x and y.")
            yield self.record(path, at, row)

    def text_record(self, place: str, client: str, x: str, y: Any) -> Record:
        sequence = plain(x + y) if isinstance(y, str) else ""
        if self.shapes or self.tweets or not isinstance(y, str) or len(y) != 1 or len(sequence) < 2:
            raise MixflError(
                f"{place}: x is {x[:40]!r}, y is {json.dumps(y)[:40]}. If x is text, y must be the "
                "character after it. For images by name, use the format celeba or images."
            )
        self.text = True
        return Record(client, sequence.encode(), label=y)

    def tweet(self, place: str, client: str, text: str, y: Any) -> Record:
        label = whole(str(y), -(2**31))
        if self.shapes or self.text or label is None:
            raise MixflError(
                f"{place}: y is {json.dumps(y)[:40]}. If x is [id, date, query, user, text], as in "
                "Sent140, y must be a whole number in all examples."
            )
        self.tweets = True
        return Record(client, f"{label}\0{plain(text)}".encode(), label=str(label))

    def count(self, payloads: list[bytes]) -> int:
        if not self.text:
            return super().count(payloads)
        return sum(sequences(p.decode(), self.given.length) for p in payloads)

    def build(self, payloads: list[bytes]) -> dict[str, Any]:
        if self.tweets:
            pairs = [p.decode().split("\0") for p in payloads]
            points = (np.frombuffer(text.encode("utf-32-le"), "<i4") for _, text in pairs)
            labels = np.array([int(label) for label, _ in pairs], np.int32)
            return {"text": Ragged.from_lists(points), "label": labels}
        if not self.text:
            return super().build(payloads)
        rows = [windows(p.decode(), self.given.length) for p in payloads]
        return {"text": np.concatenate(rows)}

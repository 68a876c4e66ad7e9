"""Text by user, and what all text formats share.

    text   int32 [length + 1]   Unicode code points, zeros at the end

A text is cut into sequences of `length` characters plus the next one. The last character of a
sequence is the first of the next, so each character is predicted once. The vocabulary is chosen
when a model is trained.
"""

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.parquet import parquet_rows
from mixfl.data.formats.reading import files, json_lines, name, plain, wrong
from mixfl.data.limits import LONGEST, SHORT_LINE

USER = ("user", "user_id", "client", "client_id", "author")


class Text(Format):
    """A format whose records are texts in UTF-8."""

    options: tuple[str, ...] = ("length", "normalize")

    def count(self, payloads: list[bytes]) -> int:
        return sum(sequences(p.decode("utf-8"), self.given.length) for p in payloads)

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        rows = [windows(p.decode("utf-8"), self.given.length) for p in payloads]
        return {"text": np.concatenate(rows)}

    def pieces(self, client: str, text: str, site: str = "") -> Iterator[Record]:
        """The text as a record, unless it is too short to predict anything."""
        text = plain(text)
        if self.given.normalize:
            text = normalized(text)
        if len(text) < 2:
            self.skipped["texts shorter than two characters"] += 1
        else:
            yield Record(plain(client), text.encode("utf-8"), site=site)


class TextByUser(Text):
    """JSON lines: {"user": id, "texts": [text, ...]} (or "text"), and optionally "site". Parquet:
    columns with a user and a text."""

    options = ("length", "normalize", "client", "text")

    def records(self) -> Iterator[Record]:
        keys = (self.given.client,) if self.given.client else USER
        field = self.given.text or "text"
        for path in files(self.source):
            for number, row in self.rows(path, (*keys, "site"), field):
                key = next((k for k in keys if k in row), None)
                user = name(row[key]) if key else None
                texts = [row[field]] if field in row else row.get("texts")
                good = isinstance(texts, list) and all(isinstance(t, str) for t in texts)
                if user is None or not good:
                    raise wrong(
                        path, number, f"has the fields {', '.join(map(repr, list(row)[:8]))}: "
                        f"expected one of {', '.join(keys)} with an id, and 'texts' with a list "
                        f"of texts or '{field}' with one. Name other fields with the options "
                        "client and text."
                    )  # fmt: skip
                site = name(row.get("site"))
                client = f"{site}/{user}" if site else user
                for text in texts or []:
                    yield from self.pieces(client, text, site or "")

    def rows(self, path: Path, names: tuple, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
        if path.suffix != ".parquet":
            return json_lines(path, self.meter)

        def choose(schema: Any) -> tuple[list[str], dict[str, int]]:
            plain = {f.name: str(f.type) for f in schema if f.type.num_fields == 0}
            wanted = [c for c in plain if c in (*names, text)]
            texts = [c for c in wanted if "string" in plain[c]]
            return wanted, {c: LONGEST if c == text else SHORT_LINE for c in texts}

        rows = parquet_rows(path, self.meter, choose)
        return ((n, {c: v for c, v in row.items() if v is not None}) for n, row in rows)


def sequences(text: str, length: int) -> int:
    """How many sequences `windows` makes: each character except the first is predicted once."""
    return -(-max(len(text) - 1, 0) // length)


def windows(text: str, length: int) -> np.ndarray:
    """[sequences, length + 1]"""
    points = np.frombuffer(text.encode("utf-32-le"), "<i4")
    n = sequences(text, length)
    padded = np.zeros(n * length + 1, np.int32)
    padded[: len(points)] = points
    return np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length].copy()


def normalized(text: str) -> str:
    """Text in the form that TFF describes for its Stack Overflow data: lower case, ASCII only,
    tokens separated by spaces (apostrophes and hyphens stay in their word), addresses replaced by
    one token."""
    text = re.sub("&#[0-9]{20,};?", "\ufffd", text)  # Python refuses to read very long numbers
    text = html.unescape(text).lower()
    text = re.sub(r"(?:https?://|www\.)\S+", " \0 ", text)
    text = text.encode("ascii", "ignore").decode()
    text = re.sub(r"([^\w\s'\0-]|_)", r" \1 ", text)
    return " ".join(text.split()).replace("\0", "<url>")

"""Reads a large JSON object member by member, with only one value in memory."""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mixfl.data.formats.reading import Meter, wrong
from mixfl.data.limits import DEPTH, TOO_DEEP, grows_too_much, too_deep, too_much_json
from mixfl.errors import MixflError

CHUNK, LARGEST_CHUNK = 1 << 16, 1 << 23
SPACE = re.compile(r"[ \t\r\n]*")


class JsonStream:
    """Iterate with `for key in stream.members()`. For each key, call `value()` or `members()`."""

    def __init__(self, path: Path, meter: Meter):
        self.path, self.meter, self.total = path, meter, max(path.stat().st_size, 1)
        self.raw = path.open("rb")
        self.file: Any = gzip.GzipFile(fileobj=self.raw) if path.suffix == ".gz" else self.raw
        self.decode = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.passed, self.ended = "", 0, 0, False
        self.depth = self.size = 0

    def line(self) -> int:
        return self.passed + self.text.count("\n", 0, self.at) + 1

    def members(self) -> Iterator[str]:
        """The keys of the object that begins here."""
        self.expect("{")
        self.depth += 1
        if self.peek() == "}":
            self.at += 1
        else:
            while True:
                key = self.value()
                if not isinstance(key, str):
                    raise self.error(f"expected a name in quotes, found {str(key)[:40]!r}")
                self.expect(":")
                yield key
                if self.expect(",}") == "}":
                    break
        self.depth -= 1
        if not self.depth:
            if self.peek():
                raise self.error("there is more after the end of the object")
            self.raw.close()

    def value(self) -> Any:
        self.peek()
        want = CHUNK
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:  # otherwise a number may continue
                    self.check_depth(value, end)
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self.text) - 16
                if self.ended or not cut:
                    self.at = min(error.pos, len(self.text))
                    raise self.error(error.msg) from None
            except RecursionError:
                raise self.refused(TOO_DEEP) from None
            except ValueError as error:
                raise self.error(str(error)) from None
            if bad := too_much_json(self.text, self.at):  # all of it belongs to this value
                raise self.refused(bad)
            self.more(want)
            want = min(2 * want, LARGEST_CHUNK)  # so that a long value is not parsed too often

    def check_depth(self, value: Any, end: int) -> None:
        lists = sum(self.text.count(bracket, self.at, end) for bracket in "[{")
        if lists > DEPTH and too_deep(value):
            raise self.refused(TOO_DEEP)

    def peek(self) -> str:
        """The next character that is not a space; empty at the end."""
        while True:
            self.at = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more(CHUNK)

    def expect(self, characters: str) -> str:
        character = self.peek()
        if not character or character not in characters:
            what = f"found {character!r}" if character else "the file ends"
            raise self.error(f"expected {' or '.join(characters)}, {what}")
        self.at += 1
        return character

    def more(self, size: int) -> None:
        try:
            data = self.file.read(size)
            self.size += len(data)
            self.ended = not data
            new = self.decode.decode(data, self.ended)
        except UnicodeDecodeError:
            self.at = len(self.text)
            raise self.error("not UTF-8 text") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.at = len(self.text)
            raise self.error(f"the compressed file is truncated or damaged: {error}") from None
        if self.file is not self.raw and (bad := grows_too_much(self.size, self.raw.tell())):
            raise self.refused(bad)
        self.passed += self.text.count("\n", 0, self.at)
        self.text, self.at = self.text[self.at :] + new, 0
        self.meter.at(self.raw.tell(), self.total, f"reading {self.path.name}")

    def error(self, what: str) -> MixflError:
        return self.refused(f"is not valid JSON ({what}); is the file truncated?")

    def refused(self, what: str) -> MixflError:
        line = self.line()
        self.raw.close()
        return wrong(self.path, line, what if what.endswith("?") else f"{what}.")

"""Wikipedia: JSON lines with `text`, WikiExtractor's <doc> blocks, or plain text.

A file's first line decides which. An article is a client; plain text, which has no articles, is cut
into clients of about 64,000 characters. A folder means all files below it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from mixfl.data.formats.base import Record
from mixfl.data.formats.reading import files, json_lines, lines, name, wrong
from mixfl.data.formats.text import Text
from mixfl.data.limits import SHORT_LINE

PIECE = 1 << 16  # characters of plain text in a client
DOC = re.compile(r'<doc (?:.*? )?id="([^"]{1,1000})".*>')


class Wikipedia(Text):
    options = ("length", "normalize", "partition")

    def records(self) -> Iterator[Record]:
        for path in files(self.source):
            first = next((line for _, line in lines(path, self.meter) if line.strip()), "")
            if first.lstrip().startswith("{"):
                yield from self.from_json(path)
            elif first.startswith("<doc "):
                yield from self.from_extractor(path)
            else:
                yield from self.from_plain(path)

    def from_json(self, path: Path) -> Iterator[Record]:
        for number, row in json_lines(path, self.meter):
            if not isinstance(row.get("text"), str):
                raise wrong(path, number, "expected a field 'text' with the article's text.")
            article = name(row.get("id")) or name(row.get("title")) or f"{path.name}:{number}"
            yield from self.pieces(article, row["text"])

    def from_extractor(self, path: Path) -> Iterator[Record]:
        article, begun, text = "", 0, _Joined()
        for number, line in lines(path, self.meter):
            if line.startswith("<doc "):
                doc = DOC.fullmatch(line) if len(line) < SHORT_LINE else None
                if article or not doc:
                    why = f"the one in line {begun} has no </doc>" if article else 'has no id="..."'
                    raise wrong(path, number, f"begins an article, but {why}.")
                article, begun = doc[1], number
            elif line == "</doc>":
                yield from self.pieces(article, text.take())
                article = ""
            elif article:
                text.add(line)
                if text.size > 16 * PIECE:
                    yield from self.pieces(article, text.take())
            elif line.strip():
                raise wrong(path, number, f"text outside of an article: {line[:40]!r}.")
        if article:
            raise wrong(path, begun, "the article has no </doc>: the file is truncated.")

    def from_plain(self, path: Path) -> Iterator[Record]:
        text, count = _Joined(), 0
        for _, line in lines(path, self.meter):
            text.add(line)
            if text.size >= PIECE:
                count += 1
                yield from self.pieces(f"{path.name}:{count}", text.take())
        if text.size:
            yield from self.pieces(f"{path.name}:{count + 1}", text.take())


class _Joined:
    """Collects the lines of a text."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.size = 0

    def add(self, line: str) -> None:
        self.lines.append(line)
        self.size += len(line) + 1

    def take(self) -> str:
        text = "\n".join(self.lines).strip("\n")
        self.lines, self.size = [], 0
        return text

"""Reads files line by line, with errors that name the file and the line."""

import codecs
import gzip
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mixfl.data.limits import (
    DEPTH,
    LONGEST,
    TOO_DEEP,
    grows_too_much,
    too_deep,
    too_much_json,
)
from mixfl.errors import MixflError

WHOLE = re.compile(r"-?[0-9]{1,18}")
Report = Callable[[int, int, str], None]


class Meter:
    """Reports progress a few times a second, and at the end of each step."""

    def __init__(self, report: Report | None):
        self.report, self.next = report, 0.0

    def at(self, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        if self.report is not None and (now >= self.next or done >= total):
            self.next = now + 0.2
            self.report(done, total, text)


def wrong(path: Path, line: int, what: str) -> MixflError:
    return MixflError(f"{path}, line {line}: {what}")


def lines(
    path: Path, meter: Meter, encoding: str = "utf-8", longest: int = LONGEST
) -> Iterator[tuple[int, str]]:
    """Numbered lines, without line endings, of a file that may be compressed (.gz)."""
    number, size, total = 0, 0, max(path.stat().st_size, 1)
    with path.open("rb") as raw:
        file: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        try:
            while line := file.readline(longest):
                number, size = number + 1, size + len(line)
                if len(line) == longest:
                    raise wrong(
                        path, number, f"is longer than {longest:,} bytes: is it the right file?"
                    )
                if file is not raw and (bad := grows_too_much(size, raw.tell())):
                    raise wrong(path, number, f"{bad}.")
                if number == 1 and encoding == "utf-8":
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield number, line.decode(encoding).rstrip("\r\n")
                if number % 1000 == 0:
                    meter.at(raw.tell(), total, f"reading {path.name}")
        except UnicodeDecodeError as error:
            raise wrong(
                path, number, f"is not {encoding} text (byte {error.start + 1} of the line): save "
                f"the file in {encoding}, or check that it is the right one."
            ) from None  # fmt: skip
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise wrong(
                path, number + 1, f"the compressed file is truncated or damaged ({error}): fetch "
                "it again."
            ) from None  # fmt: skip
    meter.at(total, total, f"reading {path.name}")


def json_lines(path: Path, meter: Meter) -> Iterator[tuple[int, dict[str, Any]]]:
    """One object per line; empty lines are skipped."""
    for number, line in lines(path, meter):
        if line.strip():
            value = from_json(line, path, number)
            if not isinstance(value, dict):
                raise wrong(path, number, f"expected a JSON object, found {line.strip()[:40]!r}.")
            yield number, value


def from_json(text: str, path: Path, number: int) -> Any:
    if bad := too_much_json(text):
        raise wrong(path, number, f"{bad}: split it into several lines.")
    try:
        value = json.loads(text)
    except RecursionError:
        raise wrong(path, number, f"{TOO_DEEP}.") from None
    except ValueError as error:
        raise wrong(path, number, f"is not valid JSON ({error}); is the file truncated?") from None
    if text.count("[") + text.count("{") > DEPTH and too_deep(value):
        raise wrong(path, number, f"{TOO_DEEP}.")
    return value


def whole(text: str, low: int = 0, high: int = 2**31 - 1) -> int | None:
    """The number, if the text is a whole number of up to 18 digits within the bounds."""
    if WHOLE.fullmatch(text) and low <= int(text) <= high:
        return int(text)
    return None


def plain(text: str) -> str:
    """Text that can be stored: no lone surrogates, no zeros (which mean padding)."""
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", "")


def name(value: object) -> str | None:
    """A client's name from a JSON value: a nonempty text or a whole number."""
    if isinstance(value, str):
        return plain(value)[:1000] or None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return str(value)
    return None


def find(folder: Path, *names: str) -> Path | None:
    """The first of the names that exists, plain or compressed."""
    tries = [folder / (n + end) for n in names for end in ("", ".gz")]
    return next((path for path in tries if path.is_file()), None)


def files(source: Path, *suffixes: str) -> list[Path]:
    """The source itself, or all files below it (with one of the suffixes), sorted by name."""
    if source.is_file():
        return [source]
    paths = [
        p for p in source.rglob("*")
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(source).parts)
        and (not suffixes or p.name.removesuffix(".gz").endswith(suffixes))
    ]  # fmt: skip
    if not paths:
        kind = f" that end in {', '.join(suffixes)}" if suffixes else ""
        raise MixflError(f"{source} has no files{kind}: give the file, or the folder with them.")
    return sorted(paths)

"""MovieLens: `ratings.dat` (ml-1m: user::movie::rating::time) and `u.data` (ml-100k, tabs).

    context   int32 [10]  up to 10 movies that the user rated before, oldest first, then zeros
    movie     int32       the next one

Movies keep their official numbers. A user's first rating has no context, so it makes no example.
If `movies.dat` (or `u.item`) is in the same folder, its titles go into the store's `titles.json`.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.reading import Meter, find, lines, plain, whole, wrong
from mixfl.data.limits import SHORT_LINE
from mixfl.errors import MixflError

CONTEXT = 10
DIGITS = "([0-9]{1,10})"
ROW = re.compile(rf"{DIGITS}(::|\t){DIGITS}\2(0\.5|[1-4](?:\.[05])?|5(?:\.0)?)\2([0-9]{{1,18}})")


class MovieLens(Format):
    minimum = 2
    in_time = True

    def records(self) -> Iterator[Record]:
        path = find(self.source, "ratings.dat", "u.data") if self.source.is_dir() else self.source
        if path is None:
            raise MixflError(
                f"{self.source} has neither ratings.dat (ml-1m) nor u.data (ml-100k): give the "
                "unpacked folder or the file."
            )
        listed = find(path.parent, "u.item" if path.name.startswith("u.data") else "movies.dat")
        if listed is not None:
            self.extra_files["titles.json"] = dict(titles(listed, self.meter))
        for number, line in lines(path, self.meter, "latin-1", SHORT_LINE):
            row = ROW.fullmatch(line)
            user, movie = (int(row[1]), int(row[3])) if row else (0, 0)
            if row is None or not (0 < user < 2**31 and 0 < movie < 2**31):
                raise wrong(
                    path, number, f"found {line[:60]!r}, expected user::movie::rating::time (or "
                    "with tabs): whole numbers from 1, and a rating from 0.5 to 5; is the file "
                    "truncated?"
                )  # fmt: skip
            yield Record(str(user), struct.pack("<i", movie), int(row[5]))

    def count(self, payloads: list[bytes]) -> int:
        return len(payloads) - 1

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        movies = np.frombuffer(b"".join(payloads), "<i4").astype(np.int32)
        last = np.arange(1, len(movies))[:, None]
        # The k-th of the c movies before the one at `last` is at last - c + k.
        at = last - np.minimum(last, CONTEXT) + np.arange(CONTEXT)
        context = np.where(at < last, movies[np.minimum(at, len(movies) - 1)], 0)
        return {"context": context.astype(np.int32), "movie": movies[1:]}


def titles(path: Path, meter: Meter) -> Iterator[tuple[str, str]]:
    """Numbers and titles of movies.dat (movie::title::genres) or u.item (movie|title|...)."""
    between = "|" if path.name.startswith("u.item") else "::"
    for number, line in lines(path, meter, "latin-1", SHORT_LINE):
        movie, title, rest = [*line.split(between, 2), "", ""][:3]
        if whole(movie, 1) is None or not title.strip() or not rest:
            raise wrong(
                path, number, f"found {line[:60]!r}, expected movie{between}title{between}... "
                "with the movie's number from 1; is the file truncated?"
            )  # fmt: skip
        yield str(int(movie)), plain(_decoded(title.strip()))


def _decoded(title: str) -> str:
    """The official files are Latin-1; some copies and later editions are UTF-8."""
    try:
        return title.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        return title

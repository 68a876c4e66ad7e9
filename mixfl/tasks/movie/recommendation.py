"""`mixfl recommend`: recommendations from a trained model of the movie task."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mixfl.data.formats.movielens import titles
from mixfl.data.formats.reading import Meter
from mixfl.data.limits import read_small
from mixfl.errors import MixflError
from mixfl.tasks import movie, task_in

CONTEXT = 10  # previous movies in a training example, at most
SHOWN = 10  # matches of an ambiguous title in a message


class Recommended(NamedTuple):
    movie: int
    score: float  # cosine, at most 1
    title: str  # "" if titles are unknown


def recommend(
    config: Mapping[str, Any], params: Any, history: str, top: int = 10, listed: Path | None = None
) -> tuple[list[Recommended], list[Recommended]]:
    """The movies in the history, and the `top` best movies that are not in it.

    `config` and `params` are those of a run; `history` has numbers or parts of titles, oldest
    first.
    """
    if task_in(config) != "movie":
        raise MixflError(
            f"this is a run of the task {task_in(config)}, not of movie: mixfl recommend needs "
            "a run of `mixfl run movie`."
        )
    if params is None:
        raise MixflError("this run has no model yet: finish it (mixfl run ... --resume).")
    names = _titles(listed, config.get("data"))
    table = np.asarray(params["movies"])
    movies = len(table) - 2
    seen = [_movie_number(part, names, movies) for part in _parts(history, names)]
    if not seen:
        raise MixflError("the history is empty: give movies, for example --history 1,260,2571.")
    scores = _scores(params, seen[-CONTEXT:])
    scores[[0, *seen]] = -np.inf
    if names:  # a number without a title is not a movie
        scores[[i for i in range(1, movies + 1) if i not in names]] = -np.inf
    best = [i for i in np.argsort(-scores, kind="stable")[:top].tolist() if scores[i] > -np.inf]
    return (
        [Recommended(i, 1.0, names.get(i, "")) for i in seen],
        [Recommended(i, float(scores[i]), names.get(i, "")) for i in best],
    )


def _scores(params: Any, seen: list[int]) -> np.ndarray:
    """The score of each id from 0 to the last movie."""
    table = np.asarray(params["movies"])[:-1]
    left = movie.left_tower(params["context"], table[None, seen], np.array([len(seen)]))
    return np.array(movie.unit(table) @ left[0])


def _parts(history: str, names: Mapping[int, str]) -> list[str]:
    """Split at commas, but keep a title with commas whole."""
    known = {form for title in names.values() for form in (title.casefold(), _bare(title))}
    parts, titles = [p.strip() for p in history.split(",") if p.strip()], []
    while parts:
        joined = [", ".join(parts[:n]) for n in range(len(parts), 1, -1)]
        title = next((t for t in joined if t.casefold() in known), parts[0])
        titles.append(title)
        parts = parts[title.count(", ") + 1 if title != parts[0] else 1 :]
    return titles


def _movie_number(part: str, names: Mapping[int, str], movies: int) -> int:
    """The movie for a number or a part of a title."""
    if part.isascii() and part.isdigit():
        number = int(part[:10])
        if len(part) > 10 or not 1 <= number <= movies:
            raise MixflError(f"there is no movie {part[:20]}: this model knows 1 to {movies}.")
        if names and number not in names:
            raise MixflError(f"there is no movie {part}: it has no title in the list of movies.")
        return number
    if not names:
        raise MixflError(
            f"'{part}': titles are not known here, so give movies by number, or the list of titles "
            "with --movies PATH/movies.dat."
        )
    wanted = part.casefold()
    matches = {i: t for i, t in names.items() if wanted in t.casefold() and i <= movies}
    # `Toy Story` means that movie, although Toy Story 2 contains the words too.
    exact = [i for i, t in matches.items() if wanted in (t.casefold(), _bare(t))]
    if len(exact) == 1:
        return exact[0]
    if len(matches) == 1:
        return next(iter(matches))
    if not matches:
        raise MixflError(f"no title contains '{part}'.")
    listed = "; ".join(f"{i} {t}" for i, t in list(matches.items())[:SHOWN])
    more = f"; and {len(matches) - SHOWN} more" if len(matches) > SHOWN else ""
    raise MixflError(f"'{part}' may be one of {listed}{more}: give its number, or more of it.")


def _bare(title: str) -> str:
    """`Matrix, The (1999)` -> `matrix`."""
    return re.sub(r"(, (the|a|an))? \([0-9]{4}\)$", "", title.casefold())


def _titles(given: Path | None, store: str | None) -> dict[int, str]:
    """Titles from the given file, or from the store that the run was trained on; {} if neither."""
    if given is not None:
        path = given / "movies.dat" if given.is_dir() else given
        try:
            return {int(number): title for number, title in titles(path, Meter(None))}
        except OSError as error:
            raise MixflError(f"{path} can't be read: {error.strerror}.") from None
    beside = Path(store or ".") / "titles.json"
    if store is None or not beside.is_file():
        return {}
    try:
        kept = json.loads(read_small(beside))
        return {int(number): str(title) for number, title in kept.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise MixflError(
            f"{beside} can't be read as titles ({error}): give --movies PATH/movies.dat instead."
        ) from None

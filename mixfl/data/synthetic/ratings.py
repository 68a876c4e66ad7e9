"""Synthetic data for the movie task: the movies that users with different tastes watch in turn.

A movie has a genre and a popularity. A user has tastes, and a mood that lasts for a few movies. So
the genre of the last movies predicts the next one. A movie's number says nothing about its genre.
"""

import itertools

import numpy as np

CONTEXT = 10  # previous movies in an example, as in `mixfl data prepare movielens`
LEAST = 20  # ratings of a user
PER_GENRE = 40  # movies


def ratings(
    users: int, movies: int, per_user: int, *, difficulty: float = 0.5, seed: int = 0
) -> dict[str, np.ndarray]:
    """Draws what each user watches, as examples: up to ten movies, and the next one.

    Returns `{"context": int32 [n, 10], "movie": int32 [n], "user": int64 [n]}`, with rows grouped
    by user and in order of time, as `mixfl data prepare movielens` makes them. Movies are numbered
    from 1. A context has its oldest movie first and zeros at its end. The same arguments give the
    same bits.

    There is one genre per 40 movies (at least four). A movie's popularity is lognormal (deviation
    1), and so is its genre's (0.5). A user's tastes are weights of the genres, Dirichlet with
    parameter 0.3 times a genre's popularity over the mean. The number of ratings is 20 plus an
    exponential with mean per_user - 20, at most half of all movies. The next movie has the genre of
    the last one with probability 0.95, 0.8 or 0.4 (difficulty 0, 0.5 and 1). Otherwise its genre is
    drawn from the user's tastes. Within the genre, it is drawn by popularity among the movies that
    the user has not seen. If none is left, another genre is drawn.
    """
    rng = np.random.default_rng(seed)
    genres = max(4, round(movies / PER_GENRE))
    sizes = np.full(genres, movies // genres) + (np.arange(genres) < movies % genres)
    first = np.concatenate([[0], np.cumsum(sizes)])  # movies first[g] .. first[g + 1] are of g
    fame = np.exp(rng.standard_normal(movies))
    genre_fame = np.exp(0.5 * rng.standard_normal(genres))
    tastes = rng.gamma(0.3 * genre_fame / genre_fame.mean(), size=(users, genres)) + 1e-9

    lengths = LEAST + rng.exponential(per_user - LEAST, users).astype(np.int64)
    lengths = -np.sort(-np.minimum(lengths, max(LEAST, movies // 2)))  # the longest first
    queues = _queues(rng, users, first, fame)
    mood = np.interp(difficulty, (0, 0.5, 1), (0.95, 0.8, 0.4))
    watched = _watched(rng, lengths, queues, first, tastes, mood)
    numbers = 1 + rng.permutation(movies).astype(np.int32)
    order = rng.permutation(users)  # so that a user's number does not reveal the length
    return _examples(numbers, watched[order], lengths[order])


def _queues(rng, users: int, first: np.ndarray, fame: np.ndarray) -> np.ndarray:
    """[users, movies]: for each user, the movies of each genre in the order of watching.

    Sorting exponential waiting times of rate `fame` draws by fame without replacement.
    """
    queues = np.empty((users, len(fame)), np.int32)
    for a, b in itertools.pairwise(first):
        wait = rng.standard_exponential((users, b - a), np.float32) / fame[a:b]
        queues[:, a:b] = a + np.argsort(wait, axis=1)
    return queues


def _watched(rng, lengths, queues, first, tastes, mood: float) -> np.ndarray:
    """[users, longest]: movies in order of time; entries beyond a user's length are unused."""
    left = np.repeat(np.diff(first)[None], len(lengths), axis=0)  # [users, genres]
    watched = np.zeros((len(lengths), lengths[0]), np.int32)
    genre = np.zeros(len(lengths), np.int64)
    for t in range(lengths[0]):
        n = int(np.searchsorted(-lengths, -t))  # users with more than t ratings
        each = np.arange(n)
        chances = np.cumsum(np.where(left[:n] > 0, tastes[:n], 0), axis=1)
        drawn = (rng.random((n, 1)) * chances[:, -1:] >= chances).sum(1)
        stay = (rng.random(n) < mood) & (left[each, genre[:n]] > 0) & (t > 0)
        genre[:n] = np.where(stay, genre[:n], drawn)
        g = genre[:n]
        watched[:n, t] = queues[each, first[g + 1] - left[each, g]]
        left[each, g] -= 1
    return watched


def _examples(numbers, watched, lengths) -> dict[str, np.ndarray]:
    user = np.repeat(np.arange(len(lengths)), lengths - 1)
    last = np.concatenate([np.arange(1, n) for n in lengths])[:, None]
    # The k-th of the c movies before the one at `last` is at last - c + k.
    at = last - np.minimum(last, CONTEXT) + np.arange(CONTEXT)
    seen = numbers[watched]
    context = np.where(at < last, seen[user[:, None], np.minimum(at, last)], 0)
    return {"context": context.astype(np.int32), "movie": seen[user, last[:, 0]], "user": user}

"""Correlated noise, for clients that come when they like: a banded matrix mechanism.

With noise that is independent from round to round, the noise of the model adds up. Here the noise
of a round cancels a part of the noise of earlier rounds: noise = C^-1 Z, with Z independent and C a
lower-triangular Toeplitz matrix with a few bands. A client that takes part at most every min_sep
rounds meets each band at most once if there are no more bands than that.

The bands are those of the square root of the prefix sums, which is optimal for the largest error of
all rounds (jax-privacy: optimal_max_error_strategy_coefs), scaled to norm 1.
"""

import functools
import math

import numpy as np

MOST_BANDS = 16  # the state has this many copies of the model, minus one


def bands(min_sep: int) -> int:
    return min(min_sep, MOST_BANDS)


@functools.cache
def coefficients(bands: int) -> np.ndarray:
    """The first column of C: [bands]."""
    from jax_privacy.matrix_factorization import toeplitz

    coefs = np.asarray(toeplitz.optimal_max_error_strategy_coefs(bands), np.float64)
    return coefs / np.linalg.norm(coefs)


def sensitivity(bands: int, min_sep: int, rounds: int) -> float:
    """How far one client moves C times the contributions, in clip norms: the norm of the sum of its
    columns of C. Without more bands than min_sep, these columns are orthogonal."""
    if bands > min_sep:
        raise ValueError(f"{bands} bands for min_sep = {min_sep}")
    participations = -(-rounds // min_sep)
    return math.sqrt(participations)

"""95 % confidence intervals of means, by Student's t."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    mean: float
    low: float  # NaN if there is only one value
    high: float


def half_width(values: Sequence[float] | np.ndarray) -> float:
    n = len(values)
    return float(_quantile(n) * np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else math.nan


@functools.cache
def _quantile(n: int) -> float:
    from scipy.stats import t

    return t.ppf(0.975, n - 1)


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    mean, half = float(np.mean(values)), half_width(values)
    return Interval(mean, mean - half, mean + half)

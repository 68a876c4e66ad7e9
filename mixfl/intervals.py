"""95 % intervals of means, by Student's t."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    mean: float
    low: float  # NaN where there is one value only
    high: float


def half_width(values: Sequence[float] | np.ndarray) -> float:
    from scipy.stats import t

    n = len(values)
    return float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else math.nan


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    mean, half = float(np.mean(values)), half_width(values)
    return Interval(mean, mean - half, mean + half)

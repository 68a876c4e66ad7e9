"""95 % confidence intervals of means, by Student's t; and ones that allow several looks.

With looks at 5, 10, 15 and 20 values, one may stop at any of them. So that this costs no error, the
5 % are divided equally among the looks (Bonferroni): each interval is a t interval of 98.75 %. All
of them hold together in 95 % of cases, whatever decides when to stop and however the looks depend
on each other. So their intersection holds too, and what one look decided stays decided. Pocock's
level, 1.82 % at each look, is for a known variance: with t intervals it errs in 5.4 % of cases.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ERROR = 0.05


class Interval(NamedTuple):
    mean: float
    low: float  # NaN if there is only one value
    high: float


def half_width(values: Sequence[float] | np.ndarray, error: float = ERROR) -> float:
    n = len(values)
    if n < 2:
        return math.nan
    return float(_quantile(n, error) * np.std(values, ddof=1) / np.sqrt(n))


@functools.cache
def _quantile(n: int, error: float) -> float:
    from scipy.special import stdtrit  # importing scipy.stats takes seconds

    return float(stdtrit(n - 1, 1 - error / 2))


def interval(values: Sequence[float] | np.ndarray, error: float = ERROR) -> Interval:
    mean, half = float(np.mean(values)), half_width(values, error)
    return Interval(mean, mean - half, mean + half)


def sequential(
    values: Sequence[float] | np.ndarray, looks: Sequence[int], error: float = ERROR
) -> Interval:
    """The intersection of the intervals at the looks so far. If that is empty (in less than 5 % of
    cases), the interval at the last look. Without a look so far: as if it were the first."""
    taken = [n for n in looks if n <= len(values)] or [len(values)]
    each = [interval(values[:n], error / max(len(looks), 1)) for n in taken]
    low, high = max(d.low for d in each), min(d.high for d in each)
    return Interval(each[-1].mean, low, high) if low <= high else each[-1]

"""Evaluates data in chunks of one size: one compiled program, bounded memory."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")
THREADS = min(4, os.cpu_count() or 1)


def over_chunks(function: Callable[[np.ndarray], Result], n: int, size: int) -> list[Result]:
    """function(rows) for rows 0 .. size - 1, then size .. 2 size - 1 and so on, in this order.

    Rows of the last chunk may be n or above. Several threads share the chunks: the products of
    one chunk are often too small to use all cores.
    """
    chunks = [np.arange(start, start + size) for start in range(0, n, size)]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, chunks))

"""Many of NumPy's generators at once: the same bits as `default_rng(words)` for each.

Making one from a SeedSequence takes longer than drawing a client's order with it. Here its hash of
the words, which NumPy promises not to change, is computed for all of them together.
"""

from collections.abc import Iterator

import numpy as np
from numpy.random.bit_generator import ISeedSequence

POOL = 4  # words


class Hash:
    """A hash of 32-bit words, with a constant that changes from word to word."""

    def __init__(self, first: int, factor: int):
        self.constant, self.factor = first, factor

    def __call__(self, word: np.ndarray) -> np.ndarray:
        word = word ^ np.uint32(self.constant)
        self.constant = self.constant * self.factor % 2**32
        return shifted(word * np.uint32(self.constant))


def shifted(word: np.ndarray) -> np.ndarray:
    return word ^ (word >> np.uint32(16))


def mix(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return shifted(np.uint32(0xCA01F9DD) * x - np.uint32(0x4973F715) * y)


def states(words: list[int], last: np.ndarray) -> np.ndarray:
    """[n, 4] words of 64 bits: what SeedSequence([*words, last[i]]) gives to PCG64."""
    every = [np.full(len(last), word, np.uint32) for word in words] + [last.astype(np.uint32)]
    every += [np.zeros(len(last), np.uint32)] * (POOL - len(every))
    hashed = Hash(0x43B0D7E5, 0x931E8875)
    pool = [hashed(word) for word in every[:POOL]]
    for source in range(POOL):
        for target in range(POOL):
            if source != target:
                pool[target] = mix(pool[target], hashed(pool[source]))
    for word in every[POOL:]:
        pool = [mix(old, hashed(word)) for old in pool]
    hashed = Hash(0x8B51F9DD, 0x58F38DED)
    return np.stack([hashed(pool[i % POOL]) for i in range(2 * POOL)], 1).view(np.uint64)


class Known(ISeedSequence):
    def __init__(self, state: np.ndarray):
        self.state = state

    def generate_state(self, n_words: int, dtype: object = np.uint64) -> np.ndarray:
        return self.state


def generators(words: list[int], last: np.ndarray) -> Iterator[np.random.Generator]:
    """`default_rng([*words, last[i]])` for each i."""
    if max(*words, *last.tolist()) >= 2**32:  # such a number is two words
        yield from (np.random.default_rng([*words, i]) for i in last.tolist())
        return
    for state in states(words, last):
        yield np.random.Generator(np.random.PCG64(Known(state)))  # type: ignore[arg-type]

"""Many of NumPy's generators at once: the same bits as `default_rng(words)` for each.

Making one from a SeedSequence takes longer than drawing a client's order with it. Here its hash of
the words, which NumPy promises not to change, is computed for all of them together.
"""

from collections.abc import Iterator, Sequence

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


def words_of(entropy: Sequence[int | np.ndarray], count: int) -> np.ndarray:
    """[..., count] words of 32 bits: what SeedSequence(entropy).generate_state(count) gives, for
    every entry of the arrays in `entropy`, which are broadcast against each other. The numbers in
    arrays must be below 2^32."""
    every = [word for value in entropy for word in _words(value)]
    every += [np.zeros(1, np.uint32)] * (POOL - len(every))
    hashed = Hash(0x43B0D7E5, 0x931E8875)
    pool = [hashed(word) for word in every[:POOL]]
    for source in range(POOL):
        for target in range(POOL):
            if source != target:
                pool[target] = mix(pool[target], hashed(pool[source]))
    for word in every[POOL:]:
        pool = [mix(old, hashed(word)) for old in pool]
    hashed = Hash(0x8B51F9DD, 0x58F38DED)
    return np.stack([hashed(pool[i % POOL]) for i in range(count)], -1)


def _words(value: int | np.ndarray) -> list[np.ndarray]:
    """A large number is several words."""
    if isinstance(value, np.ndarray):
        return [value.astype(np.uint32)]
    parts = [value % 2**32]
    while value := value >> 32:
        parts.append(value % 2**32)
    return [np.array([part], np.uint32) for part in parts]


def states(words: list[int], last: np.ndarray) -> np.ndarray:
    """[n, 4] words of 64 bits: what SeedSequence([*words, last[i]]) gives to PCG64."""
    return words_of([*words, last], 2 * POOL).view(np.uint64)


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

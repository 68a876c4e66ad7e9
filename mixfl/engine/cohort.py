"""The random draws of a round: who takes part, and which rows are read in which order.

Every draw has its own generator, made from the seed, the round and what is drawn. So a round's
data depends on nothing that happened before it, is the same for every algorithm, and needs no
saved random state.
"""

import numpy as np

from mixfl.engine.seeds import generators, words_of

COHORT, ORDER, CENTRAL, POOLED, SHARE, KEY, EXAMPLE, AVAILABLE, FATE, SPEED, TURN = range(11)


def generator(seed: int, round: int, what: int, *which: int) -> np.random.Generator:
    return np.random.default_rng([seed, round, what, *which])


def cohort(seed: int, round: int, population: int, clients: int, size: int) -> np.ndarray:
    """[size] positions of clients, without replacement. This takes O(size) in NumPy."""
    rng = generator(seed, round, COHORT, population)
    return rng.choice(clients, size, replace=False)


def turn(seed: int, round: int, population: int, clients: int, min_sep: int) -> np.ndarray:
    """Positions of the clients that may take part in a round, if a client waits min_sep rounds:
    every client has its turn once in min_sep rounds."""
    place = generator(seed, 0, TURN, population).permutation(clients)
    return np.flatnonzero(place % min_sep == round % min_sep)


def cohort_rows(seed, round, population, clients, first, sizes, steps, batch, taken=None):
    """For each client, fresh permutations of its rows, one per epoch, cut into batches: rows and
    mask [clients, steps, batch]. Client i has the rows first[i] .. first[i] + sizes[i], and takes
    taken[i] steps, by default one epoch.

    The last batch of an epoch may be short. The rest is padded with rows of that batch, so padding
    is finite if they are.
    """
    sizes = np.asarray(sizes)
    epoch = -(-sizes // batch)  # its steps
    taken = np.minimum(epoch, steps) if taken is None else np.asarray(taken)
    rows = np.empty((len(clients), steps * batch), np.int64)
    for i, rng in enumerate(generators([seed, round, ORDER, population], np.asarray(clients))):
        for start in range(0, taken[i], epoch[i]):
            end = min(start + epoch[i], taken[i])
            order = rng.permutation(sizes[i])[: (end - start) * batch]
            at, padding = start * batch, (end if end < taken[i] else steps) * batch
            last = (len(order) - 1) // batch * batch
            rows[i, at : at + len(order)] = order
            rows[i, at + len(order) : padding] = np.resize(order[last:], padding - at - len(order))
    rows += np.asarray(first)[:, None]
    step = np.arange(steps)
    held = np.where(step < taken[:, None], sizes[:, None] - step % epoch[:, None] * batch, 0)
    mask = np.arange(batch) < held[:, :, None]
    return rows.reshape(-1, steps, batch), mask.astype(np.float32)


def client_keys(seed: int, round: int, population: int, clients) -> np.ndarray:
    """[clients, 2] words that seed a client's own random draws in a round."""
    numbers = np.asarray(clients)
    if len(numbers) and int(numbers.max()) >= 2**32:  # such a number is two words
        words = [words_of([seed, round, KEY, population, int(i)], 2) for i in numbers]
        return np.concatenate(words)
    return words_of([seed, round, KEY, population, numbers], 2)


def client_example_keys(
    seed: int, round: int, what: int, population: int, clients, steps: int, batch: int
) -> np.ndarray:
    """[clients, steps, batch, 2] words: a key for each example that a client's loss gets. `what` is
    ORDER for its own examples, SHARE for those of the central term."""
    before = [seed, round, EXAMPLE, what, population]
    places = [np.arange(steps)[:, None], np.arange(batch)]
    numbers = np.asarray(clients)
    if len(numbers) and int(numbers.max()) >= 2**32:  # such a number is two words
        return np.stack([words_of([*before, int(i), *places], 2) for i in numbers])
    return words_of([*before, numbers[:, None, None], *places], 2)


def drawn_example_keys(
    seed: int, round: int, what: int, term: int, steps: int, batch: int
) -> np.ndarray:
    """[steps, batch, 2] words: the same for batches drawn at the server (CENTRAL or POOLED)."""
    places = [np.arange(steps)[:, None], np.arange(batch)]
    return words_of([seed, round, EXAMPLE, what, term, *places], 2)


def drawn_rows(rng: np.random.Generator, n: int, steps: int, batch: int) -> np.ndarray:
    """[steps, batch] rows of n, each batch without replacement."""
    return np.stack([rng.choice(n, batch, replace=False) for _ in range(steps)])


def dealt_rows(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """[size] rows of n. No row comes twice before every row has come once."""
    if size <= n:
        return rng.choice(n, size, replace=False)
    turns = [rng.permutation(n) for _ in range(-(-size // n))]
    return np.concatenate(turns)[:size]

"""Chance in a round: who takes part, and which rows are read in which order.

Every draw has its own generator, made from the seed, the round and what is drawn. So a round's
data depends on nothing that happened before it, is the same for every algorithm, and needs no
saved random state.
"""

import numpy as np

COHORT, ORDER, CENTRAL, POOLED, SHARE = range(5)


def generator(seed: int, round: int, what: int, *which: int) -> np.random.Generator:
    return np.random.default_rng([seed, round, what, *which])


def cohort(seed: int, round: int, population: int, clients: int, size: int) -> np.ndarray:
    """[size] positions of clients, without replacement."""
    rng = generator(seed, round, COHORT, population)
    return rng.choice(clients, size, replace=False)


def client_rows(seed, round, population, client, first, n, steps, batch):
    """A fresh permutation of the client's rows, cut into batches: rows and mask [steps, batch].

    The client takes min(steps, the batches it has); the last one may be short. What is left
    over is padded with the rows of the last batch, so that a padded row is finite where they are.
    """
    rng = generator(seed, round, ORDER, population, client)
    size = steps * batch
    order = rng.permutation(n)[:size]
    last = order[(len(order) - 1) // batch * batch :]
    rows = first + np.append(order, np.resize(last, size - len(order)))
    mask = np.arange(size) < len(order)
    return rows.reshape(steps, batch), mask.reshape(steps, batch)


def drawn_rows(rng: np.random.Generator, n: int, steps: int, batch: int) -> np.ndarray:
    """[steps, batch] rows of n, each batch without replacement."""
    return np.stack([rng.choice(n, batch, replace=False) for _ in range(steps)])


def dealt_rows(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """[size] rows of n, none twice before all had their turn."""
    if size <= n:
        return rng.choice(n, size, replace=False)
    turns = [rng.permutation(n) for _ in range(-(-size // n))]
    return np.concatenate(turns)[:size]

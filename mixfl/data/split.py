"""Composite clients, and which clients or examples are for testing."""

import numpy as np

from mixfl.errors import MixflError


def group_sizes(clients: int, size: int) -> list[int]:
    """Groups of `size`. What is left joins the last group if it is less than half of one."""
    full, rest = divmod(clients, size)
    groups = [size] * full
    if rest and (not full or 2 * rest >= size):
        groups.append(rest)
    elif rest:
        groups[-1] += rest
    return groups


def held_out_clients(clients: int, fraction: float, seed: int) -> np.ndarray:
    """[clients], True for testing: the fraction, rounded, but at least one of each."""
    if clients < 2:
        raise MixflError(
            f"the data has {clients} client, a split by client needs two: split by example, or "
            "use smaller groups."
        )
    chosen = np.zeros(clients, bool)
    k = min(max(round(clients * fraction), 1), clients - 1)
    chosen[np.random.default_rng(seed).permutation(clients)[:k]] = True
    return chosen


class HeldOutRows:
    """Which rows of a client are for testing: the last ones (in time) or any.

    What rounding takes from one client, the next one gives; one row is always for training.
    """

    def __init__(self, fraction: float, seed: int, in_time: bool):
        self.fraction, self.in_time, self.owed = fraction, in_time, 0.0
        self.rng = np.random.default_rng(seed)

    def choose(self, rows: int) -> np.ndarray:
        self.owed += rows * self.fraction
        k = min(int(self.owed + 0.5), rows - 1)
        self.owed = min(self.owed - k, 1.0)
        chosen = np.arange(rows) >= rows - k
        if not self.in_time:
            self.rng.shuffle(chosen)
        return chosen

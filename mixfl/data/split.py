"""Chooses which clients are joined, and which clients or examples are held out for testing."""

import itertools
from collections.abc import Iterable

import numpy as np

from mixfl.errors import MixflError


def group_sizes(clients: Iterable[tuple[str, int]], size: int, examples: int = 1) -> list[int]:
    """The number of clients, given as (site, examples), in each composite client.

    A group is complete when it has `size` clients and at least `examples` examples, and it never
    spans two sites. Clients left over at the end of a site join its last group, as in the paper:
    8,408 clients of CelebA in groups of 3 are 2,802.
    """
    groups: list[int] = []
    for _, members in itertools.groupby(clients, key=lambda client: client[0]):
        before, n, total = len(groups), 0, 0
        for _, more in members:
            n, total = n + 1, total + more
            if n >= size and total >= examples:
                groups.append(n)
                n = total = 0
        if n and len(groups) == before:
            groups.append(n)
        elif n:
            groups[-1] += n
    return groups


def held_out_clients(clients: int, fraction: float, seed: int) -> np.ndarray:
    """[clients], True for testing: the fraction, rounded, with at least one client on each side."""
    if clients < 2:
        raise MixflError(
            f"a split by client needs at least two clients, and the data has {clients}: split by "
            "example, or use smaller groups."
        )
    chosen = np.zeros(clients, bool)
    k = min(max(round(clients * fraction), 1), clients - 1)
    chosen[np.random.default_rng(seed).permutation(clients)[:k]] = True
    return chosen


class HeldOutRows:
    """Chooses a client's rows for testing: its last ones (`in_time`) or random ones.

    Rounding errors are carried over to the next client. At least one row is for training.
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

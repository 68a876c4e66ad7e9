"""Who shares masks and seeds with whom, and how many clients must stay.

Up to DEGREE + 1 clients, everybody with everybody. Beyond, each client has DEGREE neighbours: the
clients stand in a circle, in an order that follows from the roster's digest (Bell et al., 2020).
The work of a client then no longer grows with their number.
"""

import functools
import hashlib

import numpy as np

DEGREE = 100
LEAST = 3  # clients in a roster: of two, each would know the other's summand


def threshold(clients: int) -> int:
    """Two thirds. Then nobody gets enough shares of both kinds of one client: twice two thirds is
    more than there are, unless a third of the clients help."""
    return -(-2 * clients // 3)


def neighbours(place: int, clients: int, digest: bytes) -> list[int]:
    """The places of a client's neighbours, sorted."""
    if clients <= DEGREE + 1:
        return [j for j in range(clients) if j != place]
    circle, at = _circle(clients, digest)
    steps = (d for d in range(-(DEGREE // 2), DEGREE // 2 + 1) if d)
    return sorted(circle[(at[place] + d) % clients] for d in steps)


@functools.lru_cache(maxsize=4)
def _circle(clients: int, digest: bytes) -> tuple[list[int], list[int]]:
    """The places in the order of the circle, and where each of them is."""
    words = np.frombuffer(hashlib.shake_256(b"mixfl graph 1" + digest).digest(8 * clients), "<u8")
    circle = np.argsort(words, kind="stable")
    return circle.tolist(), np.argsort(circle).tolist()

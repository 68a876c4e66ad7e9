"""Rounds of secure aggregation in one process, with clients that stop where a test wants."""

from collections.abc import Mapping

import numpy as np

from mixfl.deploy.secure import client, ring
from mixfl.deploy.secure.server import Round

LAYOUT = (ring.Segment(32, 50), ring.Segment(11, 13), ring.Segment(64, 3))
BROADCAST = b"digest of the broadcast"
STAGES = ("share", "mask", "reveal")  # a client that drops does not do this


def vectors(n: int, layout=LAYOUT, seed=0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, 2**s.bits, s.length, s.dtype) for s in layout] for _ in range(n)]


def summed(given, layout=LAYOUT):
    """mod 2^bits, in Python's integers."""
    return [
        np.array([sum(int(v[k][i]) for v in given) % 2**s.bits for i in range(s.length)], s.dtype)
        for k, s in enumerate(layout)
    ]


class Cohort:
    """Clients and the server of one round, a stage at a time."""

    def __init__(self, n: int, run="run 1", layout=LAYOUT, round=0, states=None, **options):
        self.n, self.layout, self.options = n, layout, options
        given = states or [client.State(run) for _ in range(n)]
        both = sorted((client.advertise(s) for s in given), key=lambda pair: pair[1].seal)
        self.states = [s for s, _ in both]
        self.server = Round(run, round, [advert for _, advert in both])

    def share(self, dropped=()):
        for i in set(range(self.n)) - set(dropped):
            roster = self.server.roster(i)
            self.states[i], boxes = client.share(self.states[i], roster, **self.options)
            self.server.take_boxes(i, boxes)

    def mask(self, given, dropped=(), broadcast: Mapping[int, bytes] | None = None):
        messages = self.server.deliver(self.layout, BROADCAST)
        for i in sorted(set(messages) - set(dropped)):
            received = client.receive(self.states[i], messages[i])
            digest = (broadcast or {}).get(i, BROADCAST)
            self.states[i], masked = client.mask(
                received, self.server.round, digest, self.layout, given[i]
            )
            self.server.take_masked(i, masked)

    def reveal(self, dropped=()):
        request = self.server.survivors()
        for i in sorted(self.server.alive - set(dropped)):
            self.states[i], shares = client.reveal(self.states[i], request)
            self.server.take_revealed(i, shares)


def played(cohort: Cohort, given, dropped: Mapping[str, set] | None = None):
    """The sum, with clients that drop at each stage."""
    dropped = dropped or {}
    cohort.share(dropped.get("share", ()))
    cohort.mask(given, dropped.get("mask", ()))
    cohort.reveal(dropped.get("reveal", ()))
    return cohort.server.unmask()

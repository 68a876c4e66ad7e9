"""The server's part of a round: passes boxes on, adds up masked vectors, removes their masks.

A masked vector is added to the sum when it arrives, and not kept. Whatever a client sends that is
not as it should be raises Refused: the client has then dropped out.
"""

import numpy as np

from mixfl.deploy.secure import graph, keys, ring, shamir
from mixfl.deploy.secure.client import BOX, own_key, pair_key
from mixfl.deploy.secure.parts import (
    Advert,
    Boxes,
    Refused,
    Roster,
    Survivors,
    packed,
    parsed,
    roster_digest,
    to_bits,
)


class TooFew(Exception):
    """Not enough clients are left. The text says how many."""


class Round:
    def __init__(self, run: str, round: int, adverts: list[Advert]):
        self.round, self.adverts = round, adverts
        self.digest = roster_digest(run, round, adverts)
        self.clients, self.threshold = len(adverts), graph.threshold(len(adverts))
        self.near = [graph.neighbours(i, self.clients, self.digest) for i in range(self.clients)]
        self.boxes: dict[int, dict[int, bytes]] = {}  # sender -> receiver -> box
        self.delivered: dict[int, list[int]] = {}  # receiver -> the neighbours that shared
        self.alive: set[int] = set()
        self.shares: dict[int, dict[int, bytes]] = {}  # owner -> holder's number -> share
        self.answered: set[int] = set()

    def roster(self, place: int) -> bytes:
        return packed(Roster(self.round, place, self.adverts))

    def take_boxes(self, place: int, reply: bytes) -> None:
        sent, near = parsed(reply, Boxes), self.near[place]
        if len(sent.boxes) != len(near) or any(len(box) != BOX for box in sent.boxes):
            raise Refused("other boxes than one for each neighbour.")
        self.boxes[place] = dict(zip(near, sent.boxes, strict=True))

    def deliver(self, layout: ring.Layout, broadcast: bytes) -> dict[int, bytes]:
        """The boxes for each client that shared, and enough of whose neighbours did."""
        self._enough(self.boxes, "shared")
        self.layout, self.broadcast, self.total = layout, broadcast, ring.zeros(layout)
        messages = {}
        for place in sorted(self.boxes):
            there = [j for j in self.near[place] if j in self.boxes]
            if len(there) + 1 >= graph.threshold(len(self.near[place]) + 1):
                self.delivered[place] = there
                messages[place] = packed(Boxes([self.boxes[j][place] for j in there], there))
        self._enough(messages, "shared, with enough neighbours that did,")
        return messages

    def take_masked(self, place: int, reply: bytes) -> None:
        if place not in self.delivered or place in self.alive:
            raise Refused("a masked vector of somebody who was not asked, or twice.")
        if len(reply) != ring.size(self.layout):
            raise Refused(f"a masked vector of {len(reply)} bytes, not {ring.size(self.layout)}.")
        ring.add(self.total, ring.unpack(reply, self.layout))
        self.alive.add(place)

    def survivors(self) -> bytes:
        self._enough(self.alive, "sent a masked vector")
        for i in self.alive:
            if len(self.alive & set(self.near[i])) + 1 < self._least(i):
                raise TooFew("too few neighbours of a client sent a masked vector")
        return packed(Survivors(self.round, to_bits(self.alive, self.clients)))

    def take_revealed(self, place: int, reply: bytes) -> None:
        if place not in self.alive or place in self.answered:
            raise Refused("shares of somebody who was not asked, or twice.")
        owners = sorted([*self.delivered[place], place])
        if len(reply) != shamir.SHARE * len(owners):
            raise Refused("other shares than one for each neighbour that shared.")
        self.answered.add(place)
        for i, owner in enumerate(owners):
            part = reply[i * shamir.SHARE : (i + 1) * shamir.SHARE]
            holder = len(self.near[owner]) if owner == place else self.near[owner].index(place)
            self.shares.setdefault(owner, {})[holder] = part

    def enough_revealed(self) -> bool:
        """Can all masks be removed?"""
        return all(len(self.shares.get(i, {})) >= self._least(i) for i in self._wanted())

    def _wanted(self) -> list[int]:
        """Those whose seed is needed: survivors, and who dropped out with a survivor's masks."""
        lost = {j for i in self.alive for j in self.delivered[i]} - self.alive
        return sorted(self.alive | lost)

    def _least(self, place: int) -> int:
        return graph.threshold(len(self.near[place]) + 1)

    def unmask(self) -> list[np.ndarray]:
        """The sum of the survivors' vectors."""
        self._enough(self.answered, "revealed shares")
        seeds = {i: shamir.combine(self.shares.get(i, {}), self._least(i)) for i in self._wanted()}
        if missing := [i for i, seed in seeds.items() if seed is None]:
            raise TooFew(f"the shares for {len(missing)} clients don't suffice, or don't fit")
        total = [a.copy() for a in self.total]
        for i, seed in seeds.items():
            assert seed is not None
            if i in self.alive:
                own = own_key(seed, self.digest, self.broadcast, self.layout)
                ring.add_mask(total, self.layout, own, -1)
            else:
                self._remove_pairs(total, i, seed)
        return ring.reduced(total, self.layout)

    def _remove_pairs(self, total: ring.Vector, lost: int, seed: bytes) -> None:
        if keys.public_key(seed) != self.adverts[lost].mask:
            raise TooFew("the shares for a client that dropped out don't fit its key")
        private = keys.private_key(seed)
        for i in self.near[lost]:
            if i in self.alive and lost in self.delivered[i]:
                other = self.adverts[i].mask
                key = pair_key(private, other, self.digest, self.broadcast, self.layout)
                ring.add_mask(total, self.layout, key, -1 if lost > i else 1)

    def _enough(self, places, what: str) -> None:
        if len(places) < self.threshold:
            raise TooFew(
                f"{len(places)} of {self.clients} clients {what}, at least {self.threshold} wanted"
            )

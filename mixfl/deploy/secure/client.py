"""A client's part of a round, as functions from state to state. The state can be stored as bytes.

A round is entered once, and only with a number above that of the last one. In it, a client shares
once, masks once and reveals once: of each neighbour one kind of share, and of nobody if fewer than
the threshold survived. What it reveals is useless without what others reveal, and its own mask key
stays with it. After it has revealed, its state of the round is gone.
"""

import itertools
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from mixfl.deploy.secure import graph, keys, ring, shamir
from mixfl.deploy.secure.parts import (
    LARGEST,
    Advert,
    Boxes,
    Refused,
    Roster,
    Survivors,
    from_bits,
    packed,
    parsed,
    roster_digest,
)

SHARED, MASKED = "shared", "masked"
BOX = 2 * shamir.SHARE + keys.TAG


class Keys(msgspec.Struct, frozen=True):
    """Seeds of its private keys, and the public ones."""

    seal: bytes
    mask: bytes
    advert: Advert


class Entered(msgspec.Struct, frozen=True):
    """A round that it takes part in."""

    round: int
    stage: str
    keys: Keys
    place: int
    own: bytes  # the seed of its own mask
    share: bytes  # its share of that seed
    digest: bytes  # of the roster
    clients: int
    peers: dict[int, tuple[bytes, bytes]]  # neighbours' public keys
    held: dict[int, tuple[bytes, bytes]] = {}  # neighbours' shares: own mask, pairwise masks


class State(msgspec.Struct, frozen=True):
    """Between two messages. Everything in it is secret."""

    run: str
    last: int = -1  # the last round that it took part in
    trained: int = -1  # the last training round of which it sent a vector
    fresh: Keys | None = None  # for the next one
    entered: Entered | None = None


def advertise(state: State, sign: keys.Sign | None = None) -> tuple[State, Advert]:
    """Keys for the next round: fresh ones, unless the last ones were not used."""
    if state.fresh is not None:
        return state, state.fresh.advert
    seal, mask = secrets.token_bytes(shamir.SEED), secrets.token_bytes(shamir.SEED)
    advert = Advert(keys.public_key(seal), keys.public_key(mask))
    if sign is not None:
        advert = sign(state.run, advert)
    return replace(state, fresh=Keys(seal, mask, advert)), advert


def share(
    state: State, request: Any, check: keys.Check | None = None, least: int = graph.LEAST
) -> tuple[State, bytes]:
    """Enters a round: seals the shares of its two seeds, a box for each neighbour. What is left of
    an earlier round is dropped."""
    roster = parsed(request, Roster)
    adverts, place, round = roster.adverts, roster.place, roster.round
    fresh = state.fresh
    if fresh is None or round <= state.last:
        raise Refused(f"round {round}: this client took part in round {state.last} already, or it "
                      "has no keys for another one.")  # fmt: skip
    if not max(least, graph.LEAST) <= len(adverts) <= LARGEST:
        raise Refused(
            f"a roster of {len(adverts)} clients: at least {max(least, graph.LEAST)} are wanted."
        )
    if not 0 <= place < len(adverts) or adverts[place] != fresh.advert:
        raise Refused("a roster in which this client's keys are not at its place.")
    if len({key for a in adverts for key in (a.seal, a.mask)}) < 2 * len(adverts):
        raise Refused("a roster with the same key twice.")
    if check is not None:
        check(state.run, adverts)
    if any(a.seal > b.seal for a, b in itertools.pairwise(adverts)):
        raise Refused("a roster in another order than that of its keys.")
    digest = roster_digest(state.run, round, adverts)
    near = graph.neighbours(place, len(adverts), digest)
    own = secrets.token_bytes(shamir.SEED)
    threshold = graph.threshold(len(near) + 1)
    every = [shamir.split(seed, threshold, len(near) + 1) for seed in (own, fresh.mask)]
    private = keys.private_key(fresh.seal)
    boxes = []
    for i, peer in enumerate(near):
        key = _box_key(private, adverts[peer].seal, digest, place, peer)
        boxes.append(keys.sealed(key, every[0][i] + every[1][i]))
    entered = Entered(
        round, SHARED, fresh, place, own, every[0][-1], digest, len(adverts),
        {j: (adverts[j].seal, adverts[j].mask) for j in near},
    )  # fmt: skip
    return State(state.run, round, state.trained, None, entered), packed(Boxes(boxes))


def _box_key(private, other: bytes, digest: bytes, sender: int, receiver: int) -> bytes:
    return keys.derived(keys.agreed(private, other), "box", digest, sender, receiver)


def receive(state: State, request: Any) -> State:
    """Opens the boxes of its neighbours. Who sent none has dropped out."""
    delivery, now = parsed(request, Boxes), state.entered
    if now is None or now.stage != SHARED or now.held:
        raise Refused("boxes, in a round in which this client has shared nothing, or twice.")
    places = delivery.places
    if len(set(places)) < len(places) or len(places) != len(delivery.boxes):
        raise Refused("boxes of the same neighbour twice, or without one.")
    if not set(places) <= set(now.peers):
        raise Refused("boxes of somebody who is no neighbour.")
    least = graph.threshold(len(now.peers) + 1)
    if len(places) + 1 < least:
        raise Refused(f"boxes of {len(places)} neighbours: at least {least - 1} are wanted.")
    private, held = keys.private_key(now.keys.seal), {}
    for peer, box in zip(places, delivery.boxes, strict=True):
        key = _box_key(private, now.peers[peer][0], now.digest, peer, now.place)
        content = keys.opened(key, box)
        if len(content) != 2 * shamir.SHARE:
            raise Refused("a sealed box without two shares in it.")
        held[peer] = content[: shamir.SHARE], content[shamir.SHARE :]
    return replace(state, entered=replace(now, held=held))


def mask(
    state: State, trained: int, broadcast: bytes, layout: ring.Layout, vector: Sequence[np.ndarray]
) -> tuple[State, bytes]:
    """Its vector with all masks, packed. `trained` is the training round, of which there may be
    several tries; it sends one vector at most. `broadcast` is the digest of what it was sent:
    masks cancel only among clients that were sent the same."""
    check_training(state, trained)
    now = state.entered
    if now is None or now.stage != SHARED or not now.held:
        raise Refused("a masked vector, in a round in which this client has shared nothing, or a "
                      "second time.")  # fmt: skip
    masked = [np.array(a) for a in vector]
    ring.checked(masked, layout)
    ring.add_mask(masked, layout, own_key(now.own, now.digest, broadcast, layout))
    private = keys.private_key(now.keys.mask)
    for peer in now.held:
        key = pair_key(private, now.peers[peer][1], now.digest, broadcast, layout)
        ring.add_mask(masked, layout, key, 1 if peer > now.place else -1)
    sent = replace(state, trained=trained, entered=replace(now, stage=MASKED))
    return sent, ring.pack(masked, layout)


def check_training(state: State, trained: int, apart: int = 1) -> None:
    """`apart`: the rounds from one vector of a client to the next."""
    if state.trained >= 0 and trained < state.trained + apart:
        wait = f", and waits {apart} rounds" if apart > 1 else ""
        raise Refused(f"training round {trained}: this client has sent its vector of round "
                      f"{state.trained} already{wait}.")  # fmt: skip


def own_key(seed: bytes, digest: bytes, broadcast: bytes, layout: ring.Layout) -> bytes:
    return keys.derived(seed, "own", digest, broadcast, layout)


def pair_key(private, other: bytes, digest: bytes, broadcast: bytes, layout: ring.Layout) -> bytes:
    return keys.derived(keys.agreed(private, other), "pair", digest, broadcast, layout)


def reveal(state: State, request: Any) -> tuple[State, bytes]:
    """For each neighbour that shared, in order, and itself: the share of its own mask's seed if it
    survived, that of its pairwise masks' seed if not."""
    asked, now = parsed(request, Survivors), state.entered
    if now is None or now.stage != MASKED or asked.round != now.round:
        raise Refused(f"shares of round {asked.round}, in which this client has sent nothing, or a "
                      "second time.")  # fmt: skip
    alive = from_bits(asked.bits, now.clients)
    least = graph.threshold(now.clients)
    if len(alive) < least:
        raise Refused(f"{len(alive)} survivors of {now.clients}: at least {least} are wanted.")
    near = graph.threshold(len(now.peers) + 1)
    if len(alive & set(now.held)) + 1 < near:  # else a client's neighbours could be called dead
        raise Refused(f"survivors among whom are fewer than {near} of this client's neighbours.")
    if now.place not in alive:
        raise Refused("shares from a client that is said to have dropped out.")
    if alive & set(now.peers) - set(now.held):
        raise Refused("a survivor that has shared nothing.")
    shares = {peer: both[peer not in alive] for peer, both in now.held.items()}
    shares[now.place] = now.share
    revealed = b"".join(shares[place] for place in sorted(shares))
    return replace(state, entered=None), revealed

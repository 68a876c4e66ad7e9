"""The messages of a round of secure aggregation, as checked structures of bytes."""

import hashlib
from typing import Any, TypeVar

import msgspec

from mixfl.errors import MixflError

T = TypeVar("T")
LARGEST = 1 << 16  # clients in a roster


class Refused(MixflError):
    """What was asked for, or sent, is against the rules. Nothing was told."""


class Part(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True
):  # fmt: skip
    pass


class Advert(Part, frozen=True):
    """A client's public keys for one round, with its signature if it has a key to sign with."""

    seal: bytes  # boxes for it are sealed with this
    mask: bytes  # pairwise masks
    who: bytes = b""  # fingerprint of the signer's key
    signature: bytes = b""


class Roster(Part, frozen=True):
    round: int
    place: int  # of the client that gets it
    adverts: list[Advert]


class Boxes(Part, frozen=True):
    """Sealed shares. From a client: one for each neighbour. To a client: those of the neighbours at
    `places`."""

    boxes: list[bytes]
    places: list[int] = []


class Survivors(Part, frozen=True):
    round: int
    bits: bytes  # one bit for each place of the roster


def packed(part: Any) -> bytes:
    return msgspec.msgpack.encode(part)


def parsed(data: Any, kind: type[T]) -> T:
    """Raises Refused for anything that is not such a part."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise Refused(f"not a {kind.__name__.lower()} ({type(error).__name__}).") from None


def roster_digest(run: str, round: int, adverts: list[Advert]) -> bytes:
    """What everybody must agree on: the run, the round, and who takes part, in the keys' order."""
    return hashlib.sha256(packed(["mixfl roster 1", run, round, adverts])).digest()


def to_bits(places: set[int], n: int) -> bytes:
    return sum(1 << place for place in places).to_bytes(-(-n // 8), "little")


def from_bits(bits: bytes, n: int) -> set[int]:
    number = int.from_bytes(bits, "little")
    if len(bits) != -(-n // 8) or number >> n:
        raise Refused(f"a list of survivors of another length than {n}.")
    return {place for place in range(n) if number >> place & 1}

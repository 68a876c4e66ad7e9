"""The options of `mixfl data prepare`, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from mixfl.errors import MixflError

COMMON = ("group", "group_examples", "split", "limit", "seed")
WHOLE = {
    "group": (1, 10**9),
    "group_examples": (1, 10**9),
    "limit": (1, 2**62),
    "seed": (0, 2**62),
    "size": (1, 4096),
    "length": (1, 10**5),
}


class Split(NamedTuple):
    by: str  # client, example or official
    fraction: float = 0.0  # for testing


class Partition(NamedTuple):
    kind: str  # iid or dirichlet
    clients: int
    alpha: float = math.inf


@dataclass(frozen=True)
class Options:
    group: int = 1  # raw clients in a composite one, at least
    group_examples: int = 1  # its examples, at least
    split: Split | None = None
    limit: int | None = None  # rows of the source that are read
    seed: int = 0  # of partitions and splits
    client: str | None = None  # the column or field that names a row's client
    label: str | None = None  # the column for a partition by label
    partition: Partition | None = None
    images: str | None = None  # the folder that paths in a file are relative to and stay in
    size: int | None = None  # side of an image, in pixels
    length: int = 100  # characters of a sequence, without the next one
    normalize: bool = False  # TFF's Stack Overflow: lower case, tokens


def parse(format: str, valid: tuple[str, ...], given: Mapping[str, Any], group: int = 1) -> Options:
    """Options as the command line gives them (text or numbers; None is as if not given).

    `group` is the format's own; clients that a partition makes are left as they are.
    """
    found = {key: value for key, value in given.items() if value is not None}
    allowed = [f.name for f in fields(Options) if f.name in (*COMMON, *valid)]
    for key in found:
        if key not in allowed and not (key == "normalize" and found[key] is False):
            raise MixflError(
                f"format '{format}' has no option '{key}'. Valid: {', '.join(allowed)}."
            )
    if "partition" not in found:
        found.setdefault("group", group)
    return Options(**{key: _parsed(key, value) for key, value in found.items()})


def _parsed(key: str, value: Any) -> Any:
    if key in WHOLE:
        low, high = WHOLE[key]
        number = _number(int, value)
        if isinstance(value, bool) or number is None or not low <= number <= high:
            raise MixflError(f"{key} is {value!r}: expected a whole number from {low} to {high}.")
        return number
    if key == "normalize":
        if not isinstance(value, bool):
            raise MixflError(f"normalize is {value!r}: expected true or false.")
        return value
    if not isinstance(value, str) or not value:
        raise MixflError(f"{key} is {value!r}: expected a text.")
    return {"split": _split, "partition": _partition}.get(key, str)(value)


def _split(value: str) -> Split:
    by, _, rest = value.partition(":")
    fraction = _number(float, rest)
    if value == "official":
        return Split("official")
    if by not in ("client", "example") or fraction is None or not 0 < fraction < 1:
        raise MixflError(
            f"split is '{value}': expected client:FRACTION or example:FRACTION with the fraction "
            "for testing between 0 and 1, such as client:0.1, or official."
        )
    return Split(by, fraction)


def _partition(value: str) -> Partition:
    match value.split(":"):
        case ["iid", n] if 0 < (_number(int, n) or 0) <= 10**7:
            return Partition("iid", int(n))
        case ["dirichlet", a, n] if (
            0 < (_number(int, n) or 0) <= 10**7 and 0 < (_number(float, a) or 0) < math.inf
        ):
            return Partition("dirichlet", int(n), float(a))
    raise MixflError(
        f"partition is '{value}': expected iid:CLIENTS or dirichlet:ALPHA:CLIENTS, such as "
        "iid:100 or dirichlet:0.3:100."
    )


def _number(kind: type, value: Any) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        return None

"""The options of `mixfl data prepare`, checked."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, ValidationError, convert

from mixfl.errors import MixflError
from mixfl.validation import check, field_types, key

COMMON = ("group", "group_examples", "split", "limit", "seed")
Billion = Annotated[int, Meta(ge=1, le=10**9)]
Text = Annotated[str, Meta(min_length=1)]


class Split(NamedTuple):
    by: str  # client, example or official
    fraction: float = 0.0  # for testing


class Partition(NamedTuple):
    kind: str  # iid or dirichlet
    clients: int
    alpha: float = math.inf


@dataclass(frozen=True)
class Options:
    group: Billion = key(1, "raw clients in a composite one, at least")
    group_examples: Billion = key(1, "examples of a composite client, at least")
    split: Split | None = None
    limit: Annotated[int, Meta(ge=1, le=2**62)] | None = key(None, "rows of the source to read")
    seed: Annotated[int, Meta(ge=0, le=2**62)] = key(0, "seed of partitions and splits")
    client: Text | None = key(None, "the column or field that names a row's client")
    text: Text | None = key(None, "the column or field with the text")
    label: Text | None = key(None, "the column for a partition by label")
    partition: Partition | None = None
    images: Text | None = key(None, "the folder that paths in a file are relative to and stay in")
    size: Annotated[int, Meta(ge=1, le=4096)] | None = key(None, "side of an image, in pixels")
    length: Annotated[int, Meta(ge=1, le=10**5)] = key(
        100, "characters of a sequence, without the next one"
    )
    normalize: bool = key(False, "TFF's Stack Overflow: lower case, tokens")


OPTIONS = {f.name: f for f in fields(Options)}


def parse(format: str, valid: tuple[str, ...], given: Mapping[str, Any], group: int = 1) -> Options:
    """Options as the command line gives them: text or numbers, None where not given.

    `group` is the format's default; it does not apply to clients that a partition makes.
    """
    values = {name: value for name, value in given.items() if value is not None}
    allowed = [name for name in OPTIONS if name in (*COMMON, *valid)]
    for name in values:
        if name not in allowed and not (name == "normalize" and values[name] is False):
            raise MixflError(
                f"format '{format}' has no option '{name}'. Valid: {', '.join(allowed)}."
            )
    if "partition" not in values:
        values.setdefault("group", group)
    return Options(**{name: _parsed(name, value) for name, value in values.items()})


def _parsed(name: str, value: Any) -> Any:
    if name in ("split", "partition"):
        return {"split": _split, "partition": _partition}[name](str(value))
    type = field_types(Options)[name]
    if isinstance(value, str) and type not in (Text | None, bool):
        value = int(value) if re.fullmatch(r"\s*[+-]?\d{1,20}\s*", value) else value
    return check(name, value, type, OPTIONS[name].metadata["help"])


def _split(text: str) -> Split:
    if text == "official":
        return Split(text)
    by, _, rest = text.partition(":")
    try:
        if by in ("client", "example"):
            return Split(by, convert(rest, Annotated[float, Meta(gt=0, lt=1)], strict=False))
    except ValidationError:
        pass
    raise MixflError(
        f"split = '{text}': expected client:FRACTION or example:FRACTION with the fraction for "
        "testing between 0 and 1, such as client:0.1, or official."
    )


def _partition(text: str) -> Partition:
    clients, alpha = Annotated[int, Meta(ge=1, le=10**7)], Annotated[float, Meta(gt=0, le=1e300)]
    try:
        match text.split(":"):
            case ["iid", n]:
                return Partition("iid", convert(n, clients, strict=False))
            case ["dirichlet", a, n]:
                return Partition(
                    "dirichlet", convert(n, clients, strict=False), convert(a, alpha, strict=False)
                )
    except ValidationError:
        pass
    raise MixflError(
        f"partition = '{text}': expected iid:CLIENTS or dirichlet:ALPHA:CLIENTS, such as iid:100 "
        "or dirichlet:0.3:100."
    )

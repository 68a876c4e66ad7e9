"""What a search tries: for each key a list of values or a range, as `mixfl tune --over` has it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixfl.errors import MixflError
from mixfl.runs.user_input import parse_over
from mixfl.settings import KEYS, RATES

DIGITS = 4  # of a number drawn from a range
EXAMPLE = "--over client_lr=1e-3:1:log or --over local_steps=1,2,4"


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    log: bool = False
    integer: bool = False

    def ends(self) -> list[Any]:
        return [self.low, self.high]

    def suggest(self, trial: Any, key: str) -> Any:
        if self.integer:
            return trial.suggest_int(key, int(self.low), int(self.high), log=self.log)
        value = trial.suggest_float(key, self.low, self.high, log=self.log)
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)

    def plain(self) -> list[Any]:
        return [self.low, self.high, "log" if self.log else "linear"]


@dataclass(frozen=True)
class Values:
    values: tuple[Any, ...]

    def ends(self) -> list[Any]:
        return list(self.values)

    def suggest(self, trial: Any, key: str) -> Any:
        # By place: Optuna tells 1 and true apart by type, and knows few types.
        return self.values[trial.suggest_categorical(key, range(len(self.values)))]

    def plain(self) -> list[Any]:
        return list(self.values)


Space = Mapping[str, Range | Values]


def parse_space(texts: Sequence[str]) -> dict[str, Range | Values]:
    """`key=low:high`, `key=low:high:log` or `key=v1,v2,...`."""
    space: dict[str, Range | Values] = {}
    for text in texts:
        key, equals, given = (part.strip() for part in text.partition("="))
        parts = given.split(":")
        if key in space:
            raise MixflError(f"--over {key} is given twice.")
        if len(parts) == 1 or not equals:
            ((key, values),) = parse_over([text]).items()
            space[key] = Values(tuple(values))
            continue
        try:
            low, high = (number(p) for p in parts[:2])
        except ValueError:
            raise MixflError(f"--over {text}: expected numbers: {EXAMPLE}.") from None
        space[key] = made_range(key, low, high, *parts[2:])
    if not space:
        raise MixflError(f"what to search over? For example: {EXAMPLE}.")
    return space


def space_of(over: Mapping[str, Any]) -> dict[str, Range | Values]:
    """From Python: a list has values; a tuple is (low, high) or (low, high, "log")."""
    space: dict[str, Range | Values] = {}
    for key, given in over.items():
        if isinstance(given, tuple) and 2 <= len(given) <= 3:
            space[key] = made_range(key, *given)
        elif isinstance(given, list) and given:
            space[key] = Values(tuple(given))
        else:
            raise MixflError(
                f"over: {key} = {given!r}: expected a list of values, or a range as a tuple: "
                '(low, high) or (low, high, "log").'
            )
    if not space:
        raise MixflError('what to search over? For example: over={"client_lr": (1e-3, 1, "log")}.')
    return space


def made_range(key: str, low: Any, high: Any, *scale: str) -> Range:
    said = ":".join(map(str, (low, high, *scale)))
    if key == "seed":
        raise MixflError("--over seed: a search has one seed; repeat what it found with others.")
    if scale not in ((), ("log",), ("linear",)):
        raise MixflError(f"--over {key}={said}: expected low:high or low:high:log.")
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, (int, float)) or not math.isfinite(end):
            raise MixflError(f"--over {key}={said}: expected numbers: {EXAMPLE}.")
    log = scale == ("log",)
    if low >= high or (log and low <= 0):
        raise MixflError(
            f"--over {key}={said}: expected low < high" + (", both above 0." if log else ".")
        )
    return Range(low, high, log, isinstance(low, int) and isinstance(high, int) and whole(key))


def whole(key: str) -> bool:
    """May a range between two integers have only integers? Rates and weights are numbers."""
    return key not in RATES and not (key in KEYS and isinstance(KEYS[key].default, float))


def number(text: str) -> float:
    try:
        return int(text)
    except ValueError:
        return float(text)

"""Checks of a task's own keys."""

from typing import Any

from mixfl.errors import MixflError


def check(options: Any, kind: type, **ranges: tuple[float, float]) -> None:
    """Each named field of `options` is a number of `kind` (int or float) within its range."""
    noun = "a whole number" if kind is int else "a number"
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        number = isinstance(value, int if kind is int else int | float)
        if isinstance(value, bool) or not number or not least <= value <= most:
            raise MixflError(f"{name} = {value!r}: expected {noun} from {least} to {most}.")

"""Checks of a task's own keys."""

from typing import Any

import numpy as np

from mixfl.data.examples import ClientData
from mixfl.data.split import held_out_clients
from mixfl.errors import MixflError

VALIDATION = 0.1  # part of the clients for training that is set aside where it is asked for
VALIDATION_HELP = "true: judge also on data set aside for choosing settings (valid/ metrics)"


def set_aside(train: ClientData, seed: int) -> tuple[ClientData, ClientData]:
    """For training, and for choosing settings."""
    chosen = held_out_clients(len(train), VALIDATION, seed)
    return train.select(np.flatnonzero(~chosen)), train.select(np.flatnonzero(chosen))


def check_flags(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise MixflError(f"{name} = {value!r}: expected true or false.")


def check(options: Any, kind: type, **ranges: tuple[float, float]) -> None:
    """Each named field of `options` is a number of `kind` (int or float) within its range."""
    noun = "a whole number" if kind is int else "a number"
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        number = isinstance(value, int if kind is int else int | float)
        if isinstance(value, bool) or not number or not least <= value <= most:
            raise MixflError(f"{name} = {value!r}: expected {noun} from {least} to {most}.")

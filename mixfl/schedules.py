"""Learning rates that change from round to round.

A schedule is a text or a function of the round t = 0, 1, ... A text is a short name of ours or the
name of a schedule in optax, with literals: nothing is run.

    cosine(start, rounds, end=0)                 half a cosine from start to end
    linear(start, end, rounds)                   a straight line
    exponential(start, factor, every=1)          start factor^(t / every)
    warmup_cosine(peak, warmup, rounds, end=0)   a line up to peak in round `warmup`, then a cosine
    piecewise(start, {round: rate, ...})         another rate from each of these rounds on
    cosine_decay_schedule(0.1, decay_steps=500)  any of optax's

Without `rounds`, a schedule of ours takes all rounds of the run. Rates are computed on the host and
are arguments of the compiled round, so a schedule costs no program.
"""

import functools
import inspect
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from mixfl.calls import parsed_call
from mixfl.errors import MixflError, unknown

Schedule = str | Callable[[int], Any]
EXAMPLE = "cosine(0.1, 500)"


def is_schedule(value: Any) -> bool:
    return callable(value) or (isinstance(value, str) and value != "auto")


def check_schedule(key: str, spec: Schedule, rounds: int, auto: bool) -> None:
    """Is it a schedule at all? Computes nothing. `auto`: the key may also be `auto`."""
    if not isinstance(spec, str):
        return
    call = parsed_call(spec)
    if call is not None and spec.strip() != call.name:
        _made(key, spec, rounds)
        return
    short = spec if len(spec) <= 60 else f"{spec[:60]}..."
    or_auto = "or 'auto', " if auto else ""
    raise MixflError(
        f"{key} = {short!r}: expected a finite number above 0, {or_auto}or a schedule of the round "
        f"such as {EXAMPLE}."
    )


def rate_at(key: str, spec: Schedule, rounds: int, round: int) -> float:
    """The rate of a round, which must be finite and above 0."""
    if isinstance(spec, str):
        value = float(_values(key, spec, rounds)[min(round, rounds - 1)])
    else:
        value = _called(key, spec, round)
    if not (math.isfinite(value) and value > 0):
        raise MixflError(
            f"{key} = {shown(spec)} is {value:g} in round {round + 1} of {rounds}: a learning rate "
            "must be finite and above 0 in every round. Let it start above 0, and end there: "
            "cosine(0.1, 500, end=0.001)."
        )
    return value


def rates(key: str, spec: Schedule, rounds: int) -> list[float]:
    """Of all rounds."""
    return [rate_at(key, spec, rounds, t) for t in range(rounds)]


def shown(spec: Any) -> str:
    if callable(spec):
        return f"python:{getattr(spec, '__module__', '?')}.{getattr(spec, '__qualname__', '?')}"
    return str(spec)


def named(key: str, spec: Schedule, rounds: int) -> str:
    """A text by which a run is compared with another one: that of the schedule, or a function's
    name and a checksum of its rates."""
    if isinstance(spec, str):
        return spec
    values = " ".join(f"{v:.4g}" for v in rates(key, spec, rounds))
    return f"{shown(spec)}, rates {zlib.crc32(values.encode()):08x}"


def _called(key: str, function: Callable, round: int) -> float:
    try:
        return float(function(round))
    except Exception as error:
        raise MixflError(
            f"{key} = {shown(function)}: expected a function from the round (0, 1, ...) to a "
            f"number, but for {round} it failed: {type(error).__name__}: {error}"
        ) from error


@functools.lru_cache(64)
def _values(key: str, spec: str, rounds: int) -> np.ndarray:
    """[rounds]"""
    import jax

    schedule = _made(key, spec, rounds)
    try:
        values = np.asarray(jax.vmap(schedule)(np.arange(rounds)), np.float64)
    except Exception as error:
        raise MixflError(f"{key} = {spec} can't be computed: {error}.") from error
    return values


def _made(key: str, spec: str, rounds: int) -> Callable:
    call = parsed_call(spec)
    assert call is not None  # it has been checked
    known = {**_ours(rounds), **_of_optax()}
    if call.name not in known:
        raise unknown(f"schedule of {key}:", call.name, known)
    try:
        return known[call.name](*call.positional, **call.keywords)
    except Exception as error:
        signature = ", ".join(inspect.signature(known[call.name]).parameters)
        raise MixflError(
            f"{key} = {spec}: {str(error).removeprefix('_ours.<locals>.')}. Expected "
            f"{call.name}({signature})."
        ) from None


@functools.cache
def _of_optax() -> dict[str, Callable]:
    import optax

    module = inspect.getmodule(optax.constant_schedule)
    functions = inspect.getmembers(optax, inspect.isfunction)
    return {name: f for name, f in functions if inspect.getmodule(f) is module}


def _ours(rounds_of_run: int) -> dict[str, Callable]:
    import optax

    def cosine(start, rounds=rounds_of_run, end=0.0):
        return optax.cosine_decay_schedule(start, _count(rounds), alpha=end / start)

    def linear(start, end, rounds=rounds_of_run):
        return optax.linear_schedule(start, end, _count(rounds))

    def exponential(start, factor, every=1):
        return optax.exponential_decay(start, _count(every), factor)

    def warmup_cosine(peak, warmup, rounds=rounds_of_run, end=0.0):
        first = peak / (_count(warmup) + 1)  # not 0: a rate is above 0
        return optax.warmup_cosine_decay_schedule(first, peak, warmup, _count(rounds), end)

    def piecewise(start, then):
        at = sorted(then)
        constants = [optax.constant_schedule(float(v)) for v in (start, *(then[t] for t in at))]
        return optax.join_schedules(constants, [_count(t) for t in at])

    return {f.__name__: f for f in (cosine, linear, exponential, warmup_cosine, piecewise)}


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is no number of rounds, which is a whole number from 1 on")
    return value

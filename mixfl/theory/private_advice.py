"""Which algorithm fits under a budget of privacy: the error that is left when it is spent.

A budget fixes the number of rounds and the noise. So algorithms are compared by their error after
these rounds, each at its best learning rate.
"""

import math
from typing import NamedTuple

import numpy as np

from mixfl.theory.advice import CLOSE, Choice, names
from mixfl.theory.predictions import (
    Course,
    Prediction,
    Setup,
    course,
    errors,
    rounds_to,
    steps,
)  # fmt: skip
from mixfl.theory.quadratic import QuadraticModel

WORSE = 1.25


class Afforded(NamedTuple):
    algorithm: str
    error: float  # what is left, as a part of the first error
    eta: float


def repeated(one_round: Course, times: int) -> Course:
    """Many rounds as one, by doubling."""
    whole: Course | None = None
    while times:
        if times % 2:
            whole = one_round if whole is None else then(whole, one_round)
        one_round, times = then(one_round, one_round), times // 2
    assert whole is not None
    return whole


def then(first: Course, second: Course) -> Course:
    return Course(
        second.map @ first.map,
        second.map @ first.shift + second.shift,
        second.map @ first.noise @ second.map.T + second.noise,
    )


def left(
    model: QuadraticModel, algorithm: str, setup: Setup, eta: float, rounds: int
) -> float:  # fmt: skip
    """The expected error after `rounds` rounds, as a part of the first error."""
    with np.errstate(over="ignore", invalid="ignore"):
        first, last = errors(
            model, repeated(course(model, algorithm, setup, eta), rounds), 1
        )  # fmt: skip
    return last / first if math.isfinite(last) else math.inf


def afford(model: QuadraticModel, setup: Setup, rounds: int) -> list[Afforded]:
    """Each algorithm at its own best learning rate."""
    rates = steps(model, setup, below=30)
    tried = [
        [Afforded(a, left(model, a, setup, eta, rounds), eta) for eta in rates]
        for a in names(model)
    ]  # fmt: skip
    return [min(one, key=lambda p: p.error) for one in tried]


def fitting(predictions: list[Afforded]) -> Afforded:
    """The one with the least error. Of several that are close, the one that asks least."""
    least = min(p.error for p in predictions)
    return next(p for p in predictions if p.error <= CLOSE * least)


def too_long(
    model: QuadraticModel, chosen: Prediction, setup: Setup, rounds: int, eta: float
) -> bool:
    """Whether this rate leaves clearly more error than the chosen one."""
    one, other = (left(model, chosen.algorithm, setup, e, rounds) for e in (eta, chosen.eta))
    return one > WORSE * other


def choose_private(
    model: QuadraticModel, setup: Setup, rounds: int, target: float
) -> tuple[Choice, list[Afforded]]:
    """With the rounds to the target, as far as the noise lets them get there."""
    every = afford(model, setup, rounds)
    predictions = [
        Prediction(a, rounds_to(model, a, setup, eta, target, rounds), eta) for a, _, eta in every
    ]
    fits = fitting(every)
    chosen = next(p for p in predictions if p.algorithm == fits.algorithm)
    return Choice(chosen, predictions, any(math.isfinite(p.rounds) for p in predictions)), every

"""Chooses the algorithm and settings for a measured problem, and says what would change them."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mixfl.theory.predictions import (
    ALGORITHMS,
    HORIZON,
    Prediction,
    Setup,
    best,
    course,
    errors,
    steps,
)  # fmt: skip
from mixfl.theory.quadratic import QuadraticModel

# Among algorithms within this factor of the fewest rounds, the one that asks least of clients and
# server: PT sends no gradient, 1-way needs no training at the server.
CLOSE = 1.05


class Choice(NamedTuple):
    chosen: Prediction
    all: list[Prediction]  # each algorithm at its own best learning rate
    reached: bool  # whether the target can be reached


def choose(model: QuadraticModel, setup: Setup, target: float, horizon: int = HORIZON) -> Choice:
    predictions = [best(model, a, setup, target, horizon) for a in names(model)]
    fewest = min(p.rounds for p in predictions)
    if math.isfinite(fewest):
        chosen = next(p for p in predictions if p.rounds <= CLOSE * fewest)
        return Choice(chosen, predictions, True)
    nearest = [closest(model, a, setup, horizon) for a in names(model)]
    predictions = [prediction for _, prediction in nearest]
    return Choice(min(nearest)[1], predictions, False)


def names(model: QuadraticModel) -> list[str]:
    """The algorithms that the problem allows: 1-way needs a central term."""
    both = len({t.federated for t in model.terms}) == 2
    return [a for a in ALGORITHMS if a != "1wgt" or both]


def closest(
    model: QuadraticModel, algorithm: str, setup: Setup, horizon: int
) -> tuple[float, Prediction]:
    """The smallest error at the horizon, and its learning rate."""

    def last(eta: float) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            *_, error = errors(model, course(model, algorithm, setup, eta), min(horizon, 200))
        return error if math.isfinite(error) else math.inf

    error, eta = min((last(eta), eta) for eta in steps(model, setup, 2.0, 8, 6))
    return error, Prediction(algorithm, math.inf, eta)


def central_batch(
    algorithm: str, setup: Setup, v: float, between: float, v_c: float
) -> tuple[int, int]:
    """|B_c| by the rubric of Appendix C, S |B_i| (1-way: K S |B_i|), and corrected by the measured
    variances, so that a round's central noise equals the cohort's."""
    J = 1 if algorithm == "1wgt" else setup.J
    rubric = setup.S * setup.client_batch * (setup.K if algorithm == "1wgt" else 1)
    cohort = v / (setup.K * setup.client_batch) + between  # variance of a client's mean gradient
    if cohort <= 0:
        return rubric, rubric
    return rubric, max(1, round(setup.S * v_c / (J * cohort)))


def changes(
    model: QuadraticModel, setup: Setup, target: float, horizon: int, now: str
) -> Iterator[tuple[str, str]]:
    """What would change the verdict `now`: pairs of a change and the algorithm that it gives."""
    others = [
        ("local steps K = {K}", dict(K=setup.K * 4, J=setup.J * 4)),
        ("local steps K = {K}", dict(K=max(1, setup.K // 4), J=max(1, setup.J // 4))),
        ("{central} central examples a round", dict(central=setup.central * 10)),
        ("{central} central examples a round", dict(central=max(1, setup.central // 10))),
        ("a cohort of {S}", dict(S=setup.S * 10)),
        ("a cohort of {S}", dict(S=max(1, setup.S // 10))),
    ]
    seen = set()
    for words, change in others:
        other = setup.changed(**change)
        if other == setup:
            continue
        then = choose(model, other, target, horizon).chosen.algorithm
        what = words.format(**change)
        if then != now and what not in seen:
            seen.add(what)
            yield what, then
    for factor, word in ((0.1, "a ten times smaller error"), (10.0, "a ten times larger error")):
        if target * factor < 1:
            then = choose(model, setup, target * factor, horizon).chosen.algorithm
            if then != now:
                yield f"{word} as the aim", then

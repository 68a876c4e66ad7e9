"""Tries learning rates on the real problem for some rounds, because a quadratic model does not know
how curvature changes on the way."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.measure.clock import Clock
from mixfl.measure.curvature import Curvature
from mixfl.problem import Params, Problem
from mixfl.settings import Settings

ROUNDS, LONGEST = 10, 40  # of a probe: at first, and if losses are still falling then
FALLING = 0.1  # share of the gain in the second half that counts as still falling
RATES = 6  # at most, a factor of 2 apart
DIVERGED = 18  # at most, as long as all of them diverge
CLEARLY = 0.05  # share of the gain in loss that makes a learning rate clearly better
FASTER = 1.05  # factor in rounds that makes an algorithm clearly better


class Run:
    """Rounds with one learning rate, which can go on later."""

    def __init__(self, problem: Problem, algorithm: str, s: Settings, x: Params, sample: Curvature):
        self.simulator = Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)
        self.state: Any = self.simulator.state(x)
        self.sample, self.losses = sample, np.zeros(0)

    def go_on(self, rounds: int) -> None:
        """To this round."""
        found: list[float] = self.losses.tolist()
        for result in self.simulator.rounds(self.state, len(found), rounds):
            self.state = result.state
            found.append(float(self.sample.losses(self.sample.flat(result.state.x)).sum()))
        self.losses = np.array(found)

    @property
    def loss(self) -> float:
        return late(self.losses)


def late(losses: np.ndarray) -> float:
    """The mean over the second half, because the loss of a single round is noisy."""
    mean = float(np.mean(losses[len(losses) // 2 :]))
    return mean if math.isfinite(mean) else math.inf


def falling(losses: np.ndarray, first: float) -> bool:
    """Whether much of the gain so far came in the second half: then it is too early to judge."""
    quarter = max(len(losses) // 4, 1)
    middle, end = (float(np.mean(losses[i - quarter : i])) for i in (len(losses) // 2, len(losses)))
    return middle - end > FALLING * abs(first - end)


def slower(losses: np.ndarray, best: np.ndarray) -> float:
    """How many times as many rounds a run takes as the best one: to its late loss, or to where it
    ends, whichever is more."""
    n = max(len(losses) // 4, 1)
    middle, end = late(losses), float(np.mean(losses[-n:]))
    if not (math.isfinite(middle) and math.isfinite(end)):
        return math.inf
    last = len(losses) - (n - 1) / 2
    took = [(rounds_until(losses, middle), middle), (last, end)]
    return max(r / min(rounds_until(best, level), r) for r, level in took)


def rounds_until(losses: np.ndarray, level: float) -> float:
    """The round in the middle of the first quarter of the run, wherever it begins, whose mean loss
    is at most `level`; inf if there is none."""
    n = max(len(losses) // 4, 1)
    below = np.flatnonzero(np.convolve(losses, np.ones(n) / n, "valid") <= level)
    return below[0] + (n + 1) / 2 if len(below) else math.inf


class Probed(NamedTuple):
    curves: dict[float, np.ndarray]  # learning rate: loss after each round
    rounds: int
    falling: bool  # whether the best one's loss was still falling at the end

    @property
    def rates(self) -> list[tuple[float, float]]:
        """Learning rates with their losses."""
        return [(eta, late(losses)) for eta, losses in self.curves.items()]

    @property
    def best(self) -> float:
        return best_of(self.curves)

    def without(self, wild: Callable[[float], bool]) -> dict[float, np.ndarray]:
        """The curves of the rates that are not wild; all, if those diverged."""
        tame = {eta: losses for eta, losses in self.curves.items() if not wild(eta)}
        return tame if any(math.isfinite(late(c)) for c in tame.values()) else self.curves


def best_of(curves: Mapping[Any, np.ndarray]) -> Any:
    return min(curves, key=lambda name: late(curves[name]))


def probed(
    start: Callable[[float], Run], eta: float, first: float, clock: Clock, rounds: int = ROUNDS,
    longest: int = LONGEST,
) -> Probed:  # fmt: skip
    """Learning rates with their losses on the sample after some rounds. Tries the predicted rate
    `eta`, half of it and twice it, and goes further while an outer one is best. While the loss of
    the best one is still falling, all runs become twice as long. At last come the rates next to the
    best by a factor of sqrt(2): where curvature limits the step, rounds are inversely proportional
    to it, and a factor of 2 is too coarse. `start(eta)` begins a run from the loss `first`."""
    runs: dict[float, Run] = {}  # by factor
    factor = 1.0

    def losses() -> dict[float, float]:
        return {f: run.loss for f, run in runs.items()}

    def best() -> float:
        return min(runs, key=losses().__getitem__)

    def add(factor: float) -> None:
        runs[factor] = start(eta * factor)
        runs[factor].go_on(rounds)

    def diverged() -> bool:
        return math.isinf(min(losses().values()))

    def lengthen() -> None:
        nonlocal rounds
        while rounds < longest and clock.left(0.7) and falling(runs[best()].losses, first):
            rounds *= 2
            for run in runs.values():
                if math.isfinite(run.loss):
                    run.go_on(rounds)

    for i in clock.repeat("probe of the learning rate", RATES, 1.0, 3):
        add(factor)
        if i < 2:
            factor = (0.5, 2.0)[i]
            continue
        lengthen()
        if not outer(losses()):
            break
        factor = max(runs) * 2 if outer(losses()) > 0 else min(runs) / 2
    while diverged() and len(runs) < DIVERGED:
        add(min(runs) / 2)
        lengthen()
    if diverged():
        raise MixflError(
            f"in the probe, all learning rates from {eta * min(runs):.3g} to {eta * max(runs):.3g} "
            "diverged, so no rate can be recommended. Are the gradients finite?"
        )
    middle = best()
    for side in (0.5**0.5, 2**0.5):
        if clock.left(1.0):
            add(middle * side)
    curves = {eta * f: run.losses for f, run in sorted(runs.items())}
    return Probed(curves, rounds, falling(runs[best()].losses, first))


def doubtful(probe: Probed, predicted: float) -> bool:
    """Whether the losses contradict the prediction: they are still falling when the target should
    have been reached twice."""
    return probe.falling and probe.rounds >= 2 * predicted


def cut_short(probe: Probed, predicted: float) -> bool:
    """Whether a longer probe might have contradicted the prediction, or this one does."""
    return probe.falling and (probe.rounds < LONGEST or doubtful(probe, predicted))


def clearly_best(probes: Mapping[str, Probed], chosen: str) -> str:
    """The chosen algorithm, whose loss is still falling, or the best one if that is faster. By
    rounds: where losses flatten out, a little loss is many of them."""
    curves = {name: probe.curves[probe.best] for name, probe in probes.items()}
    best = best_of(curves)
    return best if slower(curves[chosen], curves[best]) > FASTER else chosen


def decided(eta: float, curves: Mapping[float, np.ndarray], first: float) -> float:
    """The predicted learning rate, or the nearest one that is clearly better in the probe. Only
    clearly, because a few rounds favor steps that are too long or too short for the end."""
    least = late(curves[best_of(curves)])
    most = least + CLEARLY * (first - least)
    good = [e for e, losses in curves.items() if late(losses) <= most]
    return min(good, key=lambda e: abs(math.log(e / eta)))


def outer(losses: dict[float, float]) -> int:
    """1 if the largest is best, -1 if the smallest is, otherwise 0."""
    best = min(losses, key=losses.__getitem__)
    return (best == max(losses)) - (best == min(losses))

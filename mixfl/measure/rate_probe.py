"""Tries learning rates on the real problem for some rounds, because a quadratic model does not know
how curvature changes on the way."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.measure.clock import Clock
from mixfl.measure.curvature import Curvature
from mixfl.problem import Params, Problem
from mixfl.settings import Settings

ROUNDS, LONGEST = 10, 40  # of a probe: at first, and if losses are still falling then
FALLING = 0.1  # share of the gain in the second half that counts as still falling
RATES = 6  # at most, a factor of 2 apart
CLEARLY = 0.05  # share of the gain in loss that makes a learning rate clearly better


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
        """The mean over the second half, because the loss of a single round is noisy."""
        mean = float(np.mean(self.losses[len(self.losses) // 2 :]))
        return mean if math.isfinite(mean) else math.inf


def falling(losses: np.ndarray, first: float) -> bool:
    """Whether much of the gain so far came in the second half: then it is too early to judge."""
    quarter = max(len(losses) // 4, 1)
    middle, end = (float(np.mean(losses[i - quarter : i])) for i in (len(losses) // 2, len(losses)))
    return middle - end > FALLING * abs(first - end)


class Probed(NamedTuple):
    rates: list[tuple[float, float]]  # learning rate, loss
    rounds: int
    falling: bool  # whether the best one's loss was still falling at the end

    @property
    def loss(self) -> float:
        return min(loss for _, loss in self.rates)


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

    for i in clock.repeat("probe of the learning rate", RATES, 1.0, 3):
        add(factor)
        if i < 2:
            factor = (0.5, 2.0)[i]
            continue
        while rounds < longest and clock.left(0.7) and falling(runs[best()].losses, first):
            rounds *= 2
            for run in runs.values():
                if math.isfinite(run.loss):
                    run.go_on(rounds)
        if not outer(losses()):
            break
        factor = max(runs) * 2 if outer(losses()) > 0 else min(runs) / 2
    middle = best()
    for side in (0.5**0.5, 2**0.5):
        if clock.left(1.0):
            add(middle * side)
    rates = sorted((eta * f, loss) for f, loss in losses().items())
    return Probed(rates, rounds, falling(runs[best()].losses, first))


def doubtful(probe: Probed, predicted: float) -> bool:
    """Whether the losses contradict the prediction: they are still falling when the target should
    have been reached twice."""
    return probe.falling and probe.rounds >= 2 * predicted


def clearly_best(losses: dict[str, float], chosen: str, first: float) -> str:
    """The chosen algorithm, or the best one if its loss is clearly less."""
    best = min(losses, key=losses.__getitem__)
    margin = CLEARLY * (first - losses[best])
    return best if losses[best] + margin < losses[chosen] else chosen


def decided(eta: float, probe: list[tuple[float, float]], first: float) -> float:
    """The predicted learning rate, or the nearest one that is clearly better in the probe. Only
    clearly, because a few rounds favor steps that are too long or too short for the end."""
    least = min(loss for _, loss in probe)
    good = [e for e, loss in probe if loss <= least + CLEARLY * (first - least)]
    return min(good, key=lambda e: abs(math.log(e / eta)))


def outer(losses: dict[float, float]) -> int:
    """1 if the largest is best, -1 if the smallest is, otherwise 0."""
    best = min(losses, key=losses.__getitem__)
    return (best == max(losses)) - (best == min(losses))

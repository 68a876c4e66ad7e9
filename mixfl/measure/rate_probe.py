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
from mixfl.theory.predictions import Prediction

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


def settled(losses: np.ndarray, level: float) -> float:
    """The round in the middle of the first quarter of the run, wherever it begins, whose mean loss
    is at most `level`, and that of all rounds from there on; inf if there is none."""
    n = max(len(losses) // 4, 1)
    rest = np.cumsum(losses[::-1])[::-1] / np.arange(len(losses), 0, -1)
    means = np.convolve(losses, np.ones(n) / n, "valid")
    below = np.flatnonzero(np.maximum(means, rest[: len(means)]) <= level)
    return float(below[0]) + (n + 1) / 2 if len(below) else math.inf


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


def aim(least: float, first: float, target: float) -> float:
    """The loss whose error is `target` of the first one, if `least` is the minimum; not nearer to
    that than the noise of a few rounds."""
    return least + max(target, CLEARLY) * (first - least)


def doubtful(probe: Probed, predicted: Prediction, first: float, target: float) -> bool:
    """Whether the losses contradict the prediction: when the target should have been reached twice,
    they are still falling, or the run with the predicted rate was not there, not even with the
    probe's own least loss as the minimum."""
    if not probe.rounds >= 2 * predicted.rounds:
        return False
    level = aim(late(probe.curves[probe.best]), first, target)
    took = settled(probe.curves[predicted.eta], level)
    return probe.falling or took > 2 * predicted.rounds


def cut_short(probe: Probed, predicted: Prediction, first: float, target: float) -> bool:
    """Whether a longer probe might have contradicted the prediction, or this one does."""
    short = probe.falling and probe.rounds < LONGEST
    return short or doubtful(probe, predicted, first, target)


def fastest(probes: Mapping[str, Probed], chosen: str, first: float, target: float):
    """The algorithm and the learning rate that settle first where the error is `target` of the
    first one, as far as the probes know: the least loss of all counts as the minimum. The chosen
    algorithm, if no other one is clearly faster."""
    least = min(loss for probe in probes.values() for _, loss in probe.rates)
    level = aim(least, first, target)
    best = {
        name: min((settled(losses, level), late(losses), eta) for eta, losses in p.curves.items())
        for name, p in probes.items()
    }
    name = min(best, key=best.__getitem__)
    if best[chosen][0] <= FASTER * best[name][0] < math.inf:
        name = chosen
    return name, best[name][-1]


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

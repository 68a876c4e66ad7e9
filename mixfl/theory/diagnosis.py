"""Measures a problem within a time budget and says which algorithm fits."""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.intervals import Interval, interval
from mixfl.problem import Params, Problem
from mixfl.settings import Settings
from mixfl.theory.advice import Choice, central_batch, changes, choose, names
from mixfl.theory.curvature import Curvature
from mixfl.theory.dissimilarity import dissimilarity
from mixfl.theory.gradients import Gradients, Measured
from mixfl.theory.predict import Setup, limited_by_noise, rounds_to
from mixfl.theory.small import small

Report = Callable[[int, int, str], None]
ROUNDS = 20  # with K = 1, along which G~ and B~ are measured
COHORTS = 8  # from which variances are estimated
SAMPLES = 3  # from which beta is
BATCHES = 4  # of a client, at most, for variances
PROBE = 10  # rounds
CLEARLY = 0.05  # of the loss gained
AGAIN = 1 << 20  # rounds whose cohorts no run will see


class Split(NamedTuple):
    """What dividing a population in two by a column would do."""

    population: str
    column: str
    explained: float  # part of sigma_f^2 that the two groups' means explain
    noise: float  # part of the cohort's noise that would go
    g2: float  # with two populations in place of one
    pays: bool


class TermFigures(NamedTuple):
    name: str
    federated: bool
    v: Interval  # variance of one example's gradient
    sigma2: Interval  # at the batch size of the settings
    between: Interval | None  # sigma_f^2
    beta: Interval
    beta_start: float  # at the initial model


class Diagnosis(NamedTuple):
    algorithm: str
    eta: float  # recommended, after the probe
    predicted_eta: float
    choice: Choice
    equal: list[tuple[str, float]]  # rounds of each algorithm at the chosen one's effective step
    setup: Setup
    target: float
    curve: list[tuple[int, float, float]]  # round, G~^2, B~^2
    terms: list[TermFigures]
    beta: Interval  # of the sum
    batch: tuple[int, int]  # |B_c|: the rubric's, the corrected one
    probe: list[tuple[float, float]]  # learning rate, loss after the probe
    changes: list[tuple[str, str]]
    splits: list[Split]
    seconds: float

    @property
    def g2(self) -> float:
        return max(g for _, g, _ in self.curve)

    @property
    def b2(self) -> float:
        return max(b for _, _, b in self.curve)


class Clock:
    """What is left of a budget."""

    def __init__(self, budget: float, report: Report):
        self.begun, self.budget, self.report = time.perf_counter(), budget, report

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.begun

    def repeat(self, what: str, times: int, until: float, least: int = 1):
        """0, 1, ... while the given part of the budget is not spent, and `least` times anyway."""
        for i in range(times):
            if i >= least and self.spent > until * self.budget:
                return
            self.report(i, times, what)
            yield i


def diagnose(
    problem: Problem, s: Settings, target: float = 0.1, budget: float = 120.0,
    column: str | None = None, report: Report = lambda *_: None, horizon: int = 500,
) -> Diagnosis:  # fmt: skip
    if not problem.populations:
        raise MixflError("the problem has no federated term: there is nothing to choose.")
    if len(problem.terms) < 2:
        raise MixflError(
            "the problem has one term only, so there is nothing to mix: use fedavg, or add a term."
        )
    for term in problem.populations:
        if column is not None and column not in term.examples.columns:
            raise MixflError(
                f"the data of '{term.name}' has no column '{column}': it has "
                f"{', '.join(term.examples.columns)}."
            )
    clock = Clock(budget, report)
    batches = max(2, min(BATCHES, *(_batches(p, s) for p in problem.populations)))
    x0 = problem.init(jax.random.key(s.seed))
    curve, x1 = along(problem, s, x0, clock)
    measure = Gradients(problem, s, batches)
    measured = [
        measure.at(x1, AGAIN + i)
        for i in clock.repeat("variances of the gradients", COHORTS, 0.35, 3)
    ]
    curvatures, betas = [], []
    for i in clock.repeat("smoothness", SAMPLES, 0.45, 2):
        curvatures.append(Curvature(problem, measure.simulator, AGAIN + i))
        betas.append(curvatures[-1].smoothness(curvatures[0].flat(x1), seed=i))
    at_start = curvatures[0].smoothness(curvatures[0].flat(x0))
    figures = [
        term_figures(j, problem, s, measured, np.array(betas), at_start)
        for j in range(len(problem.terms))
    ]
    setup, flat = setup_of(problem, s), curvatures[0].flat
    rounds = (AGAIN + i for i in clock.repeat("the problem in small", 2 * COHORTS, 0.6, 4))
    tiny = small(curvatures[0], measure, flat(x1), flat(x0), rounds)
    choice = choose(tiny, setup, target, horizon)
    chosen = choice.chosen
    probe = probed(problem, s, chosen.algorithm, chosen.eta, x0, curvatures[0], clock)
    first = float(curvatures[0].losses(curvatures[0].flat(x0)).sum())
    allowed = [
        (eta, loss) for eta, loss in probe
        if eta <= chosen.eta or not limited_by_noise(tiny, chosen.algorithm, setup, eta, target)
    ]  # fmt: skip
    eta = decided(chosen.eta, allowed, first)
    federated = [f for f in figures if f.federated]
    server = [f for f in figures if not f.federated]
    batch = central_batch(
        chosen.algorithm, setup, sum(f.v.mean for f in federated),
        sum(max(f.between.mean, 0) for f in federated if f.between), sum(f.v.mean for f in server),
    )  # fmt: skip
    splits = [
        split(problem, s, j, column, x1, clock)
        for j, term in enumerate(problem.terms)
        if column is not None and term in problem.populations
    ]
    return Diagnosis(
        chosen.algorithm, eta, chosen.eta, choice,
        [(a, rounds_to(tiny, a, setup, chosen.eta, target, horizon)) for a in names(tiny)],
        setup, target, curve, figures, interval([b[-1] for b in betas]), batch, probe,
        list(changes(tiny, setup, target, horizon)) if choice.reached else [], splits, clock.spent,
    )  # fmt: skip


def _batches(population, s: Settings) -> int:
    """That its largest client has."""
    return -(-int(population.clients.sizes().max()) // s.client_batch)


def most_examples(problem: Problem, wanted: int) -> int:
    """A central batch of so many, or of all that there are."""
    return min([wanted, *(len(t.examples) for t in problem.central if t.examples is not None)])


def setup_of(problem: Problem, s: Settings) -> Setup:
    """K as the largest client reaches it; the central examples are those of the rubric, or as
    many as PT would draw with the batch that is set."""
    K = min(s.local_steps, max(_batches(p, s) for p in problem.populations))
    J = K if s.central_steps == "auto" else s.central_steps
    rubric = s.cohort_size * s.client_batch
    each = most_examples(problem, rubric if s.central_batch == "auto" else s.central_batch)
    clients = min(len(p.clients) for p in problem.populations)
    return Setup(s.cohort_size, K, J, s.client_batch, each * J, s.server_lr, clients)


def along(problem: Problem, s: Settings, x: Params, clock: Clock):
    """G~^2 and B~^2 in rounds of PT with K = 1 (then all algorithms are the same), and the last
    model."""
    once = dataclasses.replace(s, local_steps=1, central_steps=1, client_lr=s.client_lr)
    simulator = Simulator(problem, ALGORITHMS["pt"].build(problem, once), once)
    measure, curve = Gradients(problem, once), []
    state = simulator._state(x)
    for t in clock.repeat("gradient dissimilarity", ROUNDS, 0.25, 5):
        found = measure.at(state.x, t)
        curve.append((t, found.g2, found.b2))
        (result,) = simulator.rounds(state, t, t + 1)
        if not bool(result.info["finite"]):
            raise MixflError(
                f"with client_lr = {s.client_lr:g} the model is no longer finite after round "
                f"{t + 1} of K = 1: lower client_lr to measure."
            )
        state = result.state
    return curve, jax.tree.map(np.asarray, state.x)


def term_figures(j: int, problem: Problem, s: Settings, measured: list[Measured], betas, at_start):
    term = problem.terms[j]
    federated = term in problem.populations
    v = interval([m.terms[j].v for m in measured])
    size = s.client_batch if federated else setup_of(problem, s).central / setup_of(problem, s).J
    sigma2 = Interval(*(a / size for a in v))
    between = interval([m.terms[j].between for m in measured]) if federated else None
    return TermFigures(
        term.name, federated, v, sigma2, between, interval(betas[:, j]), float(at_start[j])
    )


def probed(problem, s: Settings, algorithm: str, eta: float, x, curvature: Curvature, clock: Clock):
    """Losses on the sample after a few rounds from x with eta, half and twice of it; further if
    an outer one is best."""
    found: dict[float, float] = {}
    batch = s.central_batch
    if algorithm == "1wgt" and batch != "auto":  # as many central examples as the others
        batch = most_examples(problem, setup_of(problem, s).central)

    def loss(factor: float) -> float:
        if factor not in found:
            tried = dataclasses.replace(s, client_lr=eta * factor, central_batch=batch)
            simulator = Simulator(problem, ALGORITHMS[algorithm].build(problem, tried), tried)
            state, losses = simulator._state(x), []
            for result in simulator.rounds(state, 0, PROBE):
                losses.append(float(curvature.losses(curvature.flat(result.state.x)).sum()))
            # The mean over the second half: one round's loss jumps about.
            mean = float(np.mean(losses[PROBE // 2 :]))
            found[factor] = mean if math.isfinite(mean) else math.inf
        return found[factor]

    tried = [1.0, 0.5, 2.0]
    for i in clock.repeat("probe of the learning rate", 6, 1.0, 3):
        loss(
            tried[i]
            if i < 3
            else min(found, key=found.__getitem__) * (2 if outer(found) > 0 else 0.5)
        )
        if i >= 2 and not outer(found):
            break
    return sorted((eta * f, value) for f, value in found.items())


def decided(eta: float, probe: list[tuple[float, float]], first: float) -> float:
    """The predicted learning rate, or the nearest to it that the probe finds clearly better: a few
    rounds favour steps that are too long or too short for the end."""
    least = min(loss for _, loss in probe)
    good = [e for e, loss in probe if loss <= least + CLEARLY * (first - least)]
    return min(good, key=lambda e: abs(math.log(e / eta)))


def outer(found: dict[float, float]) -> int:
    """1 if the largest is best, -1 if the smallest is, otherwise 0."""
    best = min(found, key=found.__getitem__)
    return (best == max(found)) - (best == min(found))


def split(problem, s: Settings, j: int, column: str, x: Params, clock: Clock) -> Split:
    """Would two populations, of the clients with more and with less in a column, be better?"""
    term = problem.terms[j]
    measure = Gradients(problem, s, 2, divided_by=column)
    cohort = measure.simulator.feeder.pieces(measure.algorithm, AGAIN)
    values = np.concatenate([_means(p.clients[problem.populations.index(term)], column)
                             for p in cohort])  # fmt: skip
    found = [
        measure.at(x, AGAIN + i, threshold=float(np.median(values)))
        for i in clock.repeat("a divided population", COHORTS, 1.2, 3)
    ]
    explained, totals, g2s, noises = [], [], [], []
    for m in found:
        t = m.terms[j]
        if t.upper is None or not 0 < t.share < 1:
            continue
        lower = (t.gradient - t.share * t.upper) / (1 - t.share)
        apart = t.share * (1 - t.share) * float(np.sum((t.upper - lower) ** 2))
        # What two groups at random would be apart, by the noise of their means.
        chance = (t.between + t.v / (2 * s.client_batch)) / s.cohort_size
        explained.append(apart - chance)
        totals.append(t.between)
        noises.append(t.between + t.v / (min(s.local_steps, 2) * s.client_batch))
        others = [o.gradient for k, o in enumerate(m.terms) if k != j]
        weights = [o.weight for k, o in enumerate(problem.terms) if k != j]
        g2s.append(float(dissimilarity(
            [t.share * t.upper, (1 - t.share) * lower, *others],
            [t.share * term.weight, (1 - t.share) * term.weight, *weights],
        )[0]))  # fmt: skip
    if not explained:
        raise MixflError(
            f"the clients of '{term.name}' are alike in '{column}': there is nothing to divide."
        )
    gain = max(float(np.mean(explained)), 0.0)
    part = gain / max(float(np.mean(totals)), gain, 1e-30)
    noise = gain / max(float(np.mean(noises)), 1e-30)
    return Split(term.name, column, part, noise, float(np.mean(g2s)), part > 0.5 and noise > 0.2)


def _means(feed: Any, column: str) -> np.ndarray:
    """Per client, the mean of a column over its examples."""
    mask = np.asarray(feed.batches.mask, np.float64)
    values = np.asarray(feed.batches.data[column], np.float64)
    values = values.reshape(*mask.shape, -1).mean(-1)
    return (values * mask).sum((1, 2)) / np.maximum(mask.sum((1, 2)), 1)

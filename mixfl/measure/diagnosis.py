"""Measures a problem within a time budget and recommends an algorithm and its settings."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from mixfl.algorithms.epochs import mean_steps
from mixfl.engine.first_model import first_model
from mixfl.errors import MixflError
from mixfl.measure.clock import Clock, Report
from mixfl.measure.curvature import Curvature
from mixfl.measure.gradients import Gradients, Measured, Term
from mixfl.measure.population_split import Split, check_column, split
from mixfl.measure.private_diagnosis import (
    Figures,
    private_figures,
    private_plan,
    probe_settings,
    public,
    with_all_parameters,
)
from mixfl.measure.quadratic_model import directions, quadratic_model
from mixfl.measure.rate_probe import (
    Probed,
    Run,
    cut_short,
    decided,
    doubtful,
    fastest,
    probed,
)
from mixfl.problem import Params, Problem
from mixfl.settings import SENT_EXACTLY, Settings
from mixfl.theory.advice import Choice, central_batch, changes, choose, names
from mixfl.theory.intervals import Interval, half_width, interval
from mixfl.theory.predictions import Prediction, Setup, limited_by_noise, rounds_to
from mixfl.theory.private_advice import Afforded, choose_private, too_long

ROUNDS = 20  # with K = 1, to measure G~ and B~
COHORTS = 16  # at most, to estimate variances
LOOKS = (4, 8)  # cohorts after which variances may be accurate enough
ACCURATE = 0.15  # half of an interval, as a part of what it is about
SPLIT = 8  # cohorts for a divided population
SAMPLES = 3  # at most, to estimate beta
BATCHES = 4  # the most batches of a client, for variances
AGAIN = 1 << 20  # measurements use cohorts from this round on, which no run will see
OPTIMIZERS = ("client_opt", "server_opt", "central_opt", "merge_opt")
PLAIN: dict[str, Any] = {
    **dict.fromkeys(OPTIMIZERS, "sgd"), "central_lr": "auto", "grad_clip": "off",
    "weight_decay": 0.0, "proximal": 0.0, "compute": "float32", **SENT_EXACTLY,
}  # fmt: skip


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
    private: Figures | None = None
    tried: Mapping[str, float] = MappingProxyType({})  # losses in probes, if those decided
    cut_short: bool = False  # the time ran out before probes could contradict the model or decide

    @property
    def g2(self) -> float:
        return max(g for _, g, _ in self.curve)

    @property
    def b2(self) -> float:
        return max(b for _, _, b in self.curve)


def diagnose(
    problem: Problem, s: Settings, target: float = 0.1, budget: float = 60.0,
    column: str | None = None, report: Report = lambda *_: None, horizon: int = 500,
) -> Diagnosis:  # fmt: skip
    """`column` is a column by which clients might be divided. `horizon` is the most rounds to
    predict. Optimizers are plain SGD and `central_lr` is `auto`, whatever `s` has. Of a rate that
    is a schedule, the first round's counts. If `s` is private, the measurements are not."""
    check_problem(problem, column)
    private = private_plan(problem, dataclasses.replace(s.at(0), **PLAIN))
    s = public(s)
    # Clipping would hide a step that is too long.
    s = dataclasses.replace(s.at(0), **PLAIN, clip="off", aggregation="mean")
    clock = Clock(budget, report)
    setup = setup_of(problem, s)
    x0 = first_model(problem, s.seed)
    curve, x1 = along(problem, s, x0, clock)
    measure = Gradients(problem, s, batches_to_measure(problem, s))
    curvature = Curvature(problem, measure.simulator, AGAIN)
    x, start = curvature.flat(x1), curvature.flat(x0)
    betas: list[np.ndarray] = []
    for i in clock.repeat("smoothness", SAMPLES, 0.35, 2):
        betas.append(curvature.of_round(AGAIN + i).smoothness(x, seed=i))
        if i > 0 and all(accurate(b) for b in np.transpose(betas)):
            break
    at_start = curvature.smoothness(start)
    subspace = directions(curvature, x, start)
    basis = jax.vmap(curvature.unravel)(subspace.basis)
    measured: list[Measured] = []
    for i in clock.repeat("gradients and their noise", COHORTS, 0.6, 4):
        measured.append(measure.at(x1, AGAIN + i, basis))
        if len(measured) in LOOKS and noise_known(measured, setup):
            break
    figures = [
        term_figures(j, problem, setup, measured, np.array(betas), at_start)
        for j in range(len(problem.terms))
    ]
    model = quadratic_model(problem, subspace, measured)
    fits: list[Afforded] = []
    if private is None:
        choice = choose(model, setup, target, horizon)
    else:
        model = with_all_parameters(model, curvature, x, subspace.basis, measured)
        setup, horizon = private.setup(setup), private.s.rounds
        choice, fits = choose_private(model, setup, horizon, target)
    chosen = choice.chosen
    eta: float | None = None
    tried: dict[str, float] = {}
    noised = private and functools.partial(probe_settings, private, setup, model)
    first = float(curvature.losses(start).sum())
    begin = functools.partial(runs_of, problem, s, setup, x0, curvature, noised or None)
    probe = probed(begin(chosen.algorithm), chosen.eta, first, clock)
    in_doubt = private is None and doubtful(probe, chosen, first, target)
    if in_doubt and clock.left(0.8):
        chosen, probe, eta, tried = compared(begin, choice, probe, first, target, clock)
    if private is None:
        wild = functools.partial(limited_by_noise, model, chosen.algorithm, setup, target=target)
    else:  # a few rounds favor steps whose noise is too much for all of them
        wild = functools.partial(too_long, model, chosen, setup, rounds=horizon)
    # Noise that was measured on a model in doubt does not count.
    allowed = probe.without(lambda eta: not tried and eta > chosen.eta and wild(eta=eta))
    divided = splits(problem, s, column, x1, clock)
    return Diagnosis(
        algorithm=chosen.algorithm,
        # Where the model is in doubt, so is its learning rate.
        eta=decided(chosen.eta, allowed, first) if eta is None else eta,
        predicted_eta=chosen.eta,
        choice=choice,
        equal=[(a, rounds_to(model, a, setup, chosen.eta, target, horizon)) for a in names(model)],
        setup=setup,
        target=target,
        curve=curve,
        terms=figures,
        beta=interval([b[-1] for b in betas]),
        batch=recommended_batch(chosen.algorithm, setup, figures),
        probe=probe.rates,
        tried=tried,
        cut_short=private is None and not tried and cut_short(probe, chosen, first, target),
        changes=list(changes(model, setup, target, horizon, chosen.algorithm))
        if choice.reached and private is None and not tried
        else [],
        splits=divided,
        seconds=clock.spent,
        private=private and private_figures(private, model, setup, chosen.eta, fits, x.size),
    )


def splits(
    problem: Problem, s: Settings, column: str | None, x: Params, clock: Clock
) -> list[Split]:
    """Each population, divided by the column; none without a column."""
    return [
        split(
            problem, s, j, column, x,
            (AGAIN + i for i in clock.repeat("a divided population", SPLIT, 1.2, 3)),
        )
        for j, term in enumerate(problem.terms)
        if column is not None and term in problem.populations
    ]  # fmt: skip


def check_problem(problem: Problem, column: str | None) -> None:
    if not problem.populations:
        raise MixflError("the problem has no federated term: there is nothing to choose.")
    if len(problem.terms) < 2:
        raise MixflError(
            "the problem has only one term, so there is nothing to mix: use fedavg, or add a term."
        )
    if apart := [t.name for t in problem.populations if t.settings]:
        raise MixflError(
            f"the population '{apart[0]}' has settings of its own. The theory knows one K, one "
            "batch and one rate for all: leave out settings=... of Federated to measure."
        )
    if column is not None:
        check_column(problem, column)


def batches_to_measure(problem: Problem, s: Settings) -> int:
    """Batches of each client to measure: at least two, to separate a batch's noise from the
    client's own difference."""
    return max(2, min(BATCHES, *(_batches(p, s) for p in problem.populations)))


def recommended_batch(algorithm: str, setup: Setup, figures: list["TermFigures"]):
    federated = [f for f in figures if f.federated]
    return central_batch(
        algorithm, setup, sum(f.v.mean for f in federated),
        sum(max(f.between.mean, 0) for f in federated if f.between),
        sum(f.v.mean for f in figures if not f.federated),
    )  # fmt: skip


def _batches(population, s: Settings) -> int:
    """The number of batches of the largest client."""
    return -(-int(population.clients.sizes().max()) // s.client_batch)


def most_examples(problem: Problem, wanted: int) -> int:
    """The size of a central batch: as wanted, or all examples if there are fewer."""
    return min([wanted, *(len(t.examples) for t in problem.central if t.examples is not None)])


def setup_of(problem: Problem, s: Settings) -> Setup:
    """The paper's settings. K is at most what the largest client reaches (local epochs: the mean).
    The central examples follow the rubric, or what PT would draw with the given `central_batch`."""
    most = max(_batches(p, s) for p in problem.populations) * (s.local_epochs or 1)
    K = min(mean_steps(problem, s), most)
    J = K if s.central_steps == "auto" else s.central_steps
    rubric = s.cohort_size * s.client_batch
    each = most_examples(problem, rubric if s.central_batch == "auto" else s.central_batch)
    return Setup(
        s.cohort_size, K, J, s.client_batch, each * J, s.server_lr,
        eta_m=None if s.merge_lr == "auto" else s.merge_lr,
        clients=min(len(p.clients) for p in problem.populations),
    )  # fmt: skip


def along(problem: Problem, s: Settings, x: Params, clock: Clock):
    """G~^2 and B~^2 along rounds with K = 1 (where all algorithms are the same), and the last
    model."""
    once = dataclasses.replace(s, local_steps=1, central_steps=1)
    merge = 1.0 if s.merge_lr == "auto" else s.merge_lr
    measure = Gradients(problem, once, step=s.client_lr * s.server_lr * merge)
    curve = []
    for t in clock.repeat("gradient dissimilarity", ROUNDS, 0.25, 5):
        g2, b2, x = measure.stepped(x, t)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(x)):
            raise MixflError(
                f"with client_lr = {s.client_lr:g} the model is no longer finite after round "
                f"{t + 1} of K = 1: lower client_lr to measure."
            )
        curve.append((t, g2, b2))
    return curve, jax.tree.map(np.asarray, x)


def accurate(values) -> bool:
    """Whether the interval of these values is narrow, compared with their mean."""
    return half_width(values) <= ACCURATE * abs(float(np.mean(values)))


def noise_known(measured: list[Measured], setup: Setup) -> bool:
    """Whether the noise of each term is known well enough to predict with: the variance of a
    client's mean gradient, or of a central example's; in all parameters and in the model's
    directions."""

    examples = setup.K * setup.client_batch

    def noises(t: Term) -> tuple[float, float]:
        inside = np.trace(t.v_matrix) / examples + np.trace(t.between_matrix)
        return t.v / examples + t.between, float(inside)

    every = np.array([[noises(t) for t in m.terms] for m in measured])  # [cohorts, terms, 2]
    return all(accurate(values) for values in every.reshape(len(measured), -1).T)


def term_figures(
    j: int, problem: Problem, setup: Setup, measured: list[Measured], betas, at_start
) -> TermFigures:
    term = problem.terms[j]
    federated = term in problem.populations
    v = interval([m.terms[j].v for m in measured])
    size = setup.client_batch if federated else setup.central / setup.J
    between = interval([m.terms[j].between for m in measured]) if federated else None
    return TermFigures(
        term.name, federated, v, Interval(*(a / size for a in v)), between, interval(betas[:, j]),
        float(at_start[j]),
    )  # fmt: skip


def compared(
    begin: Callable[[str], Callable[[float], Run]], choice: Choice, probe: Probed, first: float,
    target: float, clock: Clock,
) -> tuple[Prediction, Probed, float, dict[str, float]]:  # fmt: skip
    """The algorithm that is fastest in probes, its probe, its learning rate, and the losses of all.
    The others begin with the rate that was predicted for them, as far off as that of the chosen one
    was."""
    probes = {choice.chosen.algorithm: probe}
    for p in choice.all:
        if p.algorithm not in probes:
            eta = p.eta * probe.best / choice.chosen.eta
            n = probe.rounds
            with contextlib.suppress(MixflError):  # it diverges
                probes[p.algorithm] = probed(begin(p.algorithm), eta, first, clock, n, n)
    losses = {a: min(loss for _, loss in found.rates) for a, found in probes.items()}
    name, eta = fastest(probes, choice.chosen.algorithm, first, target)
    return next(p for p in choice.all if p.algorithm == name), probes[name], eta, losses


def runs_of(
    problem: Problem, s: Settings, setup: Setup, x: Params, curvature: Curvature,
    noised: Callable[[float], Settings] | None, algorithm: str,
) -> Callable[[float], Run]:  # fmt: skip
    """Begins runs from x with a learning rate. `noised`: the settings of a private run with it."""
    batch = s.central_batch
    if algorithm == "1wgt" and batch != "auto":  # as many central examples as the others
        batch = most_examples(problem, setup.central)

    def start(eta: float) -> Run:
        used = s if noised is None else noised(eta)
        used = dataclasses.replace(used, client_lr=eta, central_batch=batch)
        return Run(problem, algorithm, used, x, curvature)

    return start

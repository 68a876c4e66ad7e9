"""Predicts what each algorithm does on a quadratic model of a problem, without randomness.

A round is an affine map of the model (and, in 2-way, of the terms' last gradients) plus noise with
a known covariance. This gives the mean and covariance of the model after each round, and from them
the expected error f - f*.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mixfl.theory.quadratic import QuadraticModel, QuadraticTerm

ALGORITHMS = ("pt", "1wgt", "2wgt")
HORIZON = 2000
NEARLY, MARGIN = 1.08, 0.8
KEPT = 10  # rounds for which the error must stay below the target


@dataclass(frozen=True)
class Setup:
    """The paper's settings. `central` is the number of central examples in a round: J batches in PT
    and 2-way, one batch in 1-way."""

    S: int
    K: int
    J: int
    client_batch: int
    central: int
    eta_s: float = 1.0
    eta_m: float | None = None  # None: 1, for 2-way 1 / terms
    clients: int = 1 << 30  # of the population; a cohort of all clients has no sampling noise
    noise: float = 0.0  # of privacy, on a cohort's sum, in clip norms
    clip: float | None = None  # the clip norm C; None: the usual norm of a client's change

    def changed(self, **changes) -> "Setup":
        return dataclasses.replace(self, **changes)


class Local(NamedTuple):
    """A term's local steps from z along its gradient plus an augmenting gradient a:
    Delta = (power - 1) z - push (gradient + a) + noise."""

    power: np.ndarray  # A^n, A = 1 - eta H
    push: np.ndarray  # eta (1 + A + ... + A^(n-1))
    noise: np.ndarray  # covariance
    rate: float  # eta n


def local(term: QuadraticTerm, setup: Setup, eta: float) -> Local:
    values, vectors = np.linalg.eigh(term.hessian)
    federated = term.federated
    n = setup.K if federated else setup.J
    eta = eta if federated else eta * setup.eta_s
    factors = (1 - eta * values)[None] ** np.arange(n)[:, None]  # [n, r]
    sums = factors.sum(0)
    push = eta * (vectors * sums) @ vectors.T
    size = setup.client_batch if federated else max(setup.central / setup.J, 1.0)
    turned = vectors.T @ (term.v / size) @ vectors
    noise = eta**2 * vectors @ (turned * (factors.T @ factors)) @ vectors.T
    if federated:
        left = max(setup.clients - setup.S, 0) / max(setup.clients - 1, 1)
        noise = left * (noise + push @ term.between @ push) / setup.S
    return Local((vectors * (1 - eta * values) ** n) @ vectors.T, push, noise, eta * n)


def clip_norm(term: QuadraticTerm, setup: Setup, eta: float) -> float:
    """C, or the usual norm of what a client's own data does in K steps."""
    if setup.clip is not None:
        return setup.clip
    K = setup.K
    return eta * math.sqrt(K**2 * term.square + K * term.variance / setup.client_batch)


def private_local(model: QuadraticModel, term: QuadraticTerm, setup: Setup, eta: float) -> Local:
    """Local steps; on a population's, the noise of privacy, which is independent of them and has
    the same deviation on every parameter."""
    steps = local(term, setup, eta)
    if not (term.federated and setup.noise):
        return steps
    deviation = setup.noise * clip_norm(term, setup, eta) / setup.S
    copies = np.ones(len(term.gradient)) if model.copies is None else model.copies
    return steps._replace(noise=steps.noise + deviation**2 * np.diag(copies))


def total(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.sum(list(parts), axis=0)


class Course(NamedTuple):
    """One round: y' = map y + shift + noise. The first part of y is the model."""

    map: np.ndarray
    shift: np.ndarray
    noise: np.ndarray


def course(model: QuadraticModel, algorithm: str, setup: Setup, eta: float) -> Course:
    """The affine map of one round."""
    return {"pt": parallel, "1wgt": one_way, "2wgt": two_way}[algorithm](model, setup, eta)


def parallel(model: QuadraticModel, setup: Setup, eta: float) -> Course:
    eta_m = 1.0 if setup.eta_m is None else setup.eta_m
    one = np.eye(len(model.gradient))
    steps = [
        (private_local(model, t, setup, eta), setup.eta_s if t.federated else 1.0, t)
        for t in model.terms
    ]
    return Course(
        one + eta_m * total(s * (d.power - one) for d, s, _ in steps),
        -eta_m * total(s * d.push @ t.gradient for d, s, t in steps),
        eta_m**2 * total(s**2 * d.noise for d, s, _ in steps),
    )


def one_way(model: QuadraticModel, setup: Setup, eta: float) -> Course:
    one = np.eye(len(model.gradient))
    populations = [t for t in model.terms if t.federated]
    server = [t for t in model.terms if not t.federated]
    steps = [(private_local(model, t, setup, eta), t) for t in populations]
    bend, slope = total(t.hessian for t in server), total(t.gradient for t in server)
    weight = sum(t.weight for t in populations)
    push = setup.eta_s * total(t.weight / weight * d.push for d, t in steps)
    noise = push @ total(t.v / setup.central for t in server) @ push
    return Course(
        one + setup.eta_s * total(d.power - one for d, _ in steps) - push @ bend,
        -setup.eta_s * total(d.push @ t.gradient for d, t in steps) - push @ slope,
        noise + setup.eta_s**2 * total(d.noise for d, _ in steps),
    )


def two_way(model: QuadraticModel, setup: Setup, eta: float) -> Course:
    m, r = len(model.terms), len(model.gradient)
    eta_m = 1 / m if setup.eta_m is None else setup.eta_m
    one, size = np.eye(r), (m + 1) * r
    at = [slice((j + 1) * r, (j + 2) * r) for j in range(m)]  # of the terms' last gradients
    x = slice(0, r)
    map_, shift, noise = np.zeros((size, size)), np.zeros(size), np.zeros((size, size))
    map_[x, x] = one
    for j, term in enumerate(model.terms):
        d = private_local(model, term, setup, eta)
        merge = eta_m * (setup.eta_s if term.federated else 1.0)
        map_[x, x] += merge * (d.power - one)
        shift[x] -= merge * d.push @ term.gradient
        map_[at[j], x] = (one - d.power) / d.rate
        shift[at[j]] = d.push @ term.gradient / d.rate
        for other in range(m):
            if other != j:
                map_[x, at[other]] -= merge * d.push
                map_[at[j], at[other]] = d.push / d.rate - one
        into = np.zeros((size, r))
        into[x], into[at[j]] = merge * one, -one / d.rate
        noise += into @ d.noise @ into.T
    return Course(map_, shift, noise)


def errors(model: QuadraticModel, one_round: Course, rounds: int):
    """The expected f - f* after 0, 1, ... rounds."""
    for of_mean, of_noise in error_parts(model, one_round, rounds):
        yield of_mean + of_noise


def error_parts(model: QuadraticModel, one_round: Course, rounds: int):
    """The expected f - f* in two parts: that of the mean model, and what the noise of the rounds so
    far adds. The second never falls.

    With R^T R = the Hessian and y = (model, last gradients, 1), a round is y' = A y + noise, and
    f - f* = |L y|^2 / 2 for L = R (1, 0, -optimum). After t rounds it is |L A^t y|^2 / 2, and the
    noise of a round that is s rounds old adds tr(L A^s noise (L A^s)^T) / 2. So only L A^t is
    carried along, which has few rows.
    """
    r, size = len(model.gradient), len(one_round.shift)
    values, vectors = np.linalg.eigh(model.hessian)
    root = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    look = np.zeros((r, size + 1))
    look[:, :r], look[:, size] = root, -root @ optimum(model)
    step = np.zeros((size + 1, size + 1))
    step[:size, :size], step[:size, size], step[size, size] = one_round.map, one_round.shift, 1
    first = np.concatenate([model.start, np.zeros(size - r), [1.0]])
    of_noise = 0.0
    for _ in range(rounds + 1):
        off = look @ first
        yield 0.5 * float(off @ off), of_noise
        now = look[:, :size]
        of_noise += 0.5 * float(np.vdot(now @ one_round.noise, now))
        look = look @ step


def optimum(model: QuadraticModel) -> np.ndarray:
    return -np.linalg.pinv(model.hessian, rcond=1e-6, hermitian=True) @ model.gradient


def rounds_to(
    model: QuadraticModel, algorithm: str, setup: Setup, eta: float, target: float,
    horizon: int = HORIZON,
) -> float:  # fmt: skip
    """The first round from which the expected error stays below `target` times the first error, for
    at least ten rounds; inf if there is none. Interpolated between two rounds by the logarithm of
    the error."""
    goal, since, before, at = math.inf, math.inf, math.nan, math.nan
    with np.errstate(over="ignore", invalid="ignore"):
        parts = error_parts(model, course(model, algorithm, setup, eta), horizon + KEPT)
        for t, (of_mean, of_noise) in enumerate(parts):
            error = of_mean + of_noise
            goal = target * error if t == 0 else goal
            if error > goal:
                since, before = math.inf, error
            elif since == math.inf:
                since, at = t, error
            if t - since >= KEPT:
                part = math.log(goal / max(at, 1e-300)) / math.log(before / max(at, 1e-300))
                return since - part
            # It diverges, or its noise alone, which never falls, is above the goal.
            if not error < 1e6 * goal / target or of_noise > goal:
                return math.inf
    return math.inf


class Prediction(NamedTuple):
    algorithm: str
    rounds: float
    eta: float


def steps(
    model: QuadraticModel, setup: Setup, ratio: float = 2**0.5, below: int = 16, above: int = 14
):
    """Client learning rates to try, around the one whose effective step is 1 / beta."""
    beta = float(np.linalg.eigvalsh(model.hessian)[-1])
    middle = 1 / (max(beta, 1e-30) * setup.K * setup.eta_s)
    return [middle * ratio**i for i in range(-below, above + 1)]


def best(
    model: QuadraticModel, algorithm: str, setup: Setup, target: float, horizon: int = HORIZON
) -> Prediction:
    """The prediction with the smallest learning rate that needs about the fewest rounds to get a
    bit below the target. (A step that is too long for the noise never gets there; one that is too
    short only takes longer.)"""
    tried = []
    fewest = float(horizon)
    for eta in steps(model, setup):
        # No need to follow one that is already worse.
        n = rounds_to(model, algorithm, setup, eta, MARGIN * target, int(NEARLY * fewest) + 1)
        tried.append(Prediction(algorithm, n, eta))
        fewest = min(fewest, n)
    good = [p for p in tried if p.rounds <= NEARLY * fewest]
    if not good:
        return Prediction(algorithm, np.inf, np.nan)
    eta = good[0].eta
    return Prediction(algorithm, rounds_to(model, algorithm, setup, eta, target, horizon), eta)


def limited_by_noise(
    model: QuadraticModel, algorithm: str, setup: Setup, eta: float, target: float
) -> bool:
    """Whether steps of this length are stable but their noise keeps the error above the target."""
    one_round = course(model, algorithm, setup, eta)
    if np.abs(np.linalg.eigvals(one_round.map)).max() >= 1:
        return False
    *_, last = errors(model, one_round, 300)
    first = next(errors(model, one_round, 0))
    return bool(last > target * first)

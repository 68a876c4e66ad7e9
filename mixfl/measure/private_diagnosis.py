"""What a budget of privacy means for a problem: the noise, and which algorithm fits under it.

The noise of a cohort's sum U is known exactly: independent, of standard deviation z C, on every
parameter. z follows from the budget. C is what the user gives, or, if it is adaptive, the usual
norm of a client's change. The quadratic model has a few directions, but noise goes everywhere: one
more coordinate stands for all other parameters, with their mean curvature.

The measurements themselves have no noise.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mixfl.aggregation.private import deviations
from mixfl.errors import MixflError
from mixfl.measure.curvature import Curvature
from mixfl.measure.gradients import Measured
from mixfl.privacy.budget import Budget, budget, settled
from mixfl.problem import Problem
from mixfl.settings import Settings
from mixfl.theory.predictions import Setup, clip_norm
from mixfl.theory.private_advice import Afforded, afford
from mixfl.theory.quadratic import QuadraticModel

PROBES = 4  # random vectors, for the mean curvature
FACTORS = (0.25, 4.0)  # other epsilons


class Private(NamedTuple):
    """A private run that is planned."""

    plan: Budget
    s: Settings  # with the noise

    @property
    def epsilon(self) -> float:
        assert self.s.dp_noise_multiplier is not None
        return self.plan.spent(self.s.dp_noise_multiplier, self.s.rounds)

    def setup(self, setup: Setup) -> Setup:
        clip = None if self.s.dp_clip == "adaptive" else float(self.s.dp_clip)
        return setup.changed(noise=deviations(self.s)[0], clip=clip)

    def at(self, epsilon: float) -> "Private":
        """With the noise for another epsilon."""
        noise = 0.0 if math.isinf(epsilon) else self.plan.noise_for(epsilon, self.s.rounds)
        return self._replace(s=dataclasses.replace(self.s, dp_noise_multiplier=noise))


class Figures(NamedTuple):
    """What is said about privacy."""

    epsilon: float
    delta: float
    noise_multiplier: float
    rounds: int
    clip: float  # at the chosen learning rate
    norm: float  # of a client's change there
    deviation: float  # of the noise on each parameter of the cohort's mean
    parameters: int
    left: Sequence[Afforded]
    others: Sequence[tuple[float, Sequence[Afforded]]]  # other epsilons


def private_plan(problem: Problem, s: Settings) -> Private | None:
    """None if no privacy is asked for."""
    if not s.private:
        return None
    if s.dp_mechanism != "gaussian":
        raise MixflError(
            f"diagnose with mechanism = {s.dp_mechanism}: its predictions are for noise that is "
            "independent from round to round. Leave out the mechanism."
        )
    s = settled(problem, "pt", s)
    plan = budget(problem, "pt", s)
    assert plan is not None
    return Private(plan, s)


def public(s: Settings) -> Settings:
    """The same settings without privacy, to measure."""
    if not s.private:
        return s
    plain: dict[str, Any] = {
        f.name: f.default for f in dataclasses.fields(Settings) if f.name.startswith("dp_")
    }
    return dataclasses.replace(s, **plain, sampling="uniform", cohort_cap="auto")


def probe_settings(private: Private, setup: Setup, model: QuadraticModel, eta: float) -> Settings:
    """A private run with the clip norm that an adaptive one would find."""
    clip = max(clip_norm(t, private.setup(setup), eta) for t in model.terms if t.federated)
    seed = private.s.seed if private.s.dp_seed is None else private.s.dp_seed
    return dataclasses.replace(private.s, dp_clip=clip, dp_seed=seed)


def with_all_parameters(
    model: QuadraticModel, curvature: Curvature, x, basis, measured: Sequence[Measured]
) -> QuadraticModel:
    """The model with the norms of clients' gradients, and a coordinate for all parameters that its
    directions leave out."""
    rest = x.size - len(basis)
    curves = np.zeros(len(model.terms))
    if rest > 0:
        for i in range(PROBES):
            v = jax.random.rademacher(jax.random.key(i), x.shape, x.dtype)
            v = v - (basis @ v) @ basis
            curves += np.asarray(curvature.products(x, v) @ v, np.float64) / PROBES / rest
    terms = []
    for j, term in enumerate(model.terms):
        mean = np.mean([m.terms[j].gradient for m in measured], axis=0)
        between = max(float(np.mean([m.terms[j].between for m in measured])), 0.0)
        variance = max(float(np.mean([m.terms[j].v for m in measured])), 0.0)
        term = term._replace(square=float(mean @ mean) + between, variance=variance)
        terms.append(wider(term, abs(float(curves[j]))) if rest > 0 else term)
    if rest <= 0:
        return model._replace(terms=terms)
    copies = np.append(np.ones(len(basis)), float(rest))
    return QuadraticModel(terms, np.append(model.start, 0.0), copies)


def wider(term, curvature: float):
    """With one more coordinate, in which nothing is to be learned."""
    grown = {k: np.pad(getattr(term, k), (0, 1)) for k in ("hessian", "v", "between")}
    grown["hessian"][-1, -1] = curvature
    return term._replace(gradient=np.append(term.gradient, 0.0), **grown)


def private_figures(
    private: Private, model: QuadraticModel, setup: Setup, eta: float, left: Sequence[Afforded],
    parameters: int,
) -> Figures:  # fmt: skip
    s = private.s
    assert s.dp_delta is not None
    assert s.dp_noise_multiplier is not None
    epsilon = private.epsilon
    tried = [epsilon * f for f in FACTORS if math.isfinite(epsilon)]
    others = [(e, private.at(e).setup(setup)) for e in [*tried, math.inf] if e != epsilon]
    used = private.setup(setup)
    populations = [t for t in model.terms if t.federated]
    clip = max(clip_norm(t, used, eta) for t in populations)
    norm = max(clip_norm(t, used.changed(clip=None), eta) for t in populations)
    return Figures(
        epsilon, s.dp_delta, s.dp_noise_multiplier, s.rounds, clip, norm,
        used.noise * clip / setup.S, parameters, left,
        [(e, afford(model, other, s.rounds)) for e, other in others],
    )  # fmt: skip

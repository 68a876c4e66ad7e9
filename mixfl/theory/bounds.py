"""The bounds of the paper's Section 4 and Appendices B and D, as functions of its symbols.

    rounds            Table 1: order of the rounds to reach an error epsilon
    max_step          Table 4: largest effective step eta eta_s K
    max_rates         the theorems' conditions: the eta (and eta_c) that follow from it
    rate_condition    Table 5: what eta_s or eta_m must be
    one_way_*         1-way Gradient Transfer with the constants of its proof (Appendix D)

beta is the smoothness of each term f_i and f_c (not of their sum), mu their convexity, sigma2,
sigma_c2 and sigma_f2 the variances sigma^2, sigma_c^2 and sigma_f^2, G2 and B2 are G^2 and B^2,
D2 is ||x^(0) - x*||^2, F is f(x^(0)) - f(x*), step is the effective step. Where the paper's
tables, theorems and proofs differ: docs/theory.md.
"""

import math
from numbers import Real
from typing import NamedTuple

from mixfl.errors import MixflError, unknown

ALGORITHMS = ("pt", "1wgt", "2wgt")
CONVEXITIES = ("strongly-convex", "convex", "nonconvex")


# Table 1 ------------------------------------------------------------------------------------------


class Rounds(NamedTuple):
    """The terms of one entry of Table 1: an order, constants are dropped."""

    variance: float  # with sigma^2, sigma_c^2, sigma_f^2
    dissimilarity: float  # with G; 0 but for PT
    smoothness: float  # with beta, for PT with B^2 beta

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(self._fields, key=lambda name: getattr(self, name))


def rounds(
    algorithm: str,
    convexity: str,
    *,
    beta: float,
    epsilon: float,
    sigma2: float,
    sigma_c2: float,
    K: int,
    S: int,
    mu: float = 0.0,
    D2: float | None = None,
    F: float | None = None,
    sigma_f2: float = 0.0,
    G2: float = 0.0,
    B2: float = 1.0,
    as_printed: bool = True,
) -> Rounds:
    """Table 1 (`tab.conv_summary`), with its extension to clients that differ (sigma_f2).

    Strongly convex needs mu, convex D2, nonconvex F. Of the printed table, log(1/epsilon) and PT's
    term with G (convex and nonconvex) depend on the units of f and x; as_printed=False puts in
    what its derivation has there, and needs D2 for strongly convex.
    """
    _known(algorithm, convexity)
    _check(
        beta=beta, epsilon=epsilon, sigma2=sigma2, sigma_c2=sigma_c2, sigma_f2=sigma_f2, K=K, S=S,
        G2=G2, B2=B2,
    )  # fmt: skip
    if K < 2:
        raise MixflError(
            f"K = {K}: Table 1 is for K >= 2 local steps. With K = 1 PT and 1-way are the same "
            "SGD step on the mixed loss: give K >= 2, or use what is known about SGD."
        )
    central = K * S * sigma_c2 if algorithm == "1wgt" else S * sigma_c2
    variance = (sigma2 + K * sigma_f2 + central) / (K * S)
    G = math.sqrt(G2) if algorithm == "pt" else 0.0
    B2 = B2 if algorithm == "pt" else 1.0
    sqrt_beta, sqrt_epsilon = math.sqrt(beta), math.sqrt(epsilon)
    if convexity == "strongly-convex":
        mu = _strong(mu, beta)
        first = 1.0 if as_printed else mu * _given(convexity, D2=D2)
        found = Rounds(
            variance / mu / epsilon,
            G * sqrt_beta / mu / sqrt_epsilon,
            B2 * beta / mu * (math.log(first / epsilon) if first > epsilon else 0.0),
        )
    elif convexity == "convex":
        D2 = _given(convexity, D2=D2)
        found = Rounds(
            variance * D2 / epsilon / epsilon,
            G * sqrt_beta * (1.0 if as_printed else D2) / epsilon / sqrt_epsilon,
            B2 * beta * D2 / epsilon,
        )
    else:
        F = _given(convexity, F=F)
        found = Rounds(
            variance * beta * F / epsilon / epsilon,
            G * sqrt_beta * (1.0 if as_printed else sqrt_beta * F) / epsilon / sqrt_epsilon,
            B2 * beta * F / epsilon,
        )
    _countable(found.total, epsilon)
    return found


# Tables 4 and 5 -----------------------------------------------------------------------------------


def max_step(
    algorithm: str, convexity: str, *, beta: float, mu: float = 0.0, B2: float = 1.0
) -> float:
    """Table 4 (`tab.lr_limit_summary`): the largest effective step eta eta_s K, at eta_m = 1."""
    _known(algorithm, convexity)
    _check(beta=beta, B2=B2)
    if algorithm == "pt":
        return 1 / (6 * (1 + B2) * beta)
    if algorithm == "1wgt":
        return 1 / ((18 if convexity == "nonconvex" else 8) * beta)
    if convexity == "strongly-convex":
        return min(1 / (81 * beta), 1 / (15 * _strong(mu, beta)))
    return 1 / ((24 if convexity == "nonconvex" else 81) * beta)


class Rates(NamedTuple):
    eta: float
    eta_c: float | None  # None: 1-way takes no central steps


def max_rates(
    algorithm: str,
    convexity: str,
    *,
    beta: float,
    K: int,
    eta_s: float = 1.0,
    eta_m: float = 1.0,
    mu: float = 0.0,
    B2: float = 1.0,
) -> Rates:
    """The theorems' conditions: eta eta_s and eta_c at most max_step / (K eta_m).

    1-way merges nothing: there eta_m has no part in it.
    """
    _check(K=K, eta_s=eta_s, eta_m=eta_m)
    limit = max_step(algorithm, convexity, beta=beta, mu=mu, B2=B2)
    if algorithm == "1wgt":
        return Rates(limit / (K * eta_s), None)
    return Rates(limit / (K * eta_m * eta_s), limit / (K * eta_m))


class Condition(NamedTuple):
    symbol: str  # eta_s or eta_m
    relation: str  # > or >=
    limit: float
    holds: bool

    def __str__(self) -> str:
        return f"{self.symbol} {self.relation} {self.limit:.4g}"


def rate_condition(
    algorithm: str, convexity: str, *, S: int, eta_s: float = 1.0, eta_m: float = 1.0
) -> Condition:
    """Table 5 (`tab.slr_assumptions`); for 1-way as the theorem and its proof have it.

    The table asks eta_s >= sqrt(S) of 1-way in every case, the theorem only where f is nonconvex.
    """
    _known(algorithm, convexity)
    _check(S=S, eta_s=eta_s, eta_m=eta_m)
    if algorithm != "1wgt":
        return Condition("eta_m", ">=", 1.0, eta_m >= 1)
    if convexity == "nonconvex":
        return Condition("eta_s", ">=", math.sqrt(S), eta_s >= math.sqrt(S))
    limit = math.sqrt(5 * S / 8)
    return Condition("eta_s", ">", limit, eta_s > limit)


# 1-way Gradient Transfer, with the constants of its proof -----------------------------------------


class Tuned(NamedTuple):
    bound: float
    step: float  # the effective step for which it holds


def one_way_variance(
    convexity: str, *, sigma2: float, sigma_c2: float, K: int, S: int, beta_bounds_f: bool = False
) -> float:
    """c of a round's variance, c step^2 (convex) or c beta step^2 (nonconvex).

    The nonconvex proof needs f itself to be beta-smooth, and has 3 and 2 then. A sum of two
    beta-smooth terms is 2 beta-smooth: the same proof, with the same steps, gives 5 and 3.
    """
    _known("1wgt", convexity)
    _check(sigma2=sigma2, sigma_c2=sigma_c2, K=K, S=S)
    if convexity == "nonconvex" and beta_bounds_f:
        return 3 * sigma2 / (K * S) + 2 * sigma_c2
    return 5 * sigma2 / (K * S) + 3 * sigma_c2


def one_way_convex(
    *,
    beta: float,
    sigma2: float,
    sigma_c2: float,
    K: int,
    S: int,
    eta_s: float,
    D2: float,
    step: float,
    T: int,
    mu: float = 0.0,
    sigma_f2: float = 0.0,
) -> float:
    """Bound on E f(x_bar) - f(x*) with a fixed step <= 1/(8 beta).

    x_bar is the mean of x^(0) ... x^(T); with mu > 0 the weighted mean, x^(t) counting
    (1 - 3 mu step / 2)^-(t+1). Nothing is said of the last iterate.
    """
    _check(beta=beta, D2=D2, step=step, T=T)
    _covered("convex", S, eta_s, sigma_f2)
    _short(step, max_step("1wgt", "convex", beta=beta))
    c = one_way_variance("convex", sigma2=sigma2, sigma_c2=sigma_c2, K=K, S=S)
    if mu == 0:
        start = D2 / (step * (T + 1))
    else:
        # D2 / (step W), W = sum of the weights; log1p and expm1 for a small mu step.
        decay = (T + 1) * math.log1p(-1.5 * _strong(mu, beta) * step)
        start = 1.5 * mu * D2 * math.exp(decay) / -math.expm1(decay)
    return S / (S - 1) * (start + c * step)


def one_way_convex_tuned(
    *,
    beta: float,
    sigma2: float,
    sigma_c2: float,
    K: int,
    S: int,
    eta_s: float,
    D2: float,
    T: int,
    sigma_f2: float = 0.0,
) -> Tuned:
    """The paper's square-root form, and the step, tuned to T, for which it holds."""
    _check(beta=beta, D2=D2, T=T)
    _covered("convex", S, eta_s, sigma_f2)
    c = one_way_variance("convex", sigma2=sigma2, sigma_c2=sigma_c2, K=K, S=S)
    limit = max_step("1wgt", "convex", beta=beta)
    bound = D2 / limit / (T + 1) + 2 * math.sqrt(c * D2 / (T + 1))
    return Tuned(S / (S - 1) * bound, min(limit, _root(D2, c * (T + 1))))


def one_way_nonconvex(
    *,
    beta: float,
    sigma2: float,
    sigma_c2: float,
    K: int,
    S: int,
    eta_s: float,
    F: float,
    step: float,
    T: int,
    beta_bounds_f: bool = False,
    sigma_f2: float = 0.0,
) -> float:
    """Bound on the least E ||grad f(x^(t))||^2, t = 0 ... T, with a fixed step <= 1/(18 beta).

    It bounds their mean over t, too. `beta_bounds_f`: see `one_way_variance`.
    """
    _check(beta=beta, F=F, step=step, T=T)
    _covered("nonconvex", S, eta_s, sigma_f2)
    _short(step, max_step("1wgt", "nonconvex", beta=beta))
    c = one_way_variance(
        "nonconvex", sigma2=sigma2, sigma_c2=sigma_c2, K=K, S=S, beta_bounds_f=beta_bounds_f
    )
    return 3 * F / (step * (T + 1)) + 3 * c * beta * step


def one_way_nonconvex_tuned(
    *,
    beta: float,
    sigma2: float,
    sigma_c2: float,
    K: int,
    S: int,
    eta_s: float,
    F: float,
    T: int,
    beta_bounds_f: bool = False,
    sigma_f2: float = 0.0,
) -> Tuned:
    """The paper's square-root form, and the step, tuned to T, for which it holds."""
    _check(beta=beta, F=F, T=T)
    _covered("nonconvex", S, eta_s, sigma_f2)
    c = one_way_variance(
        "nonconvex", sigma2=sigma2, sigma_c2=sigma_c2, K=K, S=S, beta_bounds_f=beta_bounds_f
    )
    limit = max_step("1wgt", "nonconvex", beta=beta)
    bound = 3 * F / limit / (T + 1) + 6 * math.sqrt(c * beta * F / (T + 1))
    return Tuned(bound, min(limit, _root(F, c * beta * (T + 1))))


def one_way_rounds(convexity: str, *, epsilon: float, **symbols) -> int:
    """The rounds T after which the square-root form is at most epsilon, with a step tuned to T.

    `symbols` are those of `one_way_convex_tuned` or `one_way_nonconvex_tuned`, without T.
    """
    if convexity not in ("convex", "nonconvex"):
        raise unknown("convexity with a square-root form", convexity, ("convex", "nonconvex"))
    _check(epsilon=epsilon)
    tuned = one_way_convex_tuned if convexity == "convex" else one_way_nonconvex_tuned
    # The form is a / (T + 1) + b / sqrt(T + 1).
    a = tuned(**(symbols | {"sigma2": 0.0, "sigma_c2": 0.0, "T": 0})).bound
    b = tuned(**symbols, T=0).bound - a
    if a == b == 0:
        return 0
    root = (b + math.sqrt(b * b + 4 * a * epsilon)) / (2 * epsilon)  # sqrt(T + 1)
    return max(math.ceil(_countable(root * root, epsilon)) - 1, 0)


# What may be given --------------------------------------------------------------------------------


class Rule(NamedTuple):
    least: float
    itself: bool  # may it be `least`?
    meaning: str
    whole: bool = False


RULES = {
    "beta": Rule(0, False, "the smoothness of f_i and f_c: give a bound on their curvature"),
    "mu": Rule(0, True, "the convexity of f_i and f_c: give 0 where they are not strongly convex"),
    "sigma2": Rule(0, True, "the variance of a client's stochastic gradient"),
    "sigma_c2": Rule(0, True, "the variance of the central stochastic gradient"),
    "sigma_f2": Rule(0, True, "the variance between clients' gradients: 0 if they are alike"),
    "G2": Rule(0, True, "G^2 of the gradients' dissimilarity"),
    "B2": Rule(1, True, "B^2 of the gradients' dissimilarity: 1 if the terms are alike"),
    "D2": Rule(0, True, "the squared distance from x^(0) to x*"),
    "F": Rule(0, True, "the error at the start, f(x^(0)) - f(x*)"),
    "epsilon": Rule(0, False, "the error to reach"),
    "eta_s": Rule(0, False, "the server's learning rate"),
    "eta_m": Rule(0, False, "the merge's learning rate"),
    "step": Rule(0, False, "the effective step eta eta_s K"),
    "K": Rule(1, True, "the local steps in a round", whole=True),
    "S": Rule(1, True, "the clients in a round", whole=True),
    "T": Rule(0, True, "the rounds", whole=True),
}


def _check(**values) -> None:
    for symbol, value in values.items():
        rule = RULES[symbol]
        number = isinstance(value, Real) and math.isfinite(value)
        enough = number and (value > rule.least or (rule.itself and value == rule.least))
        if enough and (not rule.whole or value == int(value)):
            continue
        kind = "whole number" if rule.whole else "number"
        relation = ">=" if rule.itself else ">"
        raise MixflError(
            f"{symbol} = {value}: expected a {kind} {relation} {rule.least}. It is {rule.meaning}."
        )


def _known(algorithm: str, convexity: str) -> None:
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm with a bound", algorithm, ALGORITHMS)
    if convexity not in CONVEXITIES:
        raise unknown("convexity", convexity, CONVEXITIES)


def _given(convexity: str, **values) -> float:
    ((symbol, value),) = values.items()
    if value is None:
        raise MixflError(
            f"{symbol} is not given: the {convexity} bound needs {RULES[symbol].meaning}."
        )
    _check(**values)
    return value


def _strong(mu: float, beta: float) -> float:
    _check(mu=mu, beta=beta)
    if not 0 < mu <= beta:
        raise MixflError(
            f"mu = {mu} with beta = {beta}: the strongly convex case has 0 < mu <= beta. Give such "
            "a mu, or take the convex case."
        )
    return mu


def _covered(convexity: str, S: int, eta_s: float, sigma_f2: float) -> None:
    """What the explicit constants of 1-way take for granted."""
    _check(sigma_f2=sigma_f2)
    if sigma_f2 > 0:
        raise MixflError(
            f"sigma_f2 = {sigma_f2}: the explicit constants of 1-way are for clients that are "
            "alike (sigma_f2 = 0). Use rounds(), whose order covers clients that differ."
        )
    condition = rate_condition("1wgt", convexity, S=S, eta_s=eta_s)
    if convexity == "convex" and S < 2:
        raise MixflError(
            f"S = {S}: the convex bound of 1-way has the factor S / (S - 1); expected S >= 2. "
            "Sample more clients, or take the order from rounds()."
        )
    if not condition.holds:
        raise MixflError(
            f"eta_s = {eta_s} with S = {S}: the {convexity} bound of 1-way holds for {condition}. "
            "Raise eta_s and lower eta, so that the step stays the same."
        )


def _short(step: float, limit: float) -> None:
    if step > limit * (1 + 1e-12):
        raise MixflError(
            f"step = {step}: this bound of 1-way holds up to {limit:.6g} (Table 4). Lower eta."
        )


def _countable(number: float, epsilon: float) -> float:
    if not math.isfinite(number):
        raise MixflError(
            f"epsilon = {epsilon}: the rounds to reach it are more than a float holds. Give a "
            "larger epsilon."
        )
    return number


def _root(a: float, b: float) -> float:
    return math.sqrt(a / b) if b else math.inf

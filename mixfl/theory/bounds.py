"""The bounds of the paper's Section 4 and Appendices B and D, as functions of its symbols.

    rounds            Table 1: order of the rounds to reach an error epsilon
    max_step          Table 4: largest effective step eta eta_s K
    max_rates         the theorems' conditions: the eta (and eta_c) that follow from it
    rate_condition    Table 5: what eta_s or eta_m must be
    one_way.py        1-way Gradient Transfer with the constants of its proof (Appendix D)

beta is the smoothness of each term f_i and f_c (not of their sum), mu their convexity, sigma2,
sigma_c2 and sigma_f2 the variances sigma^2, sigma_c^2 and sigma_f^2, G2 and B2 are G^2 and B^2,
D2 is ||x^(0) - x*||^2, F is f(x^(0)) - f(x*), step is the effective step. docs/theory.md lists
where the paper's tables, theorems and proofs differ.
"""

import math
from typing import NamedTuple

from mixfl.errors import MixflError
from mixfl.theory.symbols import (
    ALGORITHMS,
    CONVEXITIES,
    check,
    check_names,
    checked_mu,
    finite,
    required,
)

__all__ = [
    "ALGORITHMS", "CONVEXITIES", "Condition", "Rates", "Rounds", "max_rates", "max_step",
    "rate_condition", "rounds",
]  # fmt: skip


# Table 1 ------------------------------------------------------------------------------------------


class Rounds(NamedTuple):
    """The terms of one entry of Table 1: orders, without constants."""

    variance: float  # with sigma^2, sigma_c^2, sigma_f^2
    dissimilarity: float  # with G; 0 except for PT
    smoothness: float  # with beta; for PT with B^2 beta

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(self._fields, key=lambda name: getattr(self, name))


def rounds(
    algorithm: str, convexity: str, *, beta: float, epsilon: float, sigma2: float, sigma_c2: float,
    K: int, S: int, mu: float = 0.0, D2: float | None = None, F: float | None = None,
    sigma_f2: float = 0.0, G2: float = 0.0, B2: float = 1.0, as_printed: bool = True,
) -> Rounds:  # fmt: skip
    """Table 1 (`tab.conv_summary`), with its extension to clients that differ (sigma_f2).

    Strongly convex needs mu, convex D2, nonconvex F. In the printed table, log(1/epsilon) and PT's
    term with G (convex and nonconvex) depend on the units of f and x. as_printed=False uses what
    the derivation gives instead, and needs D2 in the strongly convex case.
    """
    check_names(algorithm, convexity)
    check(
        beta=beta, epsilon=epsilon, sigma2=sigma2, sigma_c2=sigma_c2, sigma_f2=sigma_f2, K=K, S=S,
        G2=G2, B2=B2,
    )  # fmt: skip
    if K < 2:
        raise MixflError(
            f"K = {K}: Table 1 holds for K >= 2 local steps. With K = 1, PT and 1-way are the same "
            "SGD step on the mixed loss: give K >= 2, or use the known bounds of SGD."
        )
    central = K * S * sigma_c2 if algorithm == "1wgt" else S * sigma_c2
    variance = (sigma2 + K * sigma_f2 + central) / (K * S)
    G = math.sqrt(G2) if algorithm == "pt" else 0.0
    B2 = B2 if algorithm == "pt" else 1.0
    sqrt_beta, sqrt_epsilon = math.sqrt(beta), math.sqrt(epsilon)
    if convexity == "strongly-convex":
        mu = checked_mu(mu, beta)
        first = 1.0 if as_printed else mu * required(convexity, D2=D2)
        terms = Rounds(
            variance / mu / epsilon,
            G * sqrt_beta / mu / sqrt_epsilon,
            B2 * beta / mu * (math.log(first / epsilon) if first > epsilon else 0.0),
        )
    elif convexity == "convex":
        D2 = required(convexity, D2=D2)
        terms = Rounds(
            variance * D2 / epsilon / epsilon,
            G * sqrt_beta * (1.0 if as_printed else D2) / epsilon / sqrt_epsilon,
            B2 * beta * D2 / epsilon,
        )
    else:
        F = required(convexity, F=F)
        terms = Rounds(
            variance * beta * F / epsilon / epsilon,
            G * sqrt_beta * (1.0 if as_printed else sqrt_beta * F) / epsilon / sqrt_epsilon,
            B2 * beta * F / epsilon,
        )
    finite(terms.total, epsilon)
    return terms


# Tables 4 and 5 -----------------------------------------------------------------------------------


def max_step(
    algorithm: str, convexity: str, *, beta: float, mu: float = 0.0, B2: float = 1.0
) -> float:
    """Table 4 (`tab.lr_limit_summary`): the largest effective step eta eta_s K, at eta_m = 1."""
    check_names(algorithm, convexity)
    check(beta=beta, B2=B2)
    if algorithm == "pt":
        return 1 / (6 * (1 + B2) * beta)
    if algorithm == "1wgt":
        return 1 / ((18 if convexity == "nonconvex" else 8) * beta)
    if convexity == "strongly-convex":
        return min(1 / (81 * beta), 1 / (15 * checked_mu(mu, beta)))
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
    """The theorems' conditions: eta eta_s and eta_c are at most max_step / (K eta_m).

    1-way has no merge, so eta_m has no effect there.
    """
    check(K=K, eta_s=eta_s, eta_m=eta_m)
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
    """Table 5 (`tab.slr_assumptions`); for 1-way, as in the theorem and its proof.

    For 1-way, the table always requires eta_s >= sqrt(S), the theorem only if f is nonconvex.
    """
    check_names(algorithm, convexity)
    check(S=S, eta_s=eta_s, eta_m=eta_m)
    if algorithm != "1wgt":
        return Condition("eta_m", ">=", 1.0, eta_m >= 1)
    if convexity == "nonconvex":
        return Condition("eta_s", ">=", math.sqrt(S), eta_s >= math.sqrt(S))
    limit = math.sqrt(5 * S / 8)
    return Condition("eta_s", ">", limit, eta_s > limit)

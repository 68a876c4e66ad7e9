"""The symbols of the bounds: what each means and which values it may have."""

import math
from numbers import Real
from typing import NamedTuple

from mixfl.errors import MixflError, unknown

ALGORITHMS = ("pt", "1wgt", "2wgt")
CONVEXITIES = ("strongly-convex", "convex", "nonconvex")


class Rule(NamedTuple):
    least: float
    itself: bool  # whether `least` itself is allowed
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


def check(**values) -> None:
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


def check_names(algorithm: str, convexity: str) -> None:
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm with a bound", algorithm, ALGORITHMS)
    if convexity not in CONVEXITIES:
        raise unknown("convexity", convexity, CONVEXITIES)


def required(convexity: str, **values) -> float:
    ((symbol, value),) = values.items()
    if value is None:
        raise MixflError(
            f"{symbol} is not given: the {convexity} bound needs {RULES[symbol].meaning}."
        )
    check(**values)
    return value


def checked_mu(mu: float, beta: float) -> float:
    check(mu=mu, beta=beta)
    if not 0 < mu <= beta:
        raise MixflError(
            f"mu = {mu} with beta = {beta}: the strongly convex case needs 0 < mu <= beta. Give "
            "such a mu, or use the convex case."
        )
    return mu


def finite(number: float, epsilon: float) -> float:
    if not math.isfinite(number):
        raise MixflError(
            f"epsilon = {epsilon}: the number of rounds to reach it is too large for a float. Give "
            "a larger epsilon."
        )
    return number

"""The symbols of the bounds: what each means and which values it may have."""

import math
from typing import Annotated, Any

from msgspec import Meta

from mixfl.errors import MixflError, unknown
from mixfl.validation import LARGEST_FLOAT, Count, Index, NotNegative, Positive
from mixfl.validation import check as check_value

ALGORITHMS = ("pt", "1wgt", "2wgt")
CONVEXITIES = ("strongly-convex", "convex", "nonconvex")

SYMBOLS: dict[str, tuple[Any, str]] = {
    "beta": (Positive, "the smoothness of f_i and f_c: a bound on their curvature"),
    "mu": (NotNegative, "the convexity of f_i and f_c: 0 where they are not strongly convex"),
    "sigma2": (NotNegative, "the variance of a client's stochastic gradient"),
    "sigma_c2": (NotNegative, "the variance of the central stochastic gradient"),
    "sigma_f2": (NotNegative, "the variance between clients' gradients: 0 if they are alike"),
    "G2": (NotNegative, "G^2 of the gradients' dissimilarity"),
    "B2": (
        Annotated[float, Meta(ge=1, le=LARGEST_FLOAT)],
        "B^2 of the gradients' dissimilarity: 1 if the terms are alike",
    ),
    "D2": (NotNegative, "the squared distance from x^(0) to x*"),
    "F": (NotNegative, "the error at the start, f(x^(0)) - f(x*)"),
    "epsilon": (Positive, "the error to reach"),
    "eta_s": (Positive, "the server's learning rate"),
    "eta_m": (Positive, "the merge's learning rate"),
    "step": (Positive, "the effective step eta eta_s K"),
    "K": (Count, "the local steps in a round"),
    "S": (Count, "the clients in a round"),
    "T": (Index, "the rounds"),
}


def check(**values: Any) -> None:
    for symbol, value in values.items():
        check_value(symbol, value, *SYMBOLS[symbol])


def check_names(algorithm: str, convexity: str) -> None:
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm with a bound", algorithm, ALGORITHMS)
    if convexity not in CONVEXITIES:
        raise unknown("convexity", convexity, CONVEXITIES)


def required(convexity: str, **values: float | None) -> float:
    """The one value given, which the bound can't do without."""
    ((symbol, value),) = values.items()
    if value is None:
        raise MixflError(
            f"{symbol} is not given: the {convexity} bound needs {SYMBOLS[symbol][1]}."
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


def finite(rounds: float, epsilon: float) -> float:
    if not math.isfinite(rounds):
        raise MixflError(
            f"epsilon = {epsilon}: the number of rounds to reach it is too large for a float. Give "
            "a larger epsilon."
        )
    return rounds

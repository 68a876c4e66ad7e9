"""Bounds on 1-way Gradient Transfer with the constants of its proof (Appendix D).

The symbols are those of bounds.py. docs/theory.md lists where the paper's statements and proofs
differ.
"""

import math
from typing import NamedTuple

from mixfl.errors import MixflError, unknown
from mixfl.theory.bounds import max_step, rate_condition
from mixfl.theory.symbols import check, check_names, checked_mu, finite


class Tuned(NamedTuple):
    bound: float
    step: float  # the effective step for which it holds


def one_way_variance(
    convexity: str, *, sigma2: float, sigma_c2: float, K: int, S: int, beta_bounds_f: bool = False
) -> float:
    """The constant c of a round's variance, c step^2 (convex) or c beta step^2 (nonconvex).

    The nonconvex proof needs f itself to be beta-smooth, and then has 3 and 2. A sum of two
    beta-smooth terms is 2 beta-smooth: the same proof, with the same steps, gives 5 and 3.
    """
    check_names("1wgt", convexity)
    check(sigma2=sigma2, sigma_c2=sigma_c2, K=K, S=S)
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

    x_bar is the mean of x^(0) ... x^(T); with mu > 0 the mean in which x^(t) has the weight
    (1 - 3 mu step / 2)^-(t+1). This says nothing about the last iterate.
    """
    check(beta=beta, D2=D2, step=step, T=T)
    _covered("convex", S, eta_s, sigma_f2)
    _short(step, max_step("1wgt", "convex", beta=beta))
    c = one_way_variance("convex", sigma2=sigma2, sigma_c2=sigma_c2, K=K, S=S)
    if mu == 0:
        start = D2 / (step * (T + 1))
    else:
        # D2 / (step W), W = sum of the weights; log1p and expm1 for a small mu step.
        decay = (T + 1) * math.log1p(-1.5 * checked_mu(mu, beta) * step)
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
    check(beta=beta, D2=D2, T=T)
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
    """Bound on the smallest E ||grad f(x^(t))||^2, t = 0 ... T, with a fixed step <= 1/(18 beta).

    It also bounds their mean over t. For `beta_bounds_f`, see `one_way_variance`.
    """
    check(beta=beta, F=F, step=step, T=T)
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
    check(beta=beta, F=F, T=T)
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
    check(epsilon=epsilon)
    tuned = one_way_convex_tuned if convexity == "convex" else one_way_nonconvex_tuned
    # The form is a / (T + 1) + b / sqrt(T + 1).
    a = tuned(**(symbols | {"sigma2": 0.0, "sigma_c2": 0.0, "T": 0})).bound
    b = tuned(**symbols, T=0).bound - a
    if a == b == 0:
        return 0
    root = (b + math.sqrt(b * b + 4 * a * epsilon)) / (2 * epsilon)  # sqrt(T + 1)
    return max(math.ceil(finite(root * root, epsilon)) - 1, 0)


def _covered(convexity: str, S: int, eta_s: float, sigma_f2: float) -> None:
    """Checks the assumptions behind 1-way's explicit constants."""
    check(sigma_f2=sigma_f2)
    if sigma_f2 > 0:
        raise MixflError(
            f"sigma_f2 = {sigma_f2}: the explicit constants of 1-way hold only for clients that "
            "are alike (sigma_f2 = 0). For clients that differ, use rounds(), which gives an order."
        )
    condition = rate_condition("1wgt", convexity, S=S, eta_s=eta_s)
    if convexity == "convex" and S < 2:
        raise MixflError(
            f"S = {S}: the convex bound of 1-way has the factor S / (S - 1) and needs S >= 2. "
            "Sample more clients, or use the order from rounds()."
        )
    if not condition.holds:
        raise MixflError(
            f"eta_s = {eta_s} with S = {S}: the {convexity} bound of 1-way needs {condition}. "
            "Raise eta_s and lower eta so that the step stays the same."
        )


def _short(step: float, limit: float) -> None:
    if step > limit * (1 + 1e-12):
        raise MixflError(
            f"step = {step}: this bound of 1-way holds for steps up to {limit:.6g} (Table 4). "
            "Lower eta."
        )


def _root(a: float, b: float) -> float:
    return math.sqrt(a / b) if b else math.inf

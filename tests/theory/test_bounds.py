"""The paper's bounds: its tables by numbers worked out by hand, its theorems on problems whose
constants are known, its limits of the steps on quadratics.

The runs are 1-way in NumPy with all seeds at once, as the paper's box has it; the slow reference
judges them, and the matrices of a round by which the limits of the steps are judged.
"""

import json
import math
import subprocess
import sys
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
from click.testing import CliRunner
from scipy.optimize import minimize

from mixfl.cli import cli
from mixfl.errors import MixflError
from mixfl.theory.bounds import (
    ALGORITHMS,
    CONVEXITIES,
    max_rates,
    max_step,
    rate_condition,
    rounds,
)
from mixfl.theory.one_way import (
    one_way_convex,
    one_way_convex_tuned,
    one_way_nonconvex,
    one_way_nonconvex_tuned,
    one_way_rounds,
    one_way_variance,
)

# Table 1 ------------------------------------------------------------------------------------------

# sqrt(beta) = 1.5, G = 3, sqrt(epsilon) = 0.5, K S = 24
GIVEN: dict[str, Any] = dict(
    beta=2.25, mu=0.5, epsilon=0.25, sigma2=12, sigma_c2=0.5, K=4, S=6, G2=9, B2=3, D2=8, F=6
)
LOG_4 = 1.3862943611198906
TABLE_1 = {
    # (12 + 6 0.5) / 24 = 0.625 is the variance of PT and 2-way, (12 + 24 0.5) / 24 = 1 of 1-way
    ("pt", "strongly-convex"): (0.625 / 0.125, 4.5 / 0.25, 13.5 * LOG_4),
    ("pt", "convex"): (80, 36, 216),
    ("pt", "nonconvex"): (135, 36, 162),
    ("1wgt", "strongly-convex"): (8, 0, 4.5 * LOG_4),
    ("1wgt", "convex"): (128, 0, 72),
    ("1wgt", "nonconvex"): (216, 0, 54),
    ("2wgt", "strongly-convex"): (5, 0, 4.5 * LOG_4),
    ("2wgt", "convex"): (80, 0, 72),
    ("2wgt", "nonconvex"): (135, 0, 54),
}
EVERY = pytest.mark.parametrize(("algorithm", "convexity"), TABLE_1)


@EVERY
def test_table_1(algorithm, convexity):
    found = rounds(algorithm, convexity, **GIVEN)
    assert tuple(found) == pytest.approx(TABLE_1[algorithm, convexity])
    assert found.total == pytest.approx(sum(TABLE_1[algorithm, convexity]))


@EVERY
def test_clients_that_differ_add_k_sigma_f_2_in_the_parenthesis(algorithm, convexity):
    """K sigma_f^2 = 12: half of K S, so that each variance grows by 0.5."""
    before = rounds(algorithm, convexity, **GIVEN)
    after = rounds(algorithm, convexity, **GIVEN, sigma_f2=3)
    one = 1.0 if algorithm == "1wgt" else 0.625
    assert after.variance == pytest.approx(before.variance * (one + 0.5) / one)
    assert after[1:] == before[1:]


def test_which_term_dominates():
    assert rounds("pt", "convex", **GIVEN).dominant == "smoothness"
    assert rounds("1wgt", "convex", **GIVEN).dominant == "variance"
    assert rounds("pt", "convex", **(GIVEN | {"G2": 900})).dominant == "dissimilarity"


@pytest.mark.parametrize("convexity", CONVEXITIES)
def test_limiting_cases_of_table_1(convexity):
    def total(algorithm, **changes):
        return rounds(algorithm, convexity, **(GIVEN | changes)).total

    assert total("pt", G2=0, B2=1) == total("2wgt")
    assert total("pt", G2=1e-6, B2=1) > total("2wgt")
    assert total("pt", G2=0, B2=1.001) > total("2wgt")
    assert total("1wgt", sigma_c2=0) == total("2wgt", sigma_c2=0)
    assert total("1wgt") > total("2wgt")
    for algorithm in ("1wgt", "2wgt"):
        assert total(algorithm, G2=100, B2=50) == total(algorithm)
    # 1-way needs a central batch K times as large: sigma_c^2 / K
    assert total("1wgt", sigma_c2=0.5 / 4) == pytest.approx(total("2wgt"))
    # Many clients, many local steps: only the central noise stays, and for 1-way all of it.
    huge = dict(S=10**12, K=10**6)
    noise = rounds("1wgt", convexity, **(GIVEN | huge)).variance
    assert noise == pytest.approx(rounds("1wgt", convexity, **(GIVEN | {"sigma2": 0})).variance)
    assert rounds("2wgt", convexity, **(GIVEN | huge)).variance < 1e-5 * noise


def test_an_error_above_one_needs_no_rounds_for_the_logarithm():
    assert rounds("2wgt", "strongly-convex", **(GIVEN | {"epsilon": 2})).smoothness == 0


@EVERY
def test_units_of_loss_and_model(algorithm, convexity):
    """f counted in units a times as small, x in units b times as small: the same rounds."""
    a, b = 7.0, 3.0
    gradient2 = a**2 / b**2
    units = dict(
        beta=a / b**2, mu=a / b**2, sigma2=gradient2, sigma_c2=gradient2, G2=gradient2, D2=b**2,
        F=a, epsilon=gradient2 if convexity == "nonconvex" else a,
    )  # fmt: skip
    other = {k: v * units.get(k, 1) for k, v in GIVEN.items()}
    here = rounds(algorithm, convexity, **GIVEN, as_printed=False)
    assert tuple(rounds(algorithm, convexity, **other, as_printed=False)) == pytest.approx(here)
    printed = rounds(algorithm, convexity, **GIVEN), rounds(algorithm, convexity, **other)
    if algorithm == "pt" and convexity != "strongly-convex":
        assert printed[0].dissimilarity != pytest.approx(printed[1].dissimilarity)
        factor = {"convex": 8, "nonconvex": 1.5 * 6}[convexity]  # D2; sqrt(beta) F
        assert here.dissimilarity == pytest.approx(factor * printed[0].dissimilarity)


# Tables 4 and 5 -----------------------------------------------------------------------------------

TABLE_4 = {  # at beta = 2, mu = 1, B^2 = 4
    ("pt", "strongly-convex"): 1 / 60,
    ("pt", "convex"): 1 / 60,
    ("pt", "nonconvex"): 1 / 60,
    ("1wgt", "strongly-convex"): 1 / 16,
    ("1wgt", "convex"): 1 / 16,
    ("1wgt", "nonconvex"): 1 / 36,
    ("2wgt", "strongly-convex"): 1 / 162,
    ("2wgt", "convex"): 1 / 162,
    ("2wgt", "nonconvex"): 1 / 48,
}


@EVERY
def test_table_4(algorithm, convexity):
    limit = TABLE_4[algorithm, convexity]
    known = dict(beta=2, mu=1, B2=4)
    assert max_step(algorithm, convexity, **known) == pytest.approx(limit)
    rates = max_rates(algorithm, convexity, K=5, eta_s=3, eta_m=1.5, **known)
    if algorithm == "1wgt":
        assert rates == (pytest.approx(limit / 15), None)
    else:
        assert rates == (pytest.approx(limit / 22.5), pytest.approx(limit / 7.5))


def test_two_ways_second_limit_never_binds():
    """1/(15 mu) beside 1/(81 beta): mu is at most beta."""
    assert max_step("2wgt", "strongly-convex", beta=2, mu=2) == pytest.approx(1 / 162)


def test_table_5():
    for convexity in CONVEXITIES:
        for algorithm in ("pt", "2wgt"):
            good = rate_condition(algorithm, convexity, S=50, eta_s=0.1, eta_m=1)
            assert good == ("eta_m", ">=", 1, True)
            assert not rate_condition(algorithm, convexity, S=50, eta_m=0.5).holds
    # S = 10: sqrt(5 S / 8) = 2.5 by the theorem, where the table has sqrt(S) = 3.16
    assert not rate_condition("1wgt", "convex", S=10, eta_s=2.5).holds
    assert rate_condition("1wgt", "strongly-convex", S=10, eta_s=2.51).holds
    assert not rate_condition("1wgt", "nonconvex", S=10, eta_s=3.16).holds
    assert rate_condition("1wgt", "nonconvex", S=9, eta_s=3).holds


# The constants of 1-way's proof -------------------------------------------------------------------


def test_the_convex_constants_follow_from_the_proof():
    """Of one round: coefficients of step (f - f*), step^2 sigma^2 / (K S), step^2 sigma_c^2."""
    step = Fraction(1, 8)  # times beta
    drift = 2 * step * (1 + 2 * step)
    assert drift == Fraction(5, 16)
    for S in range(1, 100):
        eta_s2 = Fraction(5 * S, 8)
        loss = 2 - 8 * step - drift * 16 * step / eta_s2
        sigma2 = 4 + drift * 2 / eta_s2 * S
        sigma_c2 = 2 + drift * 4 / eta_s2  # 4, where the paper's lemma has 2 (and states 3)
        assert loss == Fraction(S - 1, S)
        assert sigma2 == 5
        assert (sigma_c2 <= 3) == (S >= 2)


@pytest.mark.parametrize(("beta_f", "sigma2", "sigma_c2"), [(1, 3, 2), (2, 5, 3)])
def test_the_nonconvex_constants_follow_from_the_proof(beta_f, sigma2, sigma_c2):
    """With f beta-smooth the paper's, with f 2 beta-smooth (beta = 1) what we use."""
    step = Fraction(1, 18)
    drift = step / 2 + 2 * beta_f * step**2  # of the drift, in units of beta
    # (1 + a) with a = K is K + 1 <= 2 K: 8 and 8 where the paper goes on with 4 and 4
    growth = 1 + 2 * 2 * step**2
    total = (math.exp(growth) - 1) / float(growth)
    assert total < 2
    eta_s2 = 1  # times S
    assert Fraction(1, 2) - beta_f * step - drift * 2 * 8 * step / eta_s2 >= Fraction(1, 3)
    assert 2 * beta_f + drift * 2 / eta_s2 <= sigma2
    assert beta_f + drift * 2 * 8 / eta_s2 <= sigma_c2
    c = one_way_variance(
        "nonconvex", sigma2=1.0, sigma_c2=10.0, K=2, S=3, beta_bounds_f=beta_f == 1
    )
    assert c == pytest.approx(sigma2 / 6 + 10 * sigma_c2)


NOISE: dict[str, Any] = dict(sigma2=8, sigma_c2=0.5, K=5, S=4)  # c = 2 + 1.5


def test_the_explicit_bounds_by_hand():
    fixed = one_way_convex(beta=1, **NOISE, eta_s=2, D2=6, step=0.125, T=11)
    assert fixed == pytest.approx(4 / 3 * (4 + 0.4375))
    tuned = one_way_convex_tuned(beta=1, **NOISE, eta_s=2, D2=6, T=11)
    paper = 4 / 3 * (8 * 6 / 12 + math.sqrt(20 * 8 + 12 * 20 * 0.5) * math.sqrt(6 / (20 * 12)))
    assert tuned == (pytest.approx(paper), 0.125)

    known = dict(beta=2, **NOISE, eta_s=2, F=9, T=8)
    assert one_way_nonconvex(**known, step=1 / 36) == pytest.approx(108 + 3.5 / 6)
    paper = one_way_nonconvex(**known, step=1 / 36, beta_bounds_f=True)
    assert paper == pytest.approx(108 + 2.2 / 6)
    tuned = one_way_nonconvex_tuned(**known, beta_bounds_f=True)
    assert tuned.bound == pytest.approx(54 * 18 / 9 + 6 * math.sqrt(2.2 * 18) / 3)


@pytest.mark.parametrize("T", [0, 5, 10**3, 10**6])
def test_the_tuned_form_holds_at_its_step(T):
    tuned = one_way_convex_tuned(beta=1, **NOISE, eta_s=2, D2=6, T=T)
    assert one_way_convex(beta=1, **NOISE, eta_s=2, D2=6, step=tuned.step, T=T) <= tuned.bound
    tuned = one_way_nonconvex_tuned(beta=1, **NOISE, eta_s=2, F=6, T=T)
    assert one_way_nonconvex(beta=1, **NOISE, eta_s=2, F=6, step=tuned.step, T=T) <= tuned.bound


def test_without_noise_the_longest_step_is_best():
    quiet = NOISE | {"sigma2": 0, "sigma_c2": 0}
    assert one_way_convex_tuned(beta=1, **quiet, eta_s=2, D2=6, T=3).step == 1 / 8
    assert one_way_nonconvex_tuned(beta=1, **quiet, eta_s=2, F=6, T=3).step == 1 / 18


def test_strong_convexity_lowers_the_bound_and_vanishes_with_mu():
    known = dict(beta=1, **NOISE, eta_s=2, D2=6, step=0.1, T=100)
    plain = one_way_convex(**known)
    assert one_way_convex(**known, mu=0.5) < one_way_convex(**known, mu=0.1) < plain
    assert one_way_convex(**known, mu=1e-9) == pytest.approx(plain)
    # By hand at T = 1: weights 1/0.85 and 1/0.85^2
    two = one_way_convex(**(known | {"T": 1}), mu=1.0)
    assert two == pytest.approx(4 / 3 * (6 / (0.1 * (1 / 0.85 + 1 / 0.85**2)) + 0.35))


@pytest.mark.parametrize("sigma2", [0.0, 8.0])
def test_the_rounds_that_suffice_are_the_fewest(sigma2):
    cases = [("convex", one_way_convex_tuned, "D2"), ("nonconvex", one_way_nonconvex_tuned, "F")]
    for convexity, tuned, start in cases:
        known: dict[str, Any] = dict(beta=1, eta_s=2, **(NOISE | {"sigma2": sigma2, start: 6}))
        T = one_way_rounds(convexity, epsilon=0.1, **known)
        assert tuned(**known, T=T).bound <= 0.1 < tuned(**known, T=T - 1).bound
        assert one_way_rounds(convexity, epsilon=1e9, **known) == 0
        assert one_way_rounds(convexity, epsilon=0.1, **(known | {start: 0})) == 0


# The theorems on problems with known constants ----------------------------------------------------


class Case(NamedTuple):
    f: Any  # loss and gradients at x [..., d]
    grad_f: Any
    grad_c: Any
    beta: float
    mu: float
    x0: np.ndarray
    x_star: np.ndarray


def quadratic(A, b):
    """x'Ax/2 - b'x, its gradient, beta."""
    return (
        lambda x: 0.5 * np.sum(x * (x @ A), -1) - x @ b,
        lambda x: x @ A - b,
        np.abs(np.linalg.eigvalsh(A)).max(),
    )


def of_margins(h, slope, curvature, A, b):
    """mean over j of h(a_j'x - b_j)."""
    return (
        lambda x: np.mean(h(x @ A.T - b), -1),
        lambda x: slope(x @ A.T - b) @ A / len(A),
        curvature * np.linalg.eigvalsh(A.T @ A / len(A)).max(),
    )


def log_cosh(z):
    return np.logaddexp(z, -z) - math.log(2)


def sigmoid(z):
    return 0.5 * (1 + np.tanh(z / 2))


def spectrum(rng, d, low, high):
    """A random symmetric matrix with eigenvalues from low to high, both taken."""
    u, _ = np.linalg.qr(rng.normal(size=(d, d)))
    return (u * np.append(rng.uniform(low, high, d - 2), [low, high])) @ u.T


def random_term(rng, kind, d):
    if kind == "quadratic":
        return quadratic(spectrum(rng, d, 0.1, rng.uniform(0.5, 2)), rng.normal(size=d)), 0.1
    A, b = rng.normal(size=(4 * d, d)), rng.normal(size=4 * d)
    if kind == "log-cosh":
        return of_margins(log_cosh, np.tanh, 1.0, A, b), 0.0
    if kind == "logistic":
        y = rng.choice([-1.0, 1.0], 4 * d)
        return of_margins(lambda z: np.logaddexp(0, z), sigmoid, 0.25, -y[:, None] * A, 0 * b), 0.0
    if kind == "indefinite":
        # Beside a "quadratic", whose eigenvalues are at least 0.1, the sum has a minimum.
        return quadratic(spectrum(rng, d, -0.05, 1.0), rng.normal(size=d)), -0.05
    assert kind == "cosine"
    return of_margins(np.cos, lambda z: -np.sin(z), 1.0, A, b), -1.0


def case(seed, kinds, d=4, distance=1.0) -> Case:
    rng = np.random.default_rng(seed)
    (loss_f, grad_f, beta_f), mu_f = random_term(rng, kinds[0], d)
    (loss_c, grad_c, beta_c), mu_c = random_term(rng, kinds[1], d)
    f = lambda x: loss_f(x) + loss_c(x)  # noqa: E731
    starts = rng.normal(scale=2, size=(6, d)) if min(mu_f, mu_c) < 0 else np.zeros((1, d))
    jac = lambda x: grad_f(x) + grad_c(x)  # noqa: E731
    found = [minimize(f, x, jac=jac, options={"gtol": 1e-9}) for x in starts]
    x_star = min(found, key=lambda r: r.fun).x
    x0 = x_star + distance * rng.normal(size=d)
    return Case(f, grad_f, grad_c, max(beta_f, beta_c), max(min(mu_f, mu_c), 0), x0, x_star)


class Setting(NamedTuple):
    sigma2: float
    sigma_c2: float
    K: int
    S: int
    T: int


def setting(seed) -> Setting:
    rng = np.random.default_rng([seed, 1])
    sigma2, sigma_c2 = rng.uniform(0, 10), rng.uniform(0, 2)
    return Setting(sigma2, sigma_c2, *map(int, rng.integers([2, 2, 10], [7, 7, 60])))


def draw(s: Setting, d, seeds, seed):
    """Additive noise of the stated variances, of the clients and of the central batches."""
    rng = np.random.default_rng([seed, 2])
    noise_f = rng.normal(size=(s.T, s.K, s.S, seeds, d)) * math.sqrt(s.sigma2 / d)
    return noise_f, rng.normal(size=(s.T, seeds, d)) * math.sqrt(s.sigma_c2 / d)


def one_way(case: Case, noise_f, noise_c, eta, eta_s):
    """x^(0) ... x^(T) of 1-way: [T + 1, seeds, d]."""
    xs = [np.broadcast_to(case.x0, noise_c.shape[1:])]
    for n_f, n_c in zip(noise_f, noise_c, strict=True):
        x = xs[-1]
        g_c = case.grad_c(x) + n_c
        y = np.broadcast_to(x, n_f.shape[1:])  # [S, seeds, d]
        for n in n_f:
            y = y - eta * (case.grad_f(y) + n + g_c)
        xs.append(x + eta_s * np.mean(y - x, axis=0))
    return np.array(xs)


def run(case: Case, s: Setting, eta_s, step, seeds=50, seed=0):
    noise = draw(s, len(case.x0), seeds, seed)
    return one_way(case, *noise, step / (s.K * eta_s), eta_s)


def test_the_runs_are_the_references():
    c, s = case(0, ("log-cosh", "quadratic")), Setting(2.0, 1.0, 3, 2, 4)
    noise_f, noise_c = draw(s, 4, 2, 0)
    found = one_way(c, noise_f, noise_c, eta=0.1, eta_s=1.5)

    def term(kind, grad):  # a batch is its noise
        return reference.Term(kind, lambda x, noise: (np.zeros(1), grad(x) + noise))

    terms = [term("federated", c.grad_f), term("central", c.grad_c)]
    for seed in range(2):
        data = [
            reference.Round([[list(noise_f[t, :, i, seed]) for i in range(s.S)]],
                            [None, [noise_c[t, seed]]])
            for t in range(s.T)
        ]  # fmt: skip
        settings = reference.Settings(client_lr=0.1, server_lr=1.5)
        models = reference.train("1wgt", terms, c.x0, settings, data)
        np.testing.assert_allclose(found[1:, seed], models, rtol=1e-12)


CONVEX = [("quadratic", "quadratic")] * 5 + [
    ("log-cosh", "log-cosh"), ("logistic", "quadratic"), ("log-cosh", "logistic"),
    ("quadratic", "log-cosh"),
]  # fmt: skip


def weighted_mean(values, mu, step):
    """Over the rounds, first axis: the weights of `one_way_convex`."""
    weights = (1 - 1.5 * mu * step) ** -np.arange(1.0, len(values) + 1)
    return np.tensordot(weights / weights.sum(), values, axes=1)


def convex_errors(c, xs, mu, step):
    """Of the averaged iterate, and averaged over the iterates: the proof bounds both."""
    f_star = c.f(c.x_star)
    averaged = np.mean(c.f(weighted_mean(xs, mu, step))) - f_star
    return averaged, np.mean(weighted_mean(c.f(xs), mu, step)) - f_star


@pytest.mark.parametrize("seed", range(27))
def test_1wgt_obeys_the_convex_bound(seed):
    c = case(seed, CONVEX[seed % 9], distance=(0.0, 0.3, 2.0)[seed % 3])
    s = setting(seed)
    eta_s = (1.01, 2.0)[seed % 2] * math.sqrt(5 * s.S / 8)
    step = (1.0, 0.3)[seed // 9 % 2] * max_step("1wgt", "convex", beta=c.beta)
    xs = run(c, s, eta_s, step, seed=seed)
    for mu in {0.0, c.mu}:
        bound = one_way_convex(
            beta=c.beta, mu=mu, eta_s=eta_s, step=step, D2=float(np.sum((c.x0 - c.x_star) ** 2)),
            **s._asdict(),
        )  # fmt: skip
        averaged, mean = convex_errors(c, xs, mu, step)
        assert 0 <= averaged <= mean + 1e-12
        assert mean <= bound


NONCONVEX = [
    ("cosine", "quadratic"), ("quadratic", "cosine"), ("indefinite", "quadratic"),
    ("cosine", "log-cosh"), ("quadratic", "quadratic"),
]  # fmt: skip


def squared_gradients(c, xs):
    """E ||grad f(x^(t))||^2 for t = 0 ... T."""
    return np.sum((c.grad_f(xs) + c.grad_c(xs)) ** 2, -1).mean(1)


@pytest.mark.parametrize("seed", range(25))
def test_1wgt_obeys_the_nonconvex_bound(seed):
    c = case(seed, NONCONVEX[seed % 5], distance=(0.0, 0.3, 2.0)[seed % 3])
    s = setting(seed)
    eta_s = math.sqrt(s.S) * (1.0 + 1e-9, 2.0)[seed % 2]
    step = (1.0, 0.3)[seed // 5 % 2] * max_step("1wgt", "nonconvex", beta=c.beta)
    xs = run(c, s, eta_s, step, seed=seed)
    squared = squared_gradients(c, xs)
    F = max(float(c.f(c.x0) - c.f(c.x_star)), 0.0)
    bound = one_way_nonconvex(beta=c.beta, eta_s=eta_s, step=step, F=F, **s._asdict())
    assert squared.min() <= squared.mean() <= bound
    paper = one_way_nonconvex(
        beta=2 * c.beta, eta_s=eta_s, step=step / 2, F=F, **s._asdict(), beta_bounds_f=True
    )
    assert squared_gradients(c, run(c, s, eta_s, step / 2, seed=seed)).mean() <= paper


def test_too_long_a_step_breaks_the_bounds():
    """beta understated by 100, and with it the limit of the step: the tests above can fail."""
    c, s = case(0, ("quadratic", "quadratic")), Setting(1.0, 1.0, 4, 4, 40)
    F, D2 = float(c.f(c.x0) - c.f(c.x_star)), float(np.sum((c.x0 - c.x_star) ** 2))
    step = max_step("1wgt", "convex", beta=c.beta / 100)
    xs = run(c, s, 2.0, step)
    bound = one_way_convex(beta=c.beta / 100, eta_s=2.0, step=step, D2=D2, **s._asdict())
    assert min(convex_errors(c, xs, 0.0, step)) > bound
    step = max_step("1wgt", "nonconvex", beta=c.beta / 100)
    squared = squared_gradients(c, run(c, s, 2.0, step))
    bound = one_way_nonconvex(beta=c.beta / 100, eta_s=2.0, step=step, F=F, **s._asdict())
    assert squared.min() > bound


def test_understated_variances_break_the_bounds():
    """From the optimum, so that noise is all there is; the variances stated 100 times too small."""
    c, s = case(0, ("quadratic", "quadratic"), distance=0.0), Setting(1.0, 1.0, 4, 4, 200)
    stated = s._asdict() | {"sigma2": 0.01, "sigma_c2": 0.01}
    step = max_step("1wgt", "convex", beta=c.beta)
    errors = convex_errors(c, run(c, s, 2.0, step), 0.0, step)
    known = dict(beta=c.beta, eta_s=2.0, step=step, D2=0.0)
    assert one_way_convex(**known, **stated) < errors[1] < one_way_convex(**known, **s._asdict())
    step = max_step("1wgt", "nonconvex", beta=c.beta)
    squared = squared_gradients(c, run(c, s, 2.0, step)).mean()
    known = dict(beta=c.beta, eta_s=2.0, step=step, F=0.0)
    stated = one_way_nonconvex(**known, **stated)
    assert stated < squared < one_way_nonconvex(**known, **s._asdict())


# The limits of the steps --------------------------------------------------------------------------


def power_sum(A, eta, K):
    """Q: K steps from x with the gradient A x + aug move by -Q (A x + aug)."""
    shrink = np.eye(len(A)) - eta * A
    return eta * sum(np.linalg.matrix_power(shrink, j) for j in range(K))


def round_matrix(algorithm, A_f, A_c, K, eta, eta_c, eta_s, eta_m):
    """One round without noise, on x or, in 2-way, on (x, gt_f, gt_c)."""
    I = np.eye(len(A_f))  # noqa: E741
    Q_f = power_sum(A_f, eta, K)
    if algorithm == "1wgt":
        return I - eta_s * Q_f @ (A_f + A_c)
    Q_c = power_sum(A_c, eta_c, K)
    if algorithm == "pt":
        return I - eta_m * (eta_s * Q_f @ A_f + Q_c @ A_c)
    zero = 0 * I
    delta_f = -np.hstack([Q_f @ A_f, zero, Q_f])
    delta_c = -np.hstack([Q_c @ A_c, Q_c, zero])
    x, gt_f, gt_c = np.split(np.eye(3 * len(I)), 3)
    return np.vstack([
        x + eta_m * (eta_s * delta_f + delta_c),
        -delta_f / (eta * K) - gt_c,
        -delta_c / (eta_c * K) - gt_f,
    ])  # fmt: skip


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_matrix_of_a_round_is_the_references(algorithm):
    rng = np.random.default_rng(3)
    A_f, A_c = spectrum(rng, 3, -0.5, 1), spectrum(rng, 3, 0.6, 2)
    M = round_matrix(algorithm, A_f, A_c, K=3, eta=0.1, eta_c=0.2, eta_s=1.5, eta_m=0.8)
    terms = [
        reference.Term(kind, lambda x, _, A=A: (np.zeros(1), A @ x))
        for kind, A in (("federated", A_f), ("central", A_c))
    ]
    s = reference.Settings(client_lr=0.1, server_lr=1.5, central_lr=0.2, merge_lr=0.8)
    data = [reference.Round([[[None] * 3]], [None, [None] * 3])] * 5
    x0 = rng.normal(size=3)
    state = np.concatenate([x0, np.zeros(len(M) - 3)])
    for x in reference.train(algorithm, terms, x0, s, data):
        state = M @ state
        np.testing.assert_allclose(state[:3], x, rtol=1e-10)


def two_hessians(rng, convexity, d=4):
    """Of dissimilar f_f and f_c, and of a sum that has a minimum."""
    if convexity == "nonconvex":
        A_f = spectrum(rng, d, -rng.uniform(0.1, 1), rng.uniform(0.1, 1))
        return A_f, spectrum(rng, d, rng.uniform(0.01, 0.2), rng.uniform(0.3, 1)) - A_f
    low = rng.uniform(0.01, 0.2) if convexity == "strongly-convex" else 0.0
    A = [rng.uniform(0.5, 2) * spectrum(rng, d, low, 1) for _ in range(2)]
    if convexity == "convex":  # flat in the last direction
        A = [np.pad(a, (0, 1)) for a in A]
    return tuple(A)


def dissimilarity(A_f, A_c):
    """The least B^2 with which some G exists: both sides are quadratic, B^2 rules far away."""
    H = np.linalg.pinv(A_f + A_c, rcond=1e-10)
    return float(np.linalg.eigvalsh(H @ (2 * A_f @ A_f + 2 * A_c @ A_c) @ H).max())


def radius(seed, algorithm, convexity, times=1.0):
    rng = np.random.default_rng(seed)
    A_f, A_c = two_hessians(rng, convexity)
    values = np.concatenate([np.linalg.eigvalsh(A) for A in (A_f, A_c)])
    K, eta_s = int(rng.integers(2, 11)), rng.uniform(1, 3)
    eta, eta_c = max_rates(
        algorithm, convexity, beta=np.abs(values).max(), mu=max(values.min(), 0), K=K, eta_s=eta_s,
        B2=max(dissimilarity(A_f, A_c), 1),
    )  # fmt: skip
    M = round_matrix(algorithm, A_f, A_c, K, times * eta, times * (eta_c or 0), eta_s, 1.0)
    return np.abs(np.linalg.eigvals(M)).max()


@EVERY
def test_nothing_diverges_at_the_limits_of_table_4(algorithm, convexity):
    found = [radius(seed, algorithm, convexity) for seed in range(100)]
    if convexity == "convex":  # 1: where f is flat nothing moves
        assert max(found) <= 1 + 1e-7
    else:
        assert max(found) < 1


@EVERY
def test_far_above_the_limits_something_diverges(algorithm, convexity):
    assert max(radius(seed, algorithm, convexity, times=1e5) for seed in range(10)) > 1.1


# Mistakes, and the command ------------------------------------------------------------------------

BAD = [
    ({"beta": 0}, "beta = 0: expected a finite number above 0"),
    ({"beta": math.nan}, "beta = nan: expected a finite number above 0"),
    ({"sigma2": -1}, "sigma2 = -1: expected a finite number of at least 0"),
    ({"sigma_c2": math.inf}, "sigma_c2 = inf: expected a finite number of at least 0"),
    ({"sigma_f2": "3"}, "sigma_f2 = '3': expected a finite number of at least 0"),
    ({"B2": 0.9}, "B2 = 0.9: expected a finite number of at least 1"),
    ({"epsilon": 0}, "epsilon = 0: expected a finite number above 0"),
    ({"epsilon": 1e-300}, "Give a larger epsilon"),
    ({"S": 0}, "S = 0: expected a whole number of at least 1"),
    ({"S": 2.5}, "S = 2.5: expected a whole number of at least 1"),
    ({"K": 1}, "K = 1: Table 1 holds for K >= 2"),
    ({"D2": None}, "D2 is not given: the convex bound needs the squared distance"),
    ({"D2": -1}, "D2 = -1: expected a finite number of at least 0"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_mistakes_in_rounds(changes, message):
    with pytest.raises(MixflError, match=message):
        rounds("2wgt", "convex", **(GIVEN | changes))


def test_other_mistakes():
    with pytest.raises(MixflError, match=r"unknown algorithm .*'2wtg'. Did you mean '2wgt'"):
        rounds("2wtg", "convex", **GIVEN)
    with pytest.raises(MixflError, match=r"Valid: convex, nonconvex, strongly-convex"):
        max_step("pt", "concave", beta=1)
    for mu in (0, 3):
        with pytest.raises(MixflError, match="0 < mu <= beta"):
            rounds("pt", "strongly-convex", **(GIVEN | {"mu": mu}))
    with pytest.raises(MixflError, match="eta_m = 0"):
        max_rates("pt", "convex", beta=1, K=2, eta_m=0)
    known: dict[str, Any] = dict(beta=1, **NOISE, eta_s=2, D2=6, step=0.125, T=11)
    mistakes = {
        "S = 1: the convex bound": {"S": 1},
        "needs eta_s > 1.581": {"eta_s": 1.5},
        r"holds for steps up to 0.125 \(Table 4\)": {"step": 0.126},
        "clients that are alike": {"sigma_f2": 0.1},
        "T = -1": {"T": -1},
    }
    for message, changes in mistakes.items():
        with pytest.raises(MixflError, match=message):
            one_way_convex(**(known | changes))
    with pytest.raises(MixflError, match="square-root form"):
        one_way_rounds("strongly-convex", epsilon=1)


OPTIONS = {
    "--beta": "2.25", "--mu": "0.5", "--sigma2": "12", "--sigma-c2": "0.5", "--K": "4", "--S": "6",
    "--G2": "9", "--B2": "3", "--D2": "8", "--F": "6", "--epsilon": "0.25",
}  # fmt: skip


def words(**changes):
    """As GIVEN; with changes, and None to leave an option out."""
    options = OPTIONS | {"--" + k.replace("_", "-"): v for k, v in changes.items()}
    return ["bounds", *(word for o in options.items() if o[1] is not None for word in o)]


def test_the_command_in_json():
    done = CliRunner().invoke(cli, [*words(eta_s="2"), "--json"])
    assert done.exit_code == 0, done.output
    found = {(e["algorithm"], e["convexity"]): e for e in json.loads(done.stdout)}
    assert found.keys() == TABLE_1.keys()
    for key, expected in TABLE_1.items():
        terms = [found[key]["rounds"][t] for t in ("variance", "dissimilarity", "smoothness")]
        assert terms == pytest.approx(expected)
        assert found[key]["condition"]["holds"] == (key != ("1wgt", "nonconvex"))
    assert found["1wgt", "convex"]["explicit_rounds"] > 200
    assert found["1wgt", "nonconvex"]["explicit_rounds"] is None
    assert found["1wgt", "convex"]["eta"] == pytest.approx(1 / (8 * 2.25 * 4 * 2))


def test_the_command_prints_the_classes_for_which_enough_is_given():
    done = CliRunner().invoke(cli, words())
    assert done.exit_code == 0, done.output
    assert all(f" {name} " in done.output for name in CONVEXITIES)
    assert "loose in practice" in done.output
    done = CliRunner().invoke(cli, words(mu=None, F=None, sigma_f2="1"))
    assert done.exit_code == 0, done.output
    assert "strongly-convex" not in done.output
    assert "nonconvex" not in done.output
    assert "suffice" not in done.output  # no explicit constants for clients that differ


WITHOUT = """
import sys
from mixfl.cli import main
try:
    main()
finally:
    print("loaded", sorted({"jax", "numpy", "optax", "matplotlib"} & set(sys.modules)))
"""
COMMANDS = {
    "good": (words(), 0, ""),
    "K": (words(K="1"), 2, "Table 1 holds for K >= 2"),
    "nan": (words(beta="nan"), 2, "beta = nan: expected a finite number above 0"),
    "mu": (words(mu="9"), 2, "0 < mu <= beta"),
    "no class": (words(mu=None, D2=None, F=None), 2, "Give --mu"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_does_not_wait_for_jax(name):
    given, code, message = COMMANDS[name]
    command = [sys.executable, "-c", WITHOUT, *given]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == code, found.stderr
    assert message in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout.splitlines()[-1] == "loaded []"

"""Epsilons of plans, against published values, closed forms and other accountants."""

import math

import dp_accounting
import numpy as np
import pytest

from mixfl.errors import MixflError
from mixfl.privacy.accountant import Rounds, usual_cap
from mixfl.privacy.banded import coefficients, sensitivity
from mixfl.privacy.planning import planned

# The published values have five decimals. Two of them differ from what the libraries compute today
# in the last one (PLD 2.092456 for 2.09245, RDP 2.275343 for 2.27535): by less than one unit of it.
LAST_DIGIT = 1e-5
LARGE = dict(rounds=10_000, delta=1e-5, noise=4.0)


def test_poisson_sampling():
    exact = Rounds(50_000, 1024).epsilon(**LARGE)
    assert exact == pytest.approx(2.09245, abs=LAST_DIGIT)
    assert exact == pytest.approx(2.092456, abs=1e-6)
    assert Rounds(1000, 100).epsilon(3.0, 512, 1e-6) == pytest.approx(3.77, abs=0.005)
    assert Rounds(1000, 100).noise_for(1.0, 512, 1e-6) == pytest.approx(9.66, abs=0.01)


@pytest.mark.parametrize(
    ("cap", "epsilon"),
    [(1024, 6.87451), (1056, 4.06910), (1088, 2.45377), (1120, 2.11659), (1152, 2.09310)],
)
def test_truncation_is_accounted_for(cap, epsilon):
    assert Rounds(50_000, 1024, cap=cap).epsilon(**LARGE) == pytest.approx(epsilon, abs=LAST_DIGIT)


def test_rdp_of_the_same_plan_is_a_little_larger():
    from jax_privacy.accounting import accountants, analysis

    accountant = analysis.DpsgdTrainingAccountant(accountants.RdpAccountantConfig())
    params = analysis.DpParams(
        noise_multipliers=4.0, num_samples=50_000, delta=1e-5, batch_size=1024
    )
    rdp = accountant.compute_epsilon(10_000, params)
    assert rdp == pytest.approx(2.27535, abs=LAST_DIGIT)
    assert rdp == pytest.approx(2.275343, abs=1e-6)
    assert Rounds(50_000, 1024).epsilon(**LARGE) < rdp


def test_matrix_mechanism():
    plan = Rounds(10_000, 100, "none", min_sep=16, bands=16)
    rho = sensitivity(16, 16, 32) ** 2 / (2 * 8.35**2)  # in zCDP
    assert rho == pytest.approx(0.0144, abs=1e-4)
    assert plan.epsilon(8.35, 32, 1e-10) == pytest.approx(0.994, abs=5e-4)


@pytest.mark.parametrize("rounds", [1, 5, 23])
def test_sensitivity_of_the_matrix(rounds):
    """Against all sets of rounds at least min_sep apart."""
    bands, min_sep = 4, 5
    column = np.concatenate([coefficients(bands), np.zeros(rounds)])[:rounds]
    matrix = np.array(
        [[column[i - j] if i >= j else 0 for j in range(rounds)] for i in range(rounds)]
    )
    worst = 0.0

    def search(first, total):
        nonlocal worst
        worst = max(worst, float(np.linalg.norm(total)))
        for j in range(first, rounds):
            search(j + min_sep, total + matrix[:, j])

    search(0, np.zeros(rounds))
    assert worst <= sensitivity(bands, min_sep, rounds) + 1e-9
    assert worst >= 0.6 * sensitivity(bands, min_sep, rounds)


def test_fixed_cohorts_count_a_replaced_client():
    """All clients in every round: the sum moves by 2C, so it is the Gaussian mechanism with z/2."""
    alone = dp_accounting.get_epsilon_gaussian(10 / 2 / math.sqrt(7), 1e-5)
    assert Rounds(50, 50, "fixed").epsilon(10, 7, 1e-5) == pytest.approx(alone)
    sampled = Rounds(5000, 50, "fixed").epsilon(10, 7, 1e-5)
    assert sampled < alone / 5
    assert sampled > Rounds(5000, 50).epsilon(10, 7, 1e-5)


@pytest.mark.parametrize(
    "plan",
    [
        Rounds(1000, 20, cap=45), Rounds(1000, 20, "fixed"),
        Rounds(1000, 20, "none", min_sep=8), Rounds(1000, 20, "none", min_sep=8, bands=8),
    ],
)  # fmt: skip
def test_noise_is_enough_and_hardly_more(plan):
    noise = plan.noise_for(2.0, 40, 1e-6)
    assert plan.epsilon(noise, 40, 1e-6) <= 2.0
    assert plan.epsilon(noise * 0.99, 40, 1e-6) > 2.0
    assert plan.affordable(noise, 2.0, 1e-6, 1000) == pytest.approx(40, abs=1)
    assert plan.affordable(noise, 2.0, 1e-6, 10) == 10
    assert plan.epsilon(noise, 0, 1e-6) == 0
    assert plan.epsilon(0.0, 1, 1e-6) == math.inf


def test_correlated_noise_is_smaller_in_the_model():
    """The sum of all rounds' noise, for the same epsilon."""
    rounds, min_sep = 64, 16
    column = np.concatenate([coefficients(16), np.zeros(rounds - 16)])
    matrix = np.array(
        [[column[i - j] if i >= j else 0 for j in range(rounds)] for i in range(rounds)]
    )
    summed = np.linalg.norm(np.ones(rounds) @ np.linalg.inv(matrix))  # of C^-1 Z
    assert summed < 0.6 * math.sqrt(rounds)
    same = Rounds(1000, 10, "none", min_sep=min_sep)
    banded = Rounds(1000, 10, "none", min_sep=min_sep, bands=16)
    assert banded.epsilon(3.0, rounds, 1e-6) == same.epsilon(3.0, rounds, 1e-6)


def test_cap():
    assert usual_cap(1000, 100) == 138
    assert usual_cap(10, 10) == 10
    with pytest.raises(MixflError, match="more than the cap of 90"):
        planned(1000, 100, 10, 1e-6, noise=1.0, cap=90)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(noise=1.0, epsilon=1.0), "one of --noise and --epsilon"),
        (dict(), "one of --noise and --epsilon"),
        (dict(noise=-1.0), "above 0"),
        (dict(epsilon=0.0), "above 0"),
        (dict(noise=1.0, delta=1e-3), "below 1/clients"),
        (dict(noise=1.0, cohort=2000), "lower it"),
        (dict(noise=1.0, mechanism="banded"), "--sampling none"),
        (dict(epsilon=1e-9, sampling="none"), "no noise multiplier"),
    ],
)
def test_bad_plans(given, message):
    with pytest.raises(MixflError, match=message):
        planned(**{"clients": 1000, "cohort": 10, "rounds": 10, "delta": 1e-6, **given})

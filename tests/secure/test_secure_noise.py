"""Noise that clients add: its distribution, its size, and what it is worth."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mixfl.aggregation.wire import Sent
from mixfl.deploy.flower.messages import Rejected
from mixfl.deploy.flower.secure_noise import LEAST_SIGMA, Grid, discrete_gaussian
from mixfl.deploy.flower.secure_sums import Asked, Coding, Ranges, Told
from mixfl.deploy.secure import ring
from mixfl.errors import MixflError
from mixfl.privacy.accountant import Rounds
from mixfl.settings import Settings

PRIVATE = Settings(
    dp_noise_multiplier=1.0, dp_delta=1e-3, dp_clip=0.5, cohort_size=6, weighting="uniform",
    local_steps=3, client_lr=0.1,
)  # fmt: skip
PLAIN = Settings(cohort_size=6, local_steps=3, client_batch=4)


@pytest.mark.parametrize("sigma", [0.7, 3.0, 8.0])
def test_a_discrete_gaussian(sigma):
    drawn = discrete_gaussian(sigma, 200_000)
    reach = int(4 * sigma) + 1
    mass = np.exp(-(np.arange(-200, 201) ** 2) / (2 * sigma**2))
    expected = (mass / mass.sum())[200 - reach : 201 + reach]
    counts = np.bincount(drawn + 10_000, minlength=20_000)[10_000 - reach : 10_001 + reach]
    rest = len(drawn) - counts.sum(), 1 - expected.sum()
    found = stats.chisquare([*counts, rest[0]], len(drawn) * np.array([*expected, rest[1]]))
    assert found.pvalue > 1e-6
    assert len(np.unique(discrete_gaussian(50.0, 1000))) > 50


@given(st.floats(1e-6, 1e6), st.integers(1, 300), st.integers(0, 5))
def test_no_client_moves_a_sum_by_more_than_the_sensitivity(size, numbers, seed):
    """Rounding included, whatever it sends."""
    flat = np.random.default_rng(seed).normal(size=numbers) * size
    grid = Grid(PRIVATE, 1.0, numbers, 6)
    assert np.linalg.norm(grid.coded(flat, numbers)) <= grid.sensitivity
    assert np.linalg.norm(grid.coded(flat, numbers // 2)) <= grid.sensitivity


@pytest.mark.parametrize("noise", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("clients", [3, 6, 100])
def test_the_fewest_survivors_have_all_the_noise(noise, clients):
    grid = Grid(PRIVATE, noise, 1000, clients)
    fewest = -(-2 * clients // 3)
    assert grid.sigma * np.sqrt(fewest) == pytest.approx(noise * grid.sensitivity)
    assert grid.sigma >= LEAST_SIGMA
    # in units of C: rounding costs less than 1 %
    assert noise <= grid.sigma * np.sqrt(fewest) * grid.step / grid.clip < 1.01 * noise


def test_a_sum_that_does_not_fit_is_refused():
    with pytest.raises(MixflError, match="does not fit 32 bits"):
        Grid(PRIVATE, 1e4, 10**8, 100)


def test_what_is_not_finite_is_nothing():
    grid = Grid(PRIVATE, 1.0, 3, 6)
    assert not grid.coded(np.array([np.nan, 1.0, 2.0]), 3).any()


def test_the_accountant_asks_for_a_little_more():
    """RDP holds for sums of discrete Gaussians; the exact one is for the continuous one."""
    exact, renyi = (Rounds(100, 10, "none", discrete=d) for d in (False, True))
    for noise, rounds in [(3.0, 5), (10.0, 100)]:
        least, found = (r.epsilon(noise, rounds, 1e-5) for r in (exact, renyi))
        assert least <= found < 1.3 * least


# Vectors


def told(x, private=False, **changes) -> Told:
    ranges = Ranges(PRIVATE if private else PLAIN)
    found = jax.tree.map(np.asarray, ranges.told(ranges.init(x, 0)))
    return found._replace(**changes)


def upload(rng, steps=2, weight=5.0, scale=0.1) -> Sent:
    x = {"a": rng.normal(size=(4, 6)) * scale * weight, "b": rng.normal(size=()) * scale * weight}
    return Sent(x, None, np.float32(weight), np.float32(steps), np.float32(rng.normal()))


@pytest.mark.parametrize("bits", [32, 16, 8])
@pytest.mark.parametrize("both", [False, True])
def test_sums_are_those_of_the_summands(bits, both):
    """To the quantization: with ranges known, an error of some steps of the grid."""
    rng = np.random.default_rng(0)
    sent = [upload(rng, 1 + i % 3, 1.0 + i) for i in range(6)]
    known = np.full(6, 2.0, np.float32) if bits < 32 else np.zeros(6, np.float32)
    coding = Coding(PLAIN, sent[0], told(sent[0].weighted, ranges=known), 6, Asked(bits, both, 3))
    total = ring.zeros(coding.layout)
    for each in sent:
        ring.add(total, coding.vector(each))
    sums, levels, _ = coding.sums(ring.reduced(total, coding.layout), 6)
    step = {32: 1e-5, 16: 2.0 / (32767 // 6), 8: 2.0 / 21}[bits]
    for name in ("a", "b"):
        wanted = sum(s.weighted[name] for s in sent)
        np.testing.assert_allclose(sums.weighted[name], wanted, atol=6 * step)
        if both:
            wanted = sum(s.weighted[name] / s.weight for s in sent)
            np.testing.assert_allclose(sums.unweighted[name], wanted, atol=6 * step)
    assert (sums.weight, sums.steps, sums.clients) == (21, 12, 6)
    assert sums.by_steps.tolist() == [1 + 4, 2 + 5, 3 + 6]
    assert sums.loss == pytest.approx(sum(float(s.loss) for s in sent), abs=1e-5)
    assert levels.sum(1).tolist() == [6, 6, *([6, 6] if both else [0, 0]), 0, 0]
    assert coding.layout[0] == ring.Segment(bits, 25 * (1 + both))


def test_codes_are_unbiased():
    """The mean of many draws is within 5 standard errors."""
    sent = upload(np.random.default_rng(1), weight=1.0)
    ranges = np.full(6, 1.0, np.float32)
    coding = Coding(PLAIN, sent, told(sent.weighted, ranges=ranges), 6, Asked(8, False, 3))
    draws = []
    for _ in range(2000):
        total = coding.vector(sent)
        draws.append(coding.sums(total, 1)[0].weighted["a"])
    error = (np.mean(draws, 0) - sent.weighted["a"]) / (np.std(draws, 0) / np.sqrt(2000))
    assert np.abs(error).max() < 5


def test_a_change_beyond_the_range_is_shortened_and_told():
    sent = upload(np.random.default_rng(2), weight=1.0, scale=100.0)
    coding = Coding(PLAIN, sent, told(sent.weighted), 3, Asked(32, False, 3))
    assert coding.ranges[0] == 16 * 4 * 3
    sums, levels, saturated = coding.sums(coding.vector(sent), 1)
    assert saturated == 1
    a = sent.weighted["a"]
    np.testing.assert_allclose(sums.weighted["a"], a * coding.ranges[0] / abs(a).max(), rtol=1e-5)
    ranges = Ranges(PLAIN)
    after = ranges.told(ranges.after(ranges.init(sent.weighted, 0), levels))
    assert after.ranges[0] >= abs(a).max()


def test_an_array_without_changes_does_not_prevent_compression():
    """It is sent as zeros. Its first change is lost, and told; the next one has a range."""
    rng, ranges = np.random.default_rng(3), Ranges(PLAIN)
    sent = upload(rng)
    sent.weighted["b"] = np.zeros(())
    state = ranges.init(sent.weighted, 0)

    def told():
        return jax.tree.map(np.asarray, ranges.told(state))

    found = []
    for change in (0.0, 0.0, 0.3, 0.3):
        coding = Coding(PLAIN, sent, told(), 3, Asked(8, False, 3))
        sent.weighted["b"] = np.array(change)
        sums, levels, saturated = coding.sums(coding.vector(sent), 1)
        found.append((coding.bits, round(float(sums.weighted["b"]), 1), saturated))
        state = ranges.after(state, levels)
    assert found == [(32, 0.0, 0), (8, 0.0, 0), (8, 0.0, 1), (8, 0.3, 0)]


def test_sums_of_other_clients_are_noticed():
    """Masks that have not cancelled leave random numbers."""
    sent = upload(np.random.default_rng(0))
    coding = Coding(PLAIN, sent, told(sent.weighted), 3, Asked(32, False, 3))
    vector = coding.vector(sent)
    with pytest.raises(Rejected, match="not that of the survivors"):
        coding.sums(vector, 2)
    ring.add_mask(vector, coding.layout, bytes(32))
    with pytest.raises(Rejected, match="not that of the survivors"):
        coding.sums(ring.reduced(vector, coding.layout), 1)


def test_what_is_not_finite_is_not_sent():
    sent = upload(np.random.default_rng(0))
    sent.weighted["a"][0, 0] = np.inf
    coding = Coding(PLAIN, sent, told(sent.weighted), 3, Asked(32, False, 3))
    with pytest.raises(Rejected, match="not finite"):
        coding.vector(sent)


def test_a_private_vector_tells_nothing_but_its_numbers():
    sent = upload(np.random.default_rng(0), weight=1.0)
    coding = Coding(PRIVATE, sent, told(sent.weighted, private=True), 6, Asked(32, False, 3))
    assert coding.layout == (ring.Segment(32, 25), ring.Segment(64, 1))
    total = ring.zeros(coding.layout)
    for _ in range(6):
        ring.add(total, coding.vector(sent))
    sums, levels, saturated = coding.sums(total, 6)
    assert levels is None
    assert (sums.weight, sums.steps, sums.loss, saturated) == (6, 18, 0, 0)
    norm = np.sqrt(sum(np.sum(a**2) for a in sent.weighted.values()))
    factor = min(1.0, 0.5 / norm)
    deviation = 1.0 * 0.5 * np.sqrt(6 / 4)
    wanted = 6 * factor * sent.weighted["a"]
    assert np.abs(sums.weighted["a"] - wanted).max() < 5 * deviation
    assert 0.4 * deviation < np.std(sums.weighted["a"] - wanted) < 2 * deviation

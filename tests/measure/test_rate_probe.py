"""The probe of learning rates, on runs whose losses are known."""

import math

import numpy as np
import pytest

from mixfl.errors import MixflError
from mixfl.measure.clock import Clock
from mixfl.measure.diagnosis import compared
from mixfl.measure.rate_probe import (
    CLEARLY,
    LONGEST,
    RATES,
    ROUNDS,
    Probed,
    cut_short,
    decided,
    doubtful,
    falling,
    fastest,
    probed,
    settled,
)
from mixfl.theory.advice import Choice
from mixfl.theory.predictions import Prediction

FIRST = 1.0


class Known:
    """A run whose loss after round t is loss(eta, t)."""

    def __init__(self, loss, eta):
        self.of, self.eta, self.losses = loss, eta, np.zeros(0)

    def go_on(self, rounds):
        assert rounds > len(self.losses)
        self.losses = np.array([self.of(self.eta, t) for t in range(1, rounds + 1)])

    @property
    def loss(self):
        return float(np.mean(self.losses[len(self.losses) // 2 :]))


def probe(loss, eta, budget=math.inf):
    runs = []

    def start(rate):
        runs.append(Known(loss, rate))
        return runs[-1]

    clock = Clock(budget, lambda *_: None)
    return probed(start, eta, FIRST, clock).rates, {len(r.losses) for r in runs}


def decay(best):
    """Faster with longer steps, up to `best`; longer ones do not come down."""
    return lambda eta, t: math.exp(-2 * t * eta / best) if eta <= 1.2 * best else 1.5


@pytest.mark.parametrize("eta", [0.1, 0.07, 0.2, 0.03])
def test_the_best_rate_is_found_within_a_factor_of_sqrt_2(eta):
    found, lengths = probe(decay(0.1), eta)
    best = min(found, key=lambda pair: pair[1])[0]
    assert 0.1 / 2**0.5 <= best <= 0.12
    assert lengths == {ROUNDS}  # the loss has come down: no need to go on
    etas = [e for e, _ in found]
    assert etas == sorted(etas)
    assert any(e == pytest.approx(best / 2**0.5) for e in etas)  # its neighbors were tried


def test_runs_go_on_while_the_loss_falls():
    """Long steps are worse at first and better later: ten rounds would mislead."""

    def loss(eta, t):
        rises = 0.5 if eta > 0.15 and t < 15 else 0.0
        return math.exp(-0.2 * t * min(eta, 0.25)) + rises

    found, lengths = probe(loss, 0.1)
    assert lengths == {LONGEST}
    best = min(found, key=lambda pair: pair[1])[0]
    assert best > 0.19
    assert len(found) <= RATES + 2
    # Without time, the shortest probe and the three rates that must be.
    found, lengths = probe(loss, 0.1, budget=1e-9)
    assert lengths == {ROUNDS}
    assert [e for e, _ in found] == pytest.approx([0.05, 0.1, 0.2])
    assert min(found, key=lambda pair: pair[1])[0] == 0.1


def test_a_rate_that_diverges_does_not_go_on():
    def loss(eta, t):
        return math.inf if eta > 0.15 else 1 - 0.01 * t

    found, lengths = probe(loss, 0.1)
    assert lengths == {ROUNDS, LONGEST}
    assert found[-1][1] == math.inf


def test_a_loss_is_falling_if_much_of_the_gain_is_recent():
    steady = np.linspace(1, 0, 11)[1:]
    assert falling(steady, 1.0)
    assert not falling(np.array([0.5, 0.1, 0.05, 0.01, 0, 0, 0, 0, 0, 0.0]), 1.0)
    assert not falling(np.full(10, 1.0), 1.0)
    assert not falling(steady[::-1], 1.0)


def predicted(rounds, eta=0.1):
    return Prediction("pt", rounds, eta)


def in_doubt(probe, prediction):
    return doubtful(probe, prediction, FIRST, 0.1)


def test_a_prediction_is_in_doubt_if_losses_fall_long_after_it():
    probe = Probed({0.1: np.full(40, 0.5)}, rounds=40, falling=True)
    assert in_doubt(probe, predicted(20))
    assert not in_doubt(probe, predicted(21))
    assert not in_doubt(probe._replace(falling=False), predicted(3))
    assert not in_doubt(probe, predicted(math.inf))


def test_a_prediction_is_in_doubt_if_its_rate_takes_twice_as_long():
    """Even if the losses have come down by the end of the probe."""
    came_down = np.maximum(np.exp(-0.2 * np.arange(1, 41)), 0.01)  # a tenth after 11 rounds
    probe = Probed({0.05: np.full(40, 0.9), 0.1: came_down}, rounds=40, falling=False)
    assert in_doubt(probe, predicted(5)) is True  # no NumPy bool: it goes into JSON
    assert not in_doubt(probe, predicted(9))
    assert in_doubt(probe, predicted(9, eta=0.05))  # it does not get there at all


def test_a_probe_without_time_is_cut_short():
    def short(probe, rounds):
        return cut_short(probe, predicted(rounds), FIRST, 0.1)

    probe = Probed({0.1: np.full(10, 0.5)}, rounds=10, falling=True)
    assert short(probe, 30)
    assert not short(probe._replace(falling=False), 30)
    assert not short(probe._replace(rounds=LONGEST), 30)
    assert short(probe._replace(rounds=LONGEST), 3)  # and no time to compare


def flat(loss):
    return np.full(40, loss)


def falls(speed):
    return np.exp(-0.02 * speed * np.arange(1, 41))


def test_a_run_settles_where_it_stays():
    assert settled(falls(1.0), 0.5) == pytest.approx(math.log(2) / 0.02, abs=1)
    assert settled(falls(1.0), 0.4) == math.inf
    assert settled(flat(math.nan), 0.4) == math.inf
    # Down for ten rounds, and up again.
    assert settled(np.repeat([0.3, 0.6], [10, 30]), 0.4) == math.inf
    # One good round is luck.
    spiky = np.where(np.arange(40) == 5, 0.0, np.where(np.arange(40) < 20, 0.6, 0.3))
    assert settled(spiky, 0.4) > 18


@pytest.mark.parametrize("speed", [1.3, 1.4, 1.6, 2.0])
def test_a_little_loss_may_be_many_rounds(speed):
    """On a long tail, a few percent of the gain in loss are many rounds."""
    fast, slow = ((1 + s * np.arange(1, 41)) ** -0.3 for s in (speed, 1.0))
    most = CLEARLY if speed <= 1.4 else 2 * CLEARLY
    assert 0 < slow[-1] - fast[-1] < most * (1 - fast[-1])
    probes = {a: Probed({0.1: p}, 40, True) for a, p in {"pt": slow, "2wgt": fast}.items()}
    assert fastest(probes, "pt", FIRST, 0.1) == ("2wgt", 0.1)


def test_another_algorithm_must_be_clearly_better():
    def best(pt, two_way):
        probes = {"pt": pt, "2wgt": two_way}
        made = {a: Probed({0.1: p, 0.2: flat(9.0)}, 40, False) for a, p in probes.items()}
        return fastest(made, "pt", FIRST, 0.1)[0]

    assert best(falls(1.2), falls(1.0)) == "pt"
    # The better one has come down long before.
    assert best(falls(1.0), np.maximum(falls(4.0), falls(1.0)[-1] - 0.01)) == "2wgt"
    assert best(falls(1.0), falls(1.02)) == "pt"
    assert best(falls(1.0), falls(1.12)) == "2wgt"


def test_the_aim_is_the_target_not_the_least_loss():
    """A longer step is at the target in half of the rounds, and ends a little higher."""
    probes = {"2wgt": Probed({0.1: falls(3.0), 0.2: np.maximum(falls(6.0), 0.2)}, 40, True)}
    assert probes["2wgt"].best == 0.1
    assert fastest(probes, "2wgt", FIRST, 0.2) == ("2wgt", 0.2)
    # But one that comes down and does not stay is of no use.
    probes["2wgt"].curves[0.4] = np.repeat([0.05, 0.5], [12, 28])
    assert fastest(probes, "2wgt", FIRST, 0.2) == ("2wgt", 0.2)


def test_a_target_below_the_noise_of_a_probe_asks_for_no_more_than_it_can_tell():
    ends = {"pt": 0.015, "2wgt": 0.01}
    probes = {a: Probed({0.1: np.maximum(falls(10.0), e)}, 40, True) for a, e in ends.items()}
    assert fastest(probes, "pt", FIRST, 1e-4) == ("pt", 0.1)


def test_rates_go_down_as_long_as_all_diverge():
    found, _ = probe(lambda eta, t: math.inf if eta > 0.001 else math.exp(-t), 1.0)
    finite = [eta for eta, loss in found if math.isfinite(loss)]
    assert min(finite) <= 0.001
    assert max(finite) <= 0.001 * 2**0.5


def test_a_rate_that_diverges_late_is_found_out():
    """Also if all the first ones diverged at once."""

    def loss(eta, t):
        late = eta > 0.02 and t > 15
        return math.inf if eta > 0.05 or late else 1 - 0.002 * t * (1 + 10 * eta)

    found, lengths = probe(loss, 1.0)
    assert LONGEST in lengths
    best = min(found, key=lambda pair: pair[1])[0]
    assert 0.01 <= best <= 0.02


def test_no_rate_that_diverges_is_recommended():
    """Not even if the only others are longer, and noise speaks against them."""
    assert decided(0.1, {0.1: flat(math.inf), 0.2: falls(1.0)}, 1.0) == 0.2
    probe = Probed({0.1: flat(math.inf), 0.2: falls(1.0)}, 40, True)
    assert list(probe.without(lambda eta: eta > 0.1)) == [0.1, 0.2]
    probe = Probed({0.1: falls(0.5), 0.2: falls(1.0)}, 40, True)
    assert list(probe.without(lambda eta: eta > 0.1)) == [0.1]


def test_if_all_rates_diverge_there_is_no_advice():
    with pytest.raises(MixflError, match=r"all learning rates from .* to 2 diverged"):
        probe(lambda eta, t: math.inf, 1.0)


def test_an_algorithm_that_diverges_is_left_out_of_the_comparison():
    def begin(algorithm):
        bad = algorithm == "1wgt"
        return lambda eta: Known(lambda e, t: math.inf if bad else math.exp(-0.04 * t), eta)

    every = [Prediction(a, 2.0, 0.1) for a in ("pt", "1wgt", "2wgt")]
    probe = Probed({0.1: falls(1.0)}, rounds=40, falling=True)
    clock = Clock(math.inf, lambda *_: None)
    chosen, _, _, losses = compared(begin, Choice(every[0], every, True), probe, FIRST, 0.1, clock)
    assert chosen.algorithm == "2wgt"
    assert set(losses) == {"pt", "2wgt"}


def test_probes_of_algorithms_are_equally_long_and_begin_where_the_first_one_ended():
    """The chosen one's best rate was half of the predicted one: so are the others' first ones."""
    begun: list[tuple[str, float]] = []
    bests = {"pt": 0.05, "1wgt": 0.1, "2wgt": 0.2}

    def begin(algorithm):
        def start(eta):
            begun.append((algorithm, eta))
            return Known(lambda e, t: 1 - 0.001 * t * min(e, bests[algorithm]) / 0.2, eta)

        return start

    choice = Choice(
        Prediction("pt", 2.0, 0.1),
        [Prediction(a, 2.0, 2 * bests[a]) for a in ("pt", "1wgt", "2wgt")],
        True,
    )
    curves = {0.025: np.full(20, 0.995), 0.05: np.full(20, 0.99), 0.1: np.full(20, 0.995)}
    probe = Probed(curves, rounds=20, falling=True)
    clock = Clock(math.inf, lambda *_: None)
    chosen, found, eta, losses = compared(begin, choice, probe, FIRST, 0.1, clock)
    assert dict(reversed(begun)) == pytest.approx({"1wgt": 0.1, "2wgt": 0.2})
    assert chosen.algorithm == "2wgt"
    assert found.rounds == 20
    assert eta in found.curves
    assert losses["pt"] == 0.99
    assert losses["2wgt"] == min(found.rates, key=lambda r: r[1])[1] < losses["1wgt"]

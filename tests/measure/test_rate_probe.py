"""The probe of learning rates, on runs whose losses are known."""

import math

import numpy as np
import pytest

from mixfl.measure.clock import Clock
from mixfl.measure.rate_probe import LONGEST, RATES, ROUNDS, falling, probed

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
    return probed(start, eta, FIRST, clock), {len(r.losses) for r in runs}


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

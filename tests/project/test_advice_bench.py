"""The arithmetic of benchmarks.advice_real, and its tuning where the best rate is known."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

import mixfl
from benchmarks import advice_real, mixed_zoo
from benchmarks.advice_real import KEPT, Tuning, as_json, edge, reached, show
from mixfl.settings import Settings


def test_a_target_is_reached_when_the_loss_stays_below():
    falling = np.concatenate([np.arange(10, 0, -1.0), np.zeros(5)])
    assert reached(falling, 4.5) == pytest.approx(5.5)
    assert reached(falling, -1) == math.inf
    back = falling.copy()
    back[7:9] = 50  # a round below does not count
    assert 8 < reached(back, 4.5) <= 9
    assert reached(np.full(20, np.inf), 1.0) == math.inf
    assert reached(np.array([3.0] + [1.0] * KEPT), 3.5) == 0


def test_rates_grow_beyond_the_best_at_an_edge():
    assert edge({-1: 3.0, 0: 2.0, 1: 1.0}) == 2
    assert edge({-1: 1.0, 0: 2.0, 1: math.inf}) == -2
    assert edge({-1: 3.0, 0: 2.0, 1: 2.5}) == 0
    assert edge({-1: math.inf, 0: math.inf, 1: math.inf}) == -2


def test_tuning_finds_the_step_of_a_quadratic():
    """K = 1 without noise: x' = (1 - 2 eta) x for PT and 1-way, best at 0.5."""
    loss = lambda x, b: 0.5 * jnp.sum((x - b["a"]) ** 2, -1)  # noqa: E731
    rows = {"a": np.zeros((20, 2), np.float32)}
    clients = mixfl.ClientData.from_arrays(rows, client=np.repeat(np.arange(5), 4))
    given = mixfl.Problem(
        init=lambda key: jnp.ones(2),
        terms=[mixfl.Federated(loss, clients), mixfl.Central(loss, rows)],
    )
    s = Settings(cohort_size=5, local_steps=1, client_batch=4, client_lr=0.0625, central_batch=20)
    tuning = Tuning(given, s, horizon=12)
    tuning.grow()
    assert tuning.goal == pytest.approx(0.2)  # a tenth of the first loss, 2
    found = tuning.tuned()
    for a in ("pt", "1wgt"):
        assert found[a]["client_lr"] == 0.5
        assert found[a]["rounds"] == pytest.approx(0.9)
    assert tuning.rounds("pt", 0.25, 10) == pytest.approx(1 + (0.5 - 0.2) / (0.5 - 0.125))


def test_a_loss_without_data_counts_once():
    """A sample of several rounds has it in each of them."""
    loss = lambda x, b: 0.5 * jnp.sum((x - b["a"]) ** 2, -1)  # noqa: E731
    clients = mixfl.ClientData.from_arrays(
        {"a": np.zeros((20, 2), "f")}, np.repeat(np.arange(5), 4)
    )
    given = mixfl.Problem(
        init=lambda key: jnp.ones(2),
        terms=[mixfl.Federated(loss, clients), mixfl.Central(lambda x: jnp.sum(x**2))],
    )
    tuning = Tuning(given, Settings(cohort_size=5, client_batch=4, local_steps=1), horizon=3)
    assert tuning.run("pt", 1e-9, rounds=1)[0] == pytest.approx(1 + 2)


def test_a_rate_that_is_best_by_luck_does_not_hide_the_others():
    """With the first seed, 1-way is there in 2 rounds with rate 2; with all seeds, never."""

    class Known(Tuning):
        def __init__(self):
            self.s, self.horizon, self.known_goal = Settings(client_lr=1.0), 20, 0.5
            first = {"pt": {0: 9}, "1wgt": {1: 2, 0: 6}, "2wgt": {0: 7}}
            self.curves = {
                a: {i: np.where(np.arange(21) < r, 1.0, 0.0) for i, r in of.items()}
                for a, of in first.items()
            }

        def rounds(self, algorithm, eta, most, first=None):
            return {("1wgt", 1.0): 6.0, ("2wgt", 1.0): 5.0}.get((algorithm, eta), math.inf)

    found = Known().tuned()
    assert found["1wgt"] == {"client_lr": 1.0, "rounds": 6.0, "tried": 2}
    assert found["2wgt"]["rounds"] == 5
    assert found["pt"]["rounds"] == pytest.approx(8.5)  # far from the best: the first seed's


@pytest.mark.parametrize("name", mixed_zoo.MODELS)
def test_the_mixed_zoo_has_other_labels_at_the_server(name):
    given, _ = mixed_zoo.problem(name, 0.1)
    fed, central = given.terms
    at_clients = set(fed.examples.take(np.arange(len(fed.examples)))["label"].tolist())
    at_server = set(central.examples.take(np.arange(len(central.examples)))["label"].tolist())
    assert at_clients == set(mixed_zoo.OF_CLIENTS)
    assert at_server == set(mixed_zoo.OF_SERVER)
    assert 30 < len(fed.clients) <= mixed_zoo.CLIENTS


def test_results_without_an_end_are_null():
    (row,) = json.loads(as_json([{"rounds": math.inf, "tuned": {"pt": [1.23456789, "a"]}}]))
    assert row == {"rounds": None, "tuned": {"pt": [1.2346, "a"]}}


def test_the_budget_is_recorded_and_shown_where_it_is(monkeypatch, capsys):
    monkeypatch.setattr(advice_real, "diagnose", lambda problem, s, budget: "advice")
    advice, took = advice_real.diagnosed(None, None, 180.0)
    assert advice == "advice"
    assert took.keys() == {"seconds", "processor_seconds", "budget"}
    assert took["budget"] == 180
    run = {"algorithm": "pt", "client_lr": 1.0, "rounds": 4.0}
    row = {
        "problem": "text", "tuned": dict.fromkeys(advice_real.NAMES, run), "advised": run,
        "ratio": 1.0, "ratio_tuned": 1.0,
    }  # fmt: skip
    old = {"seconds": 90.2, "processor_seconds": 60.4}
    show([row | {"diagnosis": old}, row | {"diagnosis": old | {"budget": 180.0}}])
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.endswith("60 s of processor time, 90 s by the clock, budget not recorded")
    assert second.endswith("60 s of processor time, 90 s by the clock, budget 180 s")

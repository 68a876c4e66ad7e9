"""Weights that are held the other way round give the same models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_problem import WIDTH, people, problem, trained
from problems import DIM, examples, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.engine.auto import clients_at_once
from mixfl.forms import turned
from mixfl.forms.first_layers import Layer
from mixfl.forms.turned import Turned, pays


def network(params, batch):
    """Two layers, and a table that is looked up."""
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    z = (hidden @ params["out"]).sum(-1)
    if "word" in batch:
        z = z + params["table"][batch["word"]].sum(-1)
    return jnp.logaddexp(0.0, -batch["y"] * z)


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "w": 0.5 * jax.random.normal(keys[0], (DIM, WIDTH)), "b": jnp.zeros(WIDTH),
        "out": jax.random.normal(keys[1], (WIDTH, 2)),
        "table": jax.random.normal(keys[2], (50, 2)),
    }  # fmt: skip


def with_words(data):
    return data | {"word": (np.arange(len(data["y"])) % 50).astype(np.int32)}


def with_table():
    data = with_words(examples(1, 44, 0.3))
    clients = mixfl.ClientData.from_arrays(data, client=np.arange(44) // 5)
    return mixfl.Problem(
        init,
        [
            mixfl.Federated(network, clients, 0.7, rows={"table": "word"}),
            mixfl.Central(network, with_words(examples(2, 40, -0.5)), 0.4),
        ],
    )


def weights(simulator) -> list[str]:
    """Those that are turned."""
    forms = simulator.forms.of["federated"]
    return [n for form in forms if isinstance(form, Turned) for n in form.weights]


def agree(p, name, s, monkeypatch, expected):
    """With the form and without it."""
    monkeypatch.setattr(turned, "LONG", 1)
    with_form, result = trained(p, name, s)
    assert sorted(weights(with_form)) == sorted(expected)
    monkeypatch.setattr(turned, "THIN", 0)
    monkeypatch.setattr(turned, "WIDE", 10**9)
    without, wanted = trained(p, name, s)
    assert not weights(without)
    assert with_form.traces == without.traces
    for a, b in zip(*map(jax.tree.leaves, (result.state, wanted.state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    for key in wanted.info:
        np.testing.assert_allclose(result.info[key], wanted.info[key], rtol=1e-4)


@pytest.mark.parametrize("name", ["fedavg", "pt", "1wgt", "2wgt"])
def test_it_is_the_same_model(name, monkeypatch):
    s = settings(rounds=3, first_layer="plain")
    agree(problem(network, init), name, s, monkeypatch, ["w", "out"])


@pytest.mark.parametrize(
    "variant",
    [
        {"cohort_chunk": 2},
        {"devices": 2, "cohort_size": 6},
        {"local_steps": 6, "client_batch": 2, "weighting": "uniform"},
        {"clip": 0.1},
        {"grad_clip": 0.1},
    ],
    ids=str,
)
def test_it_is_the_same_in_other_settings(variant, monkeypatch):
    s = settings(rounds=3, first_layer="plain", **variant)
    agree(problem(network, init), "2wgt", s, monkeypatch, ["w", "out"])


@pytest.mark.parametrize("first_layer", ["plain", "low-rank"])
def test_it_goes_together_with_the_other_forms(first_layer, monkeypatch):
    """Rows and lookups; rows and a low-rank first layer."""
    s = settings(rounds=3, first_layer=first_layer)
    expected = ["w", "out"] if first_layer == "plain" else ["out"]
    agree(with_table(), "2wgt", s, monkeypatch, expected)


def test_wide_layers_are_turned_for_few_rows(monkeypatch):
    def loss(params, batch):
        return jnp.logaddexp(0.0, -batch["y"] * jnp.tanh(batch["x"] @ params["w"].T).sum(-1))

    def start(key):
        return {"w": jax.random.normal(key, (60, DIM))}

    s = settings(rounds=3, first_layer="plain", client_batch=1)
    agree(problem(loss, start), "2wgt", s, monkeypatch, ["w"])


def test_clients_train_one_by_one_as_without_it(monkeypatch):
    """Only small models and tables are trained in groups."""
    monkeypatch.setattr("mixfl.engine.auto.GROUPED_MODEL", 0)
    assert clients_at_once("cpu", 10, init(jax.random.key(0)), [Turned(["w"])]) == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fedavg", {"client_opt": "adam"}),  # may treat the axes of a weight differently
        ("fedavg", {"upload": "int8"}),  # codes of single numbers
        ("fedavg", {"aggregation": "median"}),
        ("example-transfer", {}),
    ],
    ids=str,
)
def test_it_is_left_where_arrays_are_looked_at(name, change, monkeypatch):
    monkeypatch.setattr(turned, "LONG", 1)
    p, s = problem(network, init), settings(first_layer="plain", **change)
    assert not weights(Simulator(p, ALGORITHMS[name].build(p, s), s))


def test_weights_with_another_use_are_left(monkeypatch):
    monkeypatch.setattr(turned, "LONG", 1)

    def decayed(params, batch):
        return network(params, batch) + 0.1 * jnp.sum(params["w"] ** 2)

    p, s = problem(decayed, init), settings(first_layer="plain")
    assert weights(Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)) == ["out"]


@pytest.mark.parametrize(
    ("depth", "width", "rows", "transposed", "turns"),
    [
        (784, 10, 10, False, True),
        (784, 10, 10, True, False),  # as PyTorch has it: fast already
        (784, 10, 1, False, False),
        (784, 1, 10, False, False),
        (20, 4, 10, False, False),
        (784, 200, 10, False, False),
        (784, 200, 1, True, True),
        (784, 200, 10, True, False),
    ],
)
def test_it_is_chosen_where_it_pays(depth, width, rows, transposed, turns):
    assert pays(Layer(depth, width, rows, transposed, False, None, None)) == turns


def test_a_deployed_client_sends_the_model_as_it_is(monkeypatch):
    """A client that trains by itself returns its sums in the model's shapes."""
    monkeypatch.setattr(turned, "LONG", 1)
    from mixfl.forms.base import alone

    p, s = mixfl.Problem(init, [mixfl.Federated(network, people())]), settings(first_layer="plain")
    simulator = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
    (sizes,) = next(simulator.feeder.pieces(simulator.at(0), 0)).clients
    feed = jax.tree.map(lambda a: a[0], sizes[0])
    x = p.init(jax.random.key(0))
    (broadcast,) = simulator.at(0).broadcast(simulator.init().algorithm, (None,))
    sums = alone(
        simulator.at(0), simulator.forms.of["federated"], p.populations[0], broadcast, feed
    )
    assert jax.tree.map(jnp.shape, sums.weighted) == jax.tree.map(jnp.shape, x)

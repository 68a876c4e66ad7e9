"""Gradients of tables by their lookups, against automatic differentiation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixfl import ClientData, Federated, Problem, Settings
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import Batches
from mixfl.algorithms.steps import add, gradient
from mixfl.engine import Simulator
from mixfl.forms import lookups
from mixfl.forms.lookups import Additions, LookupLoss
from mixfl.optimizers import make

ROWS, WIDTH, BATCH = 7, 3, 4
RNG = np.random.default_rng(0)
X = {
    "table": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "layers": [RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32)],  # a list is no lookup
}
DATA = {
    "many": RNG.integers(0, ROWS, (BATCH, 5)).astype(np.int32),  # rows stand in it several times
    "one": RNG.integers(0, ROWS, BATCH).astype(np.int32),
}
MASK = np.array([1, 1, 0, 1], np.float32)


def mean_of_rows(x, batch):
    looked_up = jnp.tanh(x["table"][batch["many"]]).mean(1)
    return jnp.sum(looked_up @ x["layers"][0] * x["table"][batch["one"]], axis=-1)


def jitted_take(x, batch):
    rows = jax.jit(lambda t, i: jnp.take(t, i, axis=0, mode="clip"))(x["table"], batch["one"])
    return jnp.sum(rows**3, axis=-1) + jnp.sum(x["layers"][0])


def some_columns(x, batch):
    return jnp.sum(x["table"][batch["one"], 1:] ** 2, axis=-1)


def backwards(x, batch):
    return jnp.sum(x["table"][-1 - batch["one"]] ** 2, axis=-1)  # negative indices


ONLY_LOOKUPS = [mean_of_rows, jitted_take, some_columns, backwards]


def whole_table(x, batch):
    return mean_of_rows(x, batch) + jnp.sum(x["table"] ** 2)


def looked_up_by_the_model(x, batch):
    best = jnp.argmax(x["table"][batch["one"]], axis=1)
    return jnp.sum(x["table"][best] ** 2, axis=-1)


def term(loss):
    clients = ClientData.from_arrays(DATA, client=np.zeros(BATCH, int))
    return Federated(loss, clients, weight=0.7, rows={"table": ("many", "one")})


def by_lookups(t):
    return dataclasses.replace(t, loss=LookupLoss(t.loss, ["table"]))


def both(loss):
    """Loss and gradient by lookups, and by automatic differentiation."""
    t, batch = term(loss), Batches(DATA, MASK)
    return gradient(by_lookups(t), X, batch), gradient(t, X, batch)


@pytest.mark.parametrize("loss", ONLY_LOOKUPS)
def test_gradients_are_those_of_the_whole_table(loss):
    (value, g), (expected, dense) = both(loss)
    assert isinstance(g["table"], Additions)
    assert value == pytest.approx(float(expected), rel=1e-6)
    found = np.zeros_like(X["table"]) + g["table"]
    np.testing.assert_allclose(found, dense["table"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(g["layers"][0], dense["layers"][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [whole_table, looked_up_by_the_model])
def test_a_table_that_is_used_otherwise_has_a_whole_gradient(loss):
    (value, g), (expected, dense) = both(loss)
    assert not isinstance(g["table"], Additions)
    np.testing.assert_array_equal(g["table"], dense["table"])
    assert value == expected


@pytest.mark.parametrize("active", [None, 0.0, 1.0])
def test_steps_with_an_augmenting_gradient_and_padding(active):
    (_, g), (_, dense) = both(mean_of_rows)
    aug = jax.tree.map(lambda a: 0.1 * jnp.ones_like(a), X)
    opt = make("sgd", 0.3)
    for more in (lambda g: g, lambda g: add(aug, g)):
        found, _ = opt.step(X, more(g), opt.init(X), active)
        expected, _ = opt.step(X, more(dense), opt.init(X), active)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)
        if active == 0:
            jax.tree.map(np.testing.assert_array_equal, found, X)


def test_a_padded_step_changes_nothing_though_its_gradient_is_not_finite():
    (_, g), _ = both(mean_of_rows)
    bad = dataclasses.replace(g["table"], values=[jnp.nan * v for v in g["table"].values])
    opt = make("sgd", 0.3)
    found, _ = opt.step(X, {**g, "table": bad}, opt.init(X), 0.0)
    jax.tree.map(np.testing.assert_array_equal, found, X)


def test_bfloat16_stays_bfloat16():
    x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), X)
    _, g = gradient(by_lookups(term(mean_of_rows)), x, Batches(DATA, MASK))
    found, _ = make("sgd", 0.3).step(x, g, (), 1.0)
    assert found["table"].dtype == jnp.bfloat16


@pytest.mark.parametrize(("tables", "taken"), [("auto", True), ("dense", False)])
def test_row_sparse_clients_take_such_steps(tables, taken, monkeypatch):
    calls, original = [], lookups.by_rows
    monkeypatch.setattr(lookups, "by_rows", lambda *given: calls.append(1) or original(*given))
    problem = Problem(lambda key: jax.tree.map(jnp.asarray, X), [term(mean_of_rows)])
    s = Settings(rounds=1, cohort_size=1, client_batch=2, local_steps=2, client_lr=0.1, devices=1,
                 tables=tables)  # fmt: skip
    simulator = Simulator(problem, ALGORITHMS["fedavg"].build(problem, s), s)
    (result,) = simulator.rounds(simulator.init(), 0, 1)
    assert bool(calls) == taken
    assert np.isfinite(result.state.x["table"]).all()

"""grad_clip, weight_decay and proximal: beside the reference (test_against_reference), forms, own
algorithms and deployments."""

import jax
import jax.numpy as jnp
import layer_problem
import numpy as np
import optax
import pytest
import table_problem
from problems import flat, problem, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.client_opt import norm
from mixfl.algorithms.contract import Batches, Broadcast, ClientFeed
from mixfl.algorithms.steps import client_update
from mixfl.engine import Simulator
from mixfl.errors import MixflError

KEYS = dict(rounds=4, cohort_size=5, client_batch=3, local_steps=3, client_lr=0.2, devices=1)
ALL = dict(grad_clip=0.25, weight_decay=0.3, proximal=0.7)


@pytest.mark.parametrize("key", ALL)
def test_each_counts(key):
    p = problem()
    plain = flat(mixfl.train(p, "2wgt", **KEYS).params)
    other = flat(mixfl.train(p, "2wgt", **KEYS, **{key: ALL[key]}).params)
    assert np.abs(plain - other).max() > 1e-3


def test_one_step_by_hand():
    """From x_t = 1 with the gradient 3, cut to 2; an augmenting gradient of 10 is not cut."""
    term = mixfl.Federated(
        lambda x, batch: 3 * x * batch["t"],
        mixfl.ClientData.from_arrays({"t": np.ones(2)}, client=[0, 0]),
    )
    feed = ClientFeed(Batches({"t": np.ones((2, 1))}, np.ones((2, 1))))
    s = settings(client_lr=0.1, local_steps=2, grad_clip=2.0, weight_decay=0.5, proximal=4.0)
    upload = client_update(term, s, Broadcast(jnp.float32(1.0)), feed, collect=True)
    x_1 = 1 - 0.1 * 2 - 0.1 * 0.5 * 1
    x_2 = x_1 - 0.1 * (2 + 4 * (x_1 - 1)) - 0.1 * 0.5 * x_1
    np.testing.assert_allclose(upload.own, x_2 - 1, rtol=1e-5)
    assert float(upload.grads) == 4.0  # of its own loss alone, as cut
    sent = client_update(term, s, Broadcast(jnp.float32(1.0), jnp.float32(10.0)), feed)
    y_1, alone_1 = 1 - 0.1 * 12 - 0.05, 1 - 0.1 * 10 - 0.05
    y_2 = y_1 - 0.1 * (12 + 4 * (y_1 - 1)) - 0.05 * y_1
    alone_2 = alone_1 - 0.1 * (10 + 4 * (alone_1 - 1)) - 0.05 * alone_1
    np.testing.assert_allclose(sent.own, y_2 - alone_2, rtol=1e-5)  # the own part


def test_norms_of_large_and_small_gradients():
    for size in (1e-20, 1.0, 1e25):
        np.testing.assert_allclose(
            norm({"a": jnp.array([3 * size, 4 * size])}), 5 * size, rtol=1e-5
        )
    assert float(norm({"a": jnp.zeros(3)})) > 0
    assert not np.isfinite(norm({"a": jnp.array([1.0, jnp.nan])}))


def test_clipping_is_that_of_optax():
    """In FedAvg, where the client's gradient is all there is."""
    cut = lambda lr: optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(lr))  # noqa: E731
    found = mixfl.train(problem(), "fedavg", grad_clip=0.2, **KEYS).params
    expected = mixfl.train(problem(), "fedavg", client_opt=cut, **KEYS).params
    np.testing.assert_allclose(flat(found), flat(expected), rtol=1e-4, atol=1e-6)


def test_decay_is_that_of_adamw():
    found = mixfl.train(problem(), "fedavg", client_opt="adam", weight_decay=0.4, **KEYS).params
    expected = mixfl.train(problem(), "fedavg", client_opt="adamw(weight_decay=0.4)", **KEYS).params
    np.testing.assert_allclose(flat(found), flat(expected), rtol=1e-4, atol=1e-6)


# Forms


def test_rows_with_clipped_gradients_are_dense():
    given = dict(grad_clip=0.1)
    sim, state, _ = table_problem.trained("2wgt", **given)
    dense, expected, _ = table_problem.trained("2wgt", tables="dense", **given)
    assert (bool(sim.forms.tables), bool(dense.forms.tables)) == (True, False)
    table_problem.assert_equal(state.x, expected.x)
    plain = table_problem.trained("2wgt", tables="dense")[1]
    assert np.abs(plain.x["dense"] - expected.x["dense"]).max() > 1e-2


@pytest.mark.parametrize("key", ["weight_decay", "proximal"])
def test_rows_are_refused_where_other_rows_move(key):
    simulator = table_problem.simulator("2wgt", **{key: 0.1})
    assert not simulator.forms.tables
    assert any(f"{key} = 0.1 also moves rows" in note for note in simulator.notes())
    with pytest.raises(MixflError, match=f"tables = rows is not exact here: {key} = 0.1"):
        table_problem.simulator("2wgt", tables="rows", **{key: 0.1})


@pytest.mark.parametrize("key", ALL)
def test_low_rank_layers_are_refused(key):
    p = layer_problem.problem()
    s = settings(first_layer="low-rank")
    assert Simulator(p, ALGORITHMS["2wgt"].build(p, s), s).forms.low_rank
    s = settings(first_layer="low-rank", **{key: ALL[key]})
    with pytest.raises(MixflError, match=r"first_layer = low-rank, but .*(plain SGD|grad_clip)"):
        Simulator(p, ALGORITHMS["2wgt"].build(p, s), s)
    s = settings(**{key: ALL[key]})
    assert not Simulator(p, ALGORITHMS["2wgt"].build(p, s), s).forms.low_rank


@pytest.mark.system
def test_deployment_is_the_simulator():
    from deployed import assert_same, deploy, simulate

    found, _, _ = deploy("two terms", algorithm="2wgt", **ALL)
    assert_same(found.params, simulate("two terms", "2wgt", **ALL).params)


def test_padding_changes_nothing():
    tight = mixfl.train(problem(), "2wgt", **{**KEYS, "local_steps": 4}, **ALL).params
    padded = mixfl.train(problem(), "2wgt", **{**KEYS, "local_steps": 4}, **ALL, cohort_chunk=2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tight, padded.params
    )

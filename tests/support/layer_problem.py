"""A network whose first layer has a low-rank form, trained with and without it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from problems import DIM, examples

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator

WIDTH = 4


def network(params, batch):
    """A hidden layer on the raw inputs; per-example logistic loss, y in {-1, 1}."""
    hidden = jnp.tanh(batch["x"] @ params["hidden"]["w"] + params["hidden"]["b"])
    return jnp.logaddexp(0.0, -batch["y"] * (hidden @ params["out"]))


def init(key):
    first, second = jax.random.split(key)
    return {
        "hidden": {
            "b": jnp.zeros(WIDTH), "w": 0.5 * jax.random.normal(first, (DIM, WIDTH))
        },
        "out": jax.random.normal(second, (WIDTH,)),
    }  # fmt: skip


def people(seed=1, sizes=(1, 3, 4, 5, 8, 9, 12, 2)):
    data = examples(seed, sum(sizes), 0.3)
    return mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(len(sizes)), sizes))


def problem(loss=network, start=init, **more):
    return mixfl.Problem(
        start,
        [
            mixfl.Federated(loss, people(), 0.7, **more),
            mixfl.Central(loss, examples(2, 40, -0.5), 0.4),
        ],
    )


def trained(p, name, s):
    simulator = Simulator(p, ALGORITHMS[name].build(p, s), s)
    *_, last = simulator.rounds(simulator.init(), 0, s.rounds)
    return simulator, last


def agree(p, name, s, tolerance=1e-5):
    """Low-rank and plain; returns the first's simulator and last result."""
    low, result = trained(p, name, dataclasses.replace(s, first_layer="low-rank"))
    plain, expected = trained(p, name, dataclasses.replace(s, first_layer="plain"))
    assert low.forms.low_rank
    assert not plain.forms.low_rank
    for a, b in zip(*map(jax.tree.leaves, (result.state, expected.state)), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())
    for key in expected.info:
        np.testing.assert_allclose(result.info[key], expected.info[key], rtol=1e-4)
    return low, result

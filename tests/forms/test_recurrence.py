"""Recurrent layers: the gradients of their weights, computed after the loop, are JAX's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.forms.products import InProducts, found_in
from mixfl.settings import Settings


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def lstm(p, x):
    """x [batch, time, inputs] -> [batch]"""

    def step(state, x):
        h, c = state
        i, f, o = jnp.split(x @ p["w"] + h @ p["u"] + p["b"], 3, -1)
        c = jax.nn.sigmoid(f) * c + jnp.tanh(i)
        h = jax.nn.sigmoid(o) * jax.nn.relu(c)
        return (h, c), h

    zeros = jnp.zeros((len(x), 4))
    (h, _), all_h = lax.scan(step, (zeros, zeros), jnp.swapaxes(x, 0, 1))
    return jnp.sum(h + all_h.mean(0), -1)


def left_and_twice(p, x):
    """A weight on the left, and one that is used in two products."""

    def step(h, x):
        h = jnp.tanh(p["v"] @ h + p["v"] @ (h * h) + x * p["w"][0, :4, None])
        return h, None

    return jnp.sum(lax.scan(step, jnp.ones((4, 3)), x[0, :, 0], reverse=True)[0], 0)


def nested(p, x):
    def outer(h, x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ p["v"] + x), None), h, length=5)[0], None

    return jnp.sum(lax.scan(outer, jnp.ones((3, 4)), x[0, :, :1])[0], -1)


def numbered(p, x):
    """With whole numbers in the loop, and a result for each step that is no float."""

    def step(h, i):
        h = jnp.tanh(h @ p["v"]) * (1 + i)
        return h, (h.argmax(-1), i)

    h, (most, _) = lax.scan(step, x[:, 0, :1] * jnp.ones(4), jnp.arange(6))
    return jnp.sum(h, -1) + most.sum()


PARAMS = {"w": normal(0, (2, 12)), "u": normal(1, (4, 12)) / 2, "b": normal(2, (12,)),
          "v": normal(3, (4, 4)) / 2}  # fmt: skip


@pytest.mark.parametrize("loss", [lstm, left_and_twice, nested, numbered])
def test_values_and_gradients_are_jaxs(loss):
    x = normal(4, (3, 6, 2))
    assert found_in(loss, PARAMS, x).others
    d = normal(5, loss(PARAMS, x).shape)

    def both(f):
        return jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(f(p, x) * d), (0, 1)))(PARAMS, x)

    for a, b in zip(*map(jax.tree.leaves, (both(InProducts(loss)), both(loss))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_way_back_adds_up_no_weight():
    """No step of a loop returns something of the size of a weight."""
    x = normal(4, (3, 6, 2))

    def carried(f):
        text = str(jax.make_jaxpr(jax.grad(lambda p: f(p, x).sum()))(PARAMS))
        return text.count("f32[4,12] = add_any") + text.count("f32[2,12] = add_any")

    assert carried(lstm) > 0
    assert carried(InProducts(lstm)) == 0


def test_what_is_left_alone():
    x = normal(4, (3, 6, 2))
    fixed = lambda p, x: lstm(p, x[:, :3])  # noqa: E731 (too few steps)
    many = lambda p, x: lstm(p, jnp.tile(x, (30, 1, 1)))  # noqa: E731 (many rows)
    other = lambda p, x: lax.scan(lambda h, x: (jnp.tanh(h * p["b"]), None), x, x)[0]  # noqa: E731
    for loss in (fixed, many):
        assert not any(found_in(loss, PARAMS, x)[:2])
    assert not any(found_in(other, PARAMS, normal(5, (12, 12)))[:2])


BASE = Settings(rounds=2, cohort_size=4, client_batch=2, local_steps=3, client_lr=0.1, devices=1)


@pytest.mark.parametrize("algorithm", ["2wgt", pytest.param("fedavg", marks=pytest.mark.numbers)])
def test_rounds_are_the_same(algorithm):
    def model(s):
        data = {"x": normal(0, (32, 6, 2)), "y": normal(1, (32,))}
        clients = mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(8), 4))
        loss = lambda p, batch: jnp.square(lstm(p, batch["x"]) - batch["y"])  # noqa: E731
        p = mixfl.Problem(
            lambda key: {k: jnp.asarray(a) for k, a in PARAMS.items() if k != "v"},
            [mixfl.Federated(loss, clients, 0.6), mixfl.Central(loss, data, 0.4)],
        )
        simulator = Simulator(p, ALGORITHMS[algorithm].build(p, s), s)
        *_, last = simulator.rounds(simulator.init(), 0, s.rounds)
        return simulator.resolved().convolutions, last.state.x

    (fast, x), (plain, y) = model(BASE), model(dataclasses.replace(BASE, convolutions="plain"))
    assert (fast, plain) == ("products", "plain")
    for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

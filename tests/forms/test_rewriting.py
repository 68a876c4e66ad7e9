"""What rewriting replaces in a round has the same results, and is really replaced."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.forms import loop_weights, over_rows, two_sums
from mixfl.forms.jaxpr import jaxprs_in_params
from mixfl.forms.rewriting import rewritten, with_fast_products
from mixfl.settings import Settings


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def every_eqn(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from every_eqn(inner)


def operations(function, *args):
    return list(every_eqn(jax.make_jaxpr(function)(*args).jaxpr))


def assert_replaced(rule, function, *args, atol=1e-4):
    """The rule applies to something in the function, to nothing afterwards, and changes nothing."""
    fast = with_fast_products(function)
    assert any(rule(eqn) is not None for eqn in operations(function, *args))
    assert len(operations(fast, *args)) > len(operations(function, *args))
    results = zip(*(jax.tree.leaves(jax.jit(f)(*args)) for f in (fast, function)), strict=True)
    for a, b in results:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol)


def gradients(loss):
    return lambda *args: jax.grad(lambda *args: jnp.sum(loss(*args)), (0, 1))(*args)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [((3, 5), 4, 7), ((3, 5), 7, 4), ((20, 16), 4, 7), ((20, 16), 7, 4), ((300,), 7, 4)],
)
def test_gradients_of_weights(rows, inputs, outputs, turned):
    def layer(w, x):
        return jnp.tanh(x @ (w.T if turned else w))

    w, x = normal(0, (inputs, outputs)), normal(1, (*rows, inputs))
    assert_replaced(over_rows.replacement, gradients(layer), w.T if turned else w, x)


def test_gradients_of_a_tensor_of_weights():
    def heads(w, x):
        return jnp.sin(jnp.einsum("btk,khd->bthd", x, w))

    assert_replaced(
        over_rows.replacement, gradients(heads), normal(0, (6, 2, 3)), normal(1, (4, 5, 6))
    )


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a[:10].T @ b[:10],  # few rows in one axis: it is fast as it is
        lambda a, b: a[:, 0] @ b,  # a vector
        lambda a, b: jnp.einsum("rk,rn->rkn", a, b),
        lambda a, b: a @ b[:, :4].T,
        lambda a, b: a.astype(int).T @ b.astype(int),
    ],
)
def test_other_products_stay(product):
    closed = jax.make_jaxpr(product)(normal(0, (300, 4)), normal(1, (300, 5)))
    assert rewritten(closed.jaxpr) is closed.jaxpr


def recurrent(u, x):
    def step(h, x):
        return jnp.tanh(h @ u + x), None

    return lax.scan(step, jnp.zeros(x.shape[1:]), x)[0]


def test_a_weight_is_transposed_before_the_loop():
    u, x = normal(0, (4, 4)), normal(1, (6, 3, 4))
    assert_replaced(loop_weights.replacement, gradients(recurrent), u, x)
    fast = with_fast_products(gradients(recurrent))
    loops = [e for e in operations(fast, u, x) if e.primitive.name == "scan"]
    assert len(loops) == 2
    assert all(loop_weights.replacement(loop) is None for loop in loops)


def test_short_loops_and_many_rows_stay():
    for shape in ((3, 3, 4), (6, 65, 4)):
        loops = operations(gradients(recurrent), normal(0, (4, 4)), normal(1, shape))
        assert all(loop_weights.replacement(eqn) is None for eqn in loops)


def test_sums_of_a_group():
    x = normal(0, (2, 5, 6, 4, 3))
    assert_replaced(two_sums.replacement, lambda x: x.sum((1, 2, 4)), x)
    assert_replaced(two_sums.replacement, lambda x: x.sum((0, 2, 4)), x)


@pytest.mark.parametrize("axes", [(0, 1), (3, 4), (2, 3, 4), (0, 1, 2, 3, 4), (4,), ()])
def test_other_sums_stay(axes):
    closed = jax.make_jaxpr(lambda x: lax.reduce_sum(x, axes))(normal(0, (2, 5, 6, 4, 3)))
    assert rewritten(closed.jaxpr) is closed.jaxpr


def test_long_inner_sums_stay():
    closed = jax.make_jaxpr(lambda x: x.sum((0, 2)))(normal(0, (3, 4, 65)))
    assert rewritten(closed.jaxpr) is closed.jaxpr


BASE = Settings(rounds=2, cohort_size=4, client_batch=4, local_steps=3, client_lr=0.1)


def loss(p, batch):
    """Rows with two axes, a loop, and sums of groups."""
    x = batch["x"] @ p["w"]  # [batch, time, 6]
    groups = x.reshape(*x.shape[:2], 3, 2)
    mean = groups.mean((1, 3), keepdims=True)
    x = (groups - mean).reshape(x.shape)
    h = recurrent(p["u"], jnp.swapaxes(x, 0, 1))
    return jnp.square(h.sum(-1) - batch["y"])


def init(key):
    return {"w": jnp.asarray(normal(0, (5, 6))), "u": jnp.asarray(0.3 * normal(1, (6, 6)))}


# On the host, one device has all clients.
@pytest.mark.parametrize(("devices", "loops"), [(1, "compiled"), (2, "compiled"), (1, "host")])
def test_rounds_are_the_same(devices, loops):
    s = dataclasses.replace(BASE, devices=devices, loops=loops)

    def model(s):
        data = {"x": normal(0, (32, 70, 5)), "y": normal(1, (32,))}
        clients = mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(8), 4))
        p = mixfl.Problem(
            init, [mixfl.Federated(loss, clients, 0.6), mixfl.Central(loss, data, 0.4)]
        )
        simulator = Simulator(p, ALGORITHMS["2wgt"].build(p, s), s)
        *_, last = simulator.rounds(simulator.init(), 0, s.rounds)
        return last.state.x

    x, y = model(s), model(dataclasses.replace(s, convolutions="plain"))
    start = init(None)
    for name, first in start.items():
        assert np.abs(y[name] - first).max() > 1e-3
        np.testing.assert_allclose(x[name], y[name], rtol=1e-4, atol=1e-5)


def test_precisions_follow_their_sides():
    high, highest = lax.Precision.HIGH, lax.Precision.HIGHEST

    def product(a, b):
        return lax.dot_general(a, b, (((0,), (0,)), ((), ())), (high, highest))

    a, b = normal(0, (300, 7)), normal(1, (300, 4))  # the smaller side comes first
    assert_replaced(over_rows.replacement, product, a, b)
    (eqn,) = (e for e in operations(with_fast_products(product), a, b)
              if e.primitive.name == "dot_general")  # fmt: skip
    assert [v.aval.shape[1] for v in eqn.invars] == [4, 7]
    assert eqn.params["precision"] == (highest, high)


def test_loops_with_effects_stay_as_they_are():
    seen = []

    def loop(w, x):
        def step(c, _):
            jax.debug.callback(lambda c: seen.append(float(c[0, 0])), c, ordered=True)
            return c @ w.T, None

        return lax.scan(step, x, length=5)[0]

    def with_a_ref(w, x):
        total = jax.new_ref(x)

        def step(c, _):
            total[...] = total[...] + c @ w.T
            return c, None

        lax.scan(step, x, length=5)
        return total[...]

    w, x = normal(0, (3, 3)), normal(1, (2, 3))
    for function in (loop, with_a_ref):
        fast = with_fast_products(function)
        assert not any(loop_weights.replacement(e) for e in operations(function, w, x))
        np.testing.assert_allclose(jax.jit(fast)(w, x), jax.jit(function)(w, x), rtol=1e-5)
    jax.effects_barrier()
    assert seen[:5] == seen[5:]
    assert len(seen) == 10

"""Losses with loops of unknown length or branches: trials end, clients train one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.loops import scan as own_loop
from mixfl.engine import Simulator, loops
from mixfl.engine.auto import clients_at_once
from mixfl.engine.bounded import MOST, bounded
from mixfl.settings import Settings


def until(limit, x):
    """Counts up to a limit: never, if it is not a number or infinite."""
    return jax.lax.while_loop(lambda c: ~(c[1] >= limit), lambda c: (c[0] + x, c[1] + 1), (x, 0.0))


@pytest.mark.parametrize("limit", [3.0, np.nan])
@pytest.mark.parametrize("several", [False, True])
def test_an_inner_loop_has_a_limit(limit, several):
    def step(carry, x):
        limits = jnp.array([2.0, 4.0]) + (limit - 3.0)
        found = jax.vmap(until, (0, None))(limits, x) if several else until(limit, x)
        return carry + jnp.sum(found[0]), found[1]

    def function(xs):
        return own_loop(step, jnp.zeros(()), xs)

    xs = jnp.arange(3.0)
    closed = jax.make_jaxpr(function)(xs)
    eqns = [bounded(eqn) if loops.is_loop(eqn) else eqn for eqn in closed.jaxpr.eqns]
    assert any(map(loops.is_loop, eqns))
    limited = ClosedJaxpr(closed.jaxpr.replace(eqns=eqns), closed.consts)
    _, counts = jaxpr_as_fun(limited)(xs)
    expected = MOST if np.isnan(limit) else np.array([2.0, 4.0]) if several else limit
    np.testing.assert_array_equal(counts, np.broadcast_to(expected, counts.shape))


def fixed_point(w, x):
    """The root of z = tanh(z w + x), with the derivative of its last step."""

    def far(c):
        return jnp.max(jnp.abs(c[0] - c[1])) > 1e-6

    def near(c):
        return jnp.tanh(c[0] * w + x), c[0]

    root, _ = jax.lax.while_loop(far, near, (jnp.tanh(x), x + 1.0))
    return jnp.tanh(jax.lax.stop_gradient(root) * w + x)


def branches(w, x):
    return jax.lax.cond(w > 0, jnp.tanh, jnp.sin, x)


def problem(inner) -> mixfl.Problem:
    def loss(params, batch):
        z = inner(jax.lax.stop_gradient(params["w"]), batch["x"])
        return (z * params["w"] - batch["y"]) ** 2

    rng = np.random.default_rng(0)
    data = {name: rng.normal(size=40).astype(np.float32) for name in ("x", "y")}
    clients = mixfl.ClientData.from_arrays(data, client=np.arange(40) // 5)
    return mixfl.Problem(lambda key: {"w": jnp.full((), 0.5)}, [mixfl.Federated(loss, clients)])


@pytest.mark.parametrize(
    ("inner", "at_once"), [(fixed_point, 1), (branches, 1), (lambda w, x: jnp.tanh(w * x), 4)]
)
def test_clients_with_such_loops_or_branches_train_one_by_one(inner, at_once):
    s, p = Settings(cohort_size=4, client_batch=2, local_steps=2, devices=1), problem(inner)
    simulator = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
    forms = simulator.forms.of["federated"]
    assert clients_at_once("cpu", 4, simulator.shapes().x, forms) == at_once

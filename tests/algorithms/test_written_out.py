"""Few steps are written out in the program, unless a step has many operations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixfl.algorithms.steps import FEW_OPERATIONS, UNROLL, descend
from mixfl.optimizers import make

STEPS = 3
assert STEPS <= UNROLL


@pytest.mark.parametrize(("operations", "loop"), [(5, False), (FEW_OPERATIONS, True)])
def test_steps_of_many_operations_are_a_loop_traced_once(operations, loop):
    traced = []
    opt = make("sgd", 0.1)

    def grad(x, batch):
        traced.append(1)
        g = x - batch
        for _ in range(operations // 2):
            g = jnp.sin(g) + x
        return jnp.sum(g), g

    def train(x, batches):
        return descend(grad, opt, x, batches, opt.init(x))[0]

    x, batches = jnp.arange(4.0), jnp.ones((STEPS, 4))
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(train)(x, batches).eqns]
    assert ("scan" in names) == loop
    assert len(traced) == 1
    expected = x
    for batch in batches:
        expected = expected - 0.1 * grad(expected, batch)[1]
    np.testing.assert_allclose(train(x, batches), expected, rtol=1e-5)

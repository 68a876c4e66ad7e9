"""Losses with effects, or with values that their inputs don't determine, are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import clients, init, logistic, problem

import mixfl
from mixfl.engine.purity import ImpureLoss, check_pure
from mixfl.errors import MixflError

rng = np.random.default_rng(0)
calls = []


def noisy_constant(params, batch):
    return logistic(params, batch) * rng.uniform(0.9999, 1.0001)


def noisy_array(params, batch):
    return logistic(params, batch) + jnp.asarray(rng.normal(size=3))[: len(batch["y"])].sum()


def in_a_loop(params, batch):
    def body(i, total):
        return total + rng.normal()

    return logistic(params, batch) + jax.lax.fori_loop(0, 2, body, 0.0)


def counting(params, batch):
    calls.append(1)
    return logistic(params, batch) ** len(calls)


def called(params, batch):
    losses = logistic(params, batch)
    noise = jax.pure_callback(lambda: np.float32(rng.normal()), jax.ShapeDtypeStruct((), "float32"))
    return losses + noise


@pytest.mark.parametrize("loss", [noisy_constant, noisy_array, in_a_loop, counting, called])
def test_an_impure_loss_is_refused_before_a_run(loss):
    broken = mixfl.Problem(init, [mixfl.Federated(loss, clients(1))])
    with pytest.raises(ImpureLoss, match="the loss of term 'federated' is not pure"):
        mixfl.train(broken, "fedavg", rounds=1, cohort_size=2)


def test_an_impure_regularizer_is_refused():
    broken = mixfl.Central(lambda params: params["b"] ** 2 * rng.normal(), name="noise")
    with pytest.raises(MixflError, match="'noise' is not pure"):
        mixfl.train(
            mixfl.Problem(init, [*problem("two terms").terms, broken]),
            "pt",
            rounds=1,
            cohort_size=2,
        )


def fine(params, batch):
    """Random numbers from a fixed key, a loop, a jitted function, a message, a rule of its own."""
    noise = jax.random.normal(jax.random.key(3), batch["y"].shape)
    jax.debug.callback(lambda _: None, noise)
    total = jax.lax.scan(lambda c, x: (c + x, None), 0.0, noise)[0]
    return jax.jit(jax.nn.relu)(jax.checkpoint(logistic)(params, batch)) + 0 * total


def test_a_pure_loss_is_accepted():
    batch = clients(1).examples.take(np.arange(3))
    x = init(jax.random.key(0))
    assert check_pure("it", fine, (x, batch), lambda: (x, batch)) is None  # it did not raise

"""Losses whose examples depend on each other are refused: padding would enter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import clients, init, logistic

import mixfl
from mixfl.errors import MixflError


def score(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def in_batch_negatives(params, batch):
    similar = score(params, batch)[:, None] * batch["x"][None, :, 0]
    return -jnp.diag(jax.nn.log_softmax(similar))


def batch_norm(params, batch):
    z = score(params, batch)
    return jnp.square((z - z.mean()) / (z.std() + 1e-3) - batch["y"])


def mean_of_the_batch(params, batch):
    return jnp.full(len(batch["y"]), logistic(params, batch).mean())


def next_one(params, batch):
    return jnp.square(score(params, batch) - jnp.roll(score(params, batch), -1))


def one_before(params, batch):
    z = score(params, batch)
    return jnp.square(z - jnp.concatenate([z[:1], z[:-1]]))


DEPENDENT = [in_batch_negatives, batch_norm, mean_of_the_batch, next_one, one_before]


@pytest.mark.parametrize("loss", DEPENDENT)
def test_a_loss_that_compares_examples_is_refused_before_a_run(loss):
    broken = mixfl.Problem(init, [mixfl.Federated(loss, clients(1))])
    with pytest.raises(MixflError, match="'federated' of an example depends on the other examples"):
        mixfl.train(broken, "fedavg", rounds=1, cohort_size=2)


def test_so_is_one_at_the_server():
    data = clients(1).examples.take(np.arange(20))
    broken = [mixfl.Federated(logistic, clients(1)), mixfl.Central(batch_norm, data)]
    with pytest.raises(MixflError, match="'central' of an example depends"):
        mixfl.train(mixfl.Problem(init, broken), "pt", rounds=1, cohort_size=2)


def stable(params, batch):
    """A shift by the batch's largest score changes the rounding only."""
    z = score(params, batch)
    shift = jax.lax.stop_gradient(jnp.max(jnp.maximum(z, 0)))
    softplus = shift + jnp.log(jnp.exp(-shift) + jnp.exp(z - shift))
    return softplus - batch["y"] * z


def with_a_key(params, batch, key):
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5))(key)
    return jnp.where(keep, logistic(params, batch), 0.0)


@pytest.mark.parametrize("loss", [logistic, stable, with_a_key])
def test_others_run(loss):
    problem = mixfl.Problem(init, [mixfl.Federated(loss, clients(1))])
    result = mixfl.train(problem, "fedavg", rounds=1, cohort_size=2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))


def test_one_example_in_all_has_no_others():
    first = clients(1).examples.take(np.arange(1))
    one = mixfl.ClientData.from_arrays(first, client=np.zeros(1, int))
    problem = mixfl.Problem(init, [mixfl.Federated(logistic, one)])
    assert mixfl.train(problem, "fedavg", rounds=1, cohort_size=1).rejected == 0

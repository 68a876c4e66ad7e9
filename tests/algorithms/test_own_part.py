"""What a client uploads is its own part: the server puts back what its own gradient did."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from problems import OPTIMIZERS, flat, settings

import mixfl
from mixfl.aggregation.wire import restored, sent
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import Batches, Broadcast, ClientFeed, Drawn
from mixfl.algorithms.steps import add, client_update, mean_delta, own_part, weighted_summand
from mixfl.optimizers import make

RATES = {"sgd": 0.2, "momentum": 0.2, "adam": 0.02}
X = {"b": jnp.float32(0.3), "w": jnp.array([1.0, -2.0, 0.5])}
AUG = {"b": jnp.float32(-1.5), "w": jnp.array([3.0, 0.25, -4.0])}


def clients(count=4, steps=4, batch=2):
    """Feeds of clients that take 1 to `steps` steps."""
    rng = np.random.default_rng(0)
    data = problems.examples(3, count * steps * batch, 0.3)
    data = {k: v.reshape(count, steps, batch, *v.shape[1:]) for k, v in data.items()}
    for i in range(count):
        mask = np.zeros((steps, batch), np.float32)
        mask[: i + 1] = 1
        mask[i, 1:] = rng.integers(0, 2)  # the last batch may be short
        yield ClientFeed(Batches({k: v[i] for k, v in data.items()}, mask))


@pytest.mark.parametrize("client_opt", RATES)
@pytest.mark.parametrize("aug", [None, AUG], ids=["fedavg", "augmented"])
def test_the_mean_change_is_that_of_the_whole_changes(client_opt, aug):
    """Against sum p_i Delta_i / sum p_i, with unequal K_i."""
    s = settings(client_opt=OPTIMIZERS[client_opt], client_lr=RATES[client_opt], local_steps=4)
    term, broadcast = problems.problem().populations[0], Broadcast(X, aug)
    sums, whole, weight = None, 0.0, 0.0
    for feed in clients():
        upload = client_update(term, s, broadcast, feed)
        x, opt = X, make(s.client_opt, s.client_lr)
        state = opt.init(x)
        for k in range(int(upload.steps)):
            keep = np.flatnonzero(feed.batches.mask[k])
            batch = {n: v[k][keep] for n, v in feed.batches.data.items()}
            g = jax.grad(lambda x, b=batch: term.weight * jnp.mean(term.loss(x, b)))(x)
            x, state = opt.step(x, g if aug is None else add(g, aug), state)
        whole = whole + float(upload.weight) * (flat(x) - flat(X))
        weight += float(upload.weight)
        summand = weighted_summand(s, upload)
        sums = summand if sums is None else add(sums, summand)
    np.testing.assert_allclose(
        flat(mean_delta(s, broadcast, sums)), whole / weight, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("client_opt", RATES)
def test_a_client_without_a_gradient_has_no_own_part(client_opt):
    s = settings(client_opt=OPTIMIZERS[client_opt], client_lr=RATES[client_opt], local_steps=4)
    flat_loss = lambda x, batch: 0 * batch["y"] * x["b"]  # noqa: E731
    term = dataclasses.replace(problems.problem().populations[0], loss=flat_loss)
    for feed in clients():
        upload = client_update(term, s, Broadcast(X, AUG), feed)
        np.testing.assert_allclose(flat(upload.own), 0, atol=1e-5)


def test_two_way_subtracts_the_gradient_that_was_sent():
    """Clients got another gradient than the server has kept, as if it had been compressed: their
    own gradient is recovered all the same."""
    p, s = problems.problem(), settings(local_steps=3, client_batch=2, weighting="uniform")
    algorithm = ALGORITHMS["2wgt"].build(p, s)
    state = algorithm.init(X)._replace(gt=(jax.tree.map(jnp.zeros_like, X), AUG))
    drawn = [None, Drawn(p.central[0].examples.take(np.zeros((3, 1, 4), int)), np.ones((3, 1, 4)))]
    (broadcast,) = algorithm.broadcast(state, drawn)
    central = algorithm.central(state, drawn)

    def recovered(changed):
        sent = broadcast._replace(aug=jax.tree.map(lambda a: a * changed, broadcast.aug))
        flat_loss = lambda x, batch: 2.0 * x["b"] + batch["y"] * 0  # noqa: E731
        term = dataclasses.replace(p.populations[0], loss=flat_loss)
        summands = [algorithm.summand(algorithm.client(term, sent, feed)) for feed in clients()]
        return algorithm.update(state, [sent], [add(*summands)], central)[0].gt[0]

    for changed in (1.0, 0.9):
        gt = recovered(changed)
        assert float(gt["b"]) == pytest.approx(2 * p.populations[0].weight, rel=1e-4)
        np.testing.assert_allclose(gt["w"], 0, atol=1e-5)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("algorithm", ["fedavg", "2wgt"])
def test_what_is_sent_of_a_summand_restores_it(algorithm, weighting):
    p, s = problems.problem(), settings(local_steps=4, weighting=weighting)
    built = ALGORITHMS[algorithm].build(p, s)
    for feed in clients():
        summand = built.summand(built.client(p.populations[0], Broadcast(X, AUG), feed))
        wire = sent(summand, X)
        assert len(jax.tree.leaves(wire)) == len(X) + 3  # the model once, and three numbers
        again = restored(wire, jax.eval_shape(lambda summand=summand: summand))
        assert jax.tree.structure(again) == jax.tree.structure(summand)
        exact = again._replace(unweighted=None), summand._replace(unweighted=None)
        jax.tree.map(np.testing.assert_array_equal, *exact)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            again.unweighted, summand.unweighted,
        )  # fmt: skip


def test_an_own_part_keeps_its_dtype():
    x = {"w": jnp.zeros(3, jnp.bfloat16)}
    own = own_part(mixfl.Settings(client_lr=0.1), Broadcast(x, x), x, jnp.float32(2.0))
    assert own["w"].dtype == jnp.bfloat16

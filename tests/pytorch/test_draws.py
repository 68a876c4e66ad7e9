"""Losses in PyTorch that draw: compiled by torchax, called, and at a deployed client."""

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mixfl
from mixfl import pytorch
from mixfl.algorithms.contract import Batches, Broadcast, ClientFeed
from mixfl.deploy.pytorch import client_update
from mixfl.pytorch.trial import STILL_DRAWS
from mixfl.randomness import KEYS, any_keys

N = 400


def dropped():
    """One weight of 1, and dropout of its product."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return nn.Sequential(layer, nn.Dropout(0.25))


def products(module, batch, key):
    return module(batch["x"])[:, 0]


def federated(function=products, make=dropped):
    data = mixfl.ClientData.from_arrays({"x": np.ones((N, 1))}, client=np.arange(N) % 4)
    return mixfl.Federated(pytorch.Model(make).loss(function), data)


def some(n=N, start=0):
    return {"x": np.ones((n, 1), np.float32), KEYS: any_keys(N)[start : start + n]}


@pytest.mark.parametrize("way", ["compiled", "called"])
def test_dropout_draws_for_each_example_from_its_key(way):
    loss = federated().loss
    loss = loss if way == "compiled" else loss.in_pytorch()
    params = {"0.weight": np.ones((1, 1), np.float32)}
    values, back = jax.vjp(lambda p: loss(p, some()), params)
    (verdict,) = loss.verdicts.values()
    assert (verdict.compiled is not None) == (way == "compiled")
    values = np.asarray(values)
    kept = values > 0
    np.testing.assert_allclose(values[kept], 4 / 3, rtol=1e-6)  # scaled, so that the mean stays
    assert abs(kept.mean() - 0.75) < 4 * np.sqrt(0.75 * 0.25 / N)
    # The gradient has the same mask: the product is linear.
    for weights in (np.ones(N, np.float32), kept.astype(np.float32)):
        (slopes,) = back(weights)
        np.testing.assert_allclose(slopes["0.weight"][0, 0], values @ weights, rtol=1e-5)
    # Neither other examples nor their number matter.
    np.testing.assert_array_equal(loss(params, some(7, 20)), values[20:27])


def test_without_a_key_it_is_refused_with_advice():
    term = federated(lambda module, batch: products(module, batch, None))
    with pytest.raises(mixfl.MixflError, match=r"takes? a key, function\(module, batch, key\)"):
        term.loss({"0.weight": np.ones((1, 1), np.float32)}, {"x": np.ones((3, 1), np.float32)})


def test_a_regularizer_takes_no_key():
    with pytest.raises(mixfl.MixflError, match="a loss without data takes no key"):
        pytorch.Model(dropped).loss(lambda module, key: 0)


def test_what_the_key_does_not_determine_is_refused():
    rng = np.random.default_rng(0)
    term = federated(lambda module, batch, key: products(module, batch, key) * rng.normal())
    with pytest.raises(mixfl.MixflError, match="that its key does not determine"):
        term.loss({"0.weight": np.ones((1, 1), np.float32)}, some(3))


def test_what_draws_in_evaluation_mode_is_called():
    def noisy(module, batch, key):
        return F.dropout(products(module, batch, key), 0.25, training=True)

    loss = federated(noisy).loss
    values = np.asarray(loss({"0.weight": np.ones((1, 1), np.float32)}, some(50)))
    (verdict,) = loss.verdicts.values()
    assert verdict.compiled is None
    assert verdict.note == STILL_DRAWS
    assert {0.0} < set(values.tolist())


def test_a_deployed_client_draws_from_its_keys():
    term = federated()
    s = mixfl.Settings(local_steps=2, client_batch=20)
    broadcast = Broadcast({"0.weight": np.ones((1, 1), np.float32)})

    def trained(start):
        words = any_keys(N)[start : start + 40].reshape(2, 20, 2)
        data = {"x": np.ones((2, 20, 1), np.float32), KEYS: words}
        feed = ClientFeed(Batches(data, np.ones((2, 20), np.float32)))
        state = torch.random.get_rng_state()
        upload = client_update(term, s, broadcast, feed, False)
        assert torch.equal(torch.random.get_rng_state(), state)  # nobody else's draws change
        return float(upload.own["0.weight"][0, 0])

    assert trained(0) == trained(0)
    assert len({trained(start) for start in (0, 40, 80, 120)}) > 1
    assert -0.1 * 2 * 4 / 3 < trained(0) < 0

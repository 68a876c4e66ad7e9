"""Models, losses and clients in PyTorch: what JAX computes with the same ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from deployed import ADAM, SETTINGS, Notes, assert_same, at_nodes
from flower_grid import InProcess
from torch import nn

import mixfl
import mixfl.flower
from mixfl import pytorch
from mixfl.deploy.flower import server
from mixfl.deploy.flower.client import Client
from mixfl.runs.training import run

ITEMS, DIM = 12, 3
ROWS = {"items.weight": "item"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, DIM)
        self.out = nn.Linear(DIM, 1)

    def forward(self, item, x):
        return self.out(torch.tanh(self.items(item) * x))[:, 0]


model = pytorch.Model(Net)


def torch_loss(net, batch):
    return nn.functional.softplus(-batch["y"] * net(batch["item"], batch["x"]))


def torch_penalty(net):
    return sum((p**2).sum() for p in net.parameters()) / 10


def loss(params, batch):
    hidden = jnp.tanh(params["items.weight"][batch["item"]] * batch["x"])
    score = (hidden @ params["out.weight"].T + params["out.bias"])[:, 0]
    return jnp.logaddexp(0.0, -batch["y"] * score)


def penalty(params):
    return sum(jnp.sum(p**2) for p in jax.tree.leaves(params)) / 10


def data(seed, n):
    rng = np.random.default_rng(seed)
    return {
        "item": rng.integers(0, ITEMS, n), "x": rng.normal(size=(n, DIM)).astype(np.float32),
        "y": rng.choice([-1.0, 1.0], n).astype(np.float32),
    }  # fmt: skip


@functools.cache
def problem(kind: str) -> tuple[mixfl.Problem, list[dict]]:
    """With all losses in JAX, or in PyTorch."""
    losses = {"jax": (loss, penalty), "torch": (model.loss(torch_loss), model.loss(torch_penalty))}
    own, regularizer = losses[kind]
    sizes = (2, 7, 5)
    clients = mixfl.ClientData.from_arrays(data(1, sum(sizes)), np.repeat(range(3), sizes))
    terms = [
        mixfl.Federated(own, clients, 0.6, rows=ROWS),
        mixfl.Central(own, data(2, 20), 0.3),
        mixfl.Central(regularizer, weight=0.1, name="penalty"),
    ]
    return at_nodes(mixfl.Problem(model.init, terms))


def deploy(kind, **given):
    there, nodes = problem(kind)
    config = SETTINGS | {"cohorts": "seed"} | given
    grid = InProcess(mixfl.flower.client_app(there), nodes, config)
    return run(server.deployed(there, grid, config, Notes(), grid.clock), None, True, Notes())


@pytest.mark.system
@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("fedavg", ADAM),
        ("pt", {}),
        ("1wgt", {}),
        ("2wgt", {}),
        pytest.param("2wgt", dict(client_opt="sgd(momentum=0.5)"), marks=pytest.mark.slow),
        ("1wgt", dict(client_opt="adam(eps=1e-3)", client_lr=0.05)),
    ],
)
def test_a_pytorch_deployment_is_the_jax_one(algorithm, changes):
    """Clients and central losses, rows of tables, five rounds."""
    found = deploy("torch", algorithm=algorithm, **changes)
    expected = deploy("jax", algorithm=algorithm, **changes)
    assert_same(found.params, expected.params, 1e-4)
    before = model.init(jax.random.key(0))
    assert max(np.abs(found.params[n] - before[n]).max() for n in before) > 1e-2


def test_the_steps_are_pytorchs_own(monkeypatch):
    """Its optimizer takes them; with one that only optax has, the gradients are PyTorch's."""
    taken = []
    real = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda opt, *args: (taken.append(1), real(opt, *args))[1]
    )
    there, nodes = problem("torch")
    jax_there, _ = problem("jax")
    for opt, expected in (("sgd", 3), ("yogi", 0)):
        taken.clear()
        config = SETTINGS | dict(algorithm="fedavg", client_opt=opt)
        client, other = (Client(p, config, nodes[1]) for p in (there, jax_there))
        x = messages_of(client)
        sent, wanted = (c.program(x, c.feed(0), (), {}) for c in (client, other))
        assert len(taken) == expected
        for name in ("weighted", "weight", "steps", "loss"):
            assert_same(getattr(sent, name), getattr(wanted, name), 1e-4)


def messages_of(client):
    from mixfl.algorithms.contract import Broadcast
    from mixfl.deploy.flower.messages import cut

    return Broadcast(cut(client.init(), client.rows))


def test_gradients_with_masks_and_jit():
    """Of a weighted sum of the losses, in a compiled program and in a batch of programs."""
    x, batch = model.init(jax.random.key(1)), data(3, 6)
    weights = jnp.arange(6.0)
    found, expected = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(weights * f(x, batch))))(x)
        for f in (model.loss(torch_loss), loss)
    )
    assert_same(found, expected, 1e-5)
    several = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x)
    found, expected = (
        jax.vmap(jax.grad(lambda x, f=f: f(x)))(several)
        for f in (model.loss(torch_penalty), penalty)
    )
    assert_same(found, expected, 1e-5)


def test_the_same_problem_in_the_simulator():
    results = []
    for kind in ("torch", "jax"):
        local = mixfl.flower.simulated(*problem(kind))
        results.append(mixfl.train(local, "2wgt", devices=1, **SETTINGS))
    assert_same(results[0].params, results[1].params, 1e-4)


def test_a_large_model_goes_through_a_compiled_program():
    """Arrays of megabytes, which JAX hands to a callback in another way than small ones."""
    large = pytorch.Model(lambda: nn.Linear(1000, 2000))
    square = large.loss(lambda net: (net.weight**2).sum() / 2)
    x = large.init(jax.random.key(0))
    steps = jax.jit(lambda x: jax.lax.scan(lambda x, _: (jax.grad(square)(x), None), x, None, 3)[0])
    found = steps(x)
    np.testing.assert_allclose(found["weight"], x["weight"], rtol=1e-6)
    assert not np.asarray(found["bias"]).any()


def test_the_model_comes_from_the_seed():
    a, b = model.init(jax.random.key(0)), model.init(jax.random.key(1))
    assert_same(model.init(jax.random.key(0)), a, 0)
    assert np.abs(np.asarray(a["out.weight"]) - b["out.weight"]).max() > 1e-3


@pytest.mark.system
def test_a_pytorch_client_masks_what_it_sends():
    """Secure aggregation asks for whole tables: compared with plain, dense ones."""
    given = dict(algorithm="2wgt", rounds=2, clip="off", tables="dense")
    found = deploy("torch", secure=True, **given)
    expected = deploy("torch", **given)
    assert_same(found.params, expected.params, 1e-5)

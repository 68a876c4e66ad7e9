"""Losses in PyTorch are, as JAX functions, what PyTorch computes: compiled, and called."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_problems as cases
from torch_problems import CASES

from mixfl import pytorch
from mixfl.pytorch import tensor

MORE = ("lstm", "attention", "gpt2, untied", "llama", "gpt2 with lora")
NAMES = [pytest.param(name, marks=pytest.mark.numbers) if name in MORE else name for name in CASES]


@functools.cache
def model(name: str) -> pytorch.Model:
    return pytorch.Model(CASES[name].make)


def in_pytorch(model, function, params, batch, weights):
    """Losses, and the gradient of their weighted sum, in plain PyTorch."""
    module = model.make()
    module.load_state_dict(model.state_dict(params))
    losses = function(module, {k: tensor(a) for k, a in batch.items()})
    (losses * torch.from_numpy(weights)).sum().backward()
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    return losses.detach().numpy(), {n: p.grad.numpy() for n, p in named.items()}


def moved(params):
    rng = np.random.default_rng(5)
    return {n: a + 0.05 * rng.normal(size=a.shape).astype(a.dtype) for n, a in params.items()}


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_pytorchs(name):
    case, rows = CASES[name], 5
    loss, batch = model(name).loss(case.loss), case.data(4, rows)
    params = moved(model(name).init(jax.random.key(2)))
    weights = np.arange(1, rows + 1, dtype=np.float32)

    @jax.jit
    def both(params):
        losses, back = jax.vjp(lambda p: loss(p, batch), params)
        return losses, back(weights)[0]

    found, slopes = both(params)
    expected, right = in_pytorch(model(name), case.loss, params, batch, weights)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert slopes.keys() == right.keys()
    largest = max(np.abs(g).max() for g in right.values())
    assert largest > 1e-2
    for n, g in right.items():
        np.testing.assert_allclose(slopes[n], g, rtol=1e-4, atol=1e-4 * largest)
    (verdict,) = loss.verdicts.values()
    assert (verdict.compiled is not None) == case.compiled, verdict.note


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("control flow", "aten._local_scalar_dense.default: what it returns depends on the data"),
        ("unknown operator", "aten._ctc_loss.Tensor: torchax can't compile it"),
        ("checks", "is left out with validate_args=False"),
    ],
)
def test_a_note_names_what_is_not_compiled(name, said):
    loss = model(name).loss(CASES[name].loss)
    loss(model(name).init(jax.random.key(0)), CASES[name].data(0, 4))
    (note,) = loss.notes
    assert said in note
    assert CASES[name].loss.__name__ in note


def test_a_wrong_operator_is_not_used(monkeypatch):
    """The trial compares with PyTorch: torchax's numbers must be its."""
    from mixfl.pytorch.torchax_bridge import environment

    operators = environment()._ops
    wrong = operators[torch.nn.functional.linear]
    other = wrong.func
    monkeypatch.setattr(wrong, "func", lambda *args: 1.001 * other(*args))
    mlp = pytorch.Model(cases.mlp)
    loss, x, batch = mlp.loss(cases.classify), mlp.init(jax.random.key(0)), CASES["mlp"].data(0, 4)
    expected, _ = in_pytorch(mlp, cases.classify, x, batch, np.ones(4, np.float32))
    np.testing.assert_allclose(loss(x, batch), expected, rtol=1e-6)
    (note,) = loss.notes
    assert "off by" in note


def test_gradients_that_pytorch_stops_are_stopped():
    """torchax does not know no_grad; the trial notices."""

    def function(net, batch):
        with torch.no_grad():
            hidden = net[1](net[0](batch["x"]))
        return torch.nn.functional.cross_entropy(net[2](hidden), batch["y"], reduction="none")

    loss = model("mlp").loss(function)
    x = model("mlp").init(jax.random.key(0))
    g = jax.grad(lambda x: loss(x, CASES["mlp"].data(0, 4)).sum())(x)
    assert not np.asarray(g["0.weight"]).any()
    assert np.abs(g["2.weight"]).max() > 1e-2


def test_constants_of_the_loss_are_compiled():
    """Tensors that the loss has made itself, before and while it runs."""
    rates = torch.tensor([0.5, 1.0, 2.0])

    def function(net, batch):
        scores = net(batch["x"]).log_softmax(-1)
        return -rates[batch["y"]] * scores[torch.arange(len(batch["y"])), batch["y"]]

    loss, batch = model("mlp").loss(function), CASES["mlp"].data(0, 4)
    x = model("mlp").init(jax.random.key(0))
    expected, _ = in_pytorch(model("mlp"), function, x, batch, np.ones(4, np.float32))
    np.testing.assert_allclose(loss(x, batch), expected, rtol=1e-5)
    assert not loss.notes


def test_whole_numbers_are_pytorchs():
    """Pixels of type uint8 don't wrap around, as they don't in PyTorch."""

    def function(net, batch):
        return ((batch["x"] * 200).float() * net.weight[0, 0]).sum(1)

    linear = pytorch.Model(lambda: torch.nn.Linear(1, 1))
    loss, x = linear.loss(function), linear.init(jax.random.key(0))
    pixels = np.array([[200, 3], [255, 255]], np.uint8)
    expected = 200.0 * pixels.astype(float).sum(1) * float(x["weight"][0, 0])
    np.testing.assert_allclose(loss(x, {"x": pixels}), expected, rtol=1e-6)
    assert not loss.notes


@pytest.mark.parametrize("compiled", [True, False])
def test_second_derivatives(compiled):
    """What `mixfl diagnose` measures curvature with: reverse mode, twice."""
    case, params = CASES["mlp"], moved(model("mlp").init(jax.random.key(0)))
    loss = model("mlp").loss(case.loss)
    batch, along = case.data(1, 4), moved(jax.tree.map(jnp.zeros_like, params))

    def slope(x, loss=loss):
        g = jax.grad(lambda x: (loss(x, batch) ** 2).sum())(x)
        return sum(jnp.sum(g[n] * along[n]) for n in g)

    expected = jax.grad(slope)(params)
    if not compiled:
        expected, found = expected, jax.jit(jax.grad(lambda x: slope(x, loss.in_pytorch())))(params)
    else:  # the difference of two gradients

        def gradient(x):
            return jax.grad(lambda x: (loss(x, batch) ** 2).sum())(x)

        step = 1e-3
        low = gradient(jax.tree.map(lambda a, v: a - step * v, params, along))
        high = gradient(jax.tree.map(lambda a, v: a + step * v, params, along))
        found = jax.tree.map(lambda b, a: (b - a) / (2 * step), high, low)
    largest = max(np.abs(g).max() for g in expected.values())
    assert largest > 1e-2
    for n, g in expected.items():
        np.testing.assert_allclose(found[n], g, atol=(1e-4 if not compiled else 1e-2) * largest)

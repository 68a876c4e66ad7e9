"""Compiled losses have PyTorch's derivatives where functions bend, end or overflow."""

import functools

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mixfl
from mixfl import pytorch
from mixfl.pytorch.compiled import compiled
from mixfl.pytorch.trial import models

ZEROS = np.zeros((4, 6), np.float32)
BENDS = np.array(
    [[0, 1, -1, 2, 2, 0], [1, 1, 1, 1, 1, 1], [-1, 0, 0, 3, 3, -3], [5, -5, 0.5, -0.5, 6, -6]],
    np.float32,
)
LARGE = np.array(
    [[30, -30, 100, -100, 20, -20], [1e4, -1e4, 0, 88, -88, 3], [50, 50, 50, -50, -50, -50],
     [1e-4, -1e-4, 0.1, 0, 10, -10]], np.float32,
)  # fmt: skip
OTHERS = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
HIDDEN = torch.tensor([[False, False], [True, False]])


def heads(x):
    return x.view(4, 1, 2, 3)


OPERATORS = {
    "abs": torch.abs,
    "abs in place": lambda x: x.clone().abs_(),
    "abs of a view": lambda x: _with_abs_of_a_part(x.clone()),
    "l1_loss": lambda x: F.l1_loss(x, torch.ones(4, 6), reduction="none"),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp by tensors": lambda x: torch.clamp(x, x.flip(1) * 0.5, x.flip(0).abs()),
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp_max": lambda x: x.clamp(max=0.0),
    "clamp whole numbers": lambda x: x.clamp(-99, 99).long().clamp(-1, 1).float() * x,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "leaky_relu in place": lambda x: F.leaky_relu_(x.clone(), 0.3),
    "elu": lambda x: F.elu(x, 2.0),
    "celu": lambda x: F.celu(x, 0.7),
    "selu in place": lambda x: F.selu(x.clone(), inplace=True),
    "softplus": F.softplus,
    "softplus of a slope": lambda x: F.softplus(x, beta=3, threshold=5),
    "mish": F.mish,
    "logsigmoid": F.logsigmoid,
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(
        torch.sigmoid(x), (x > 0).float(), reduction="none"
    ),
    "binary_cross_entropy, weighted": lambda x: F.binary_cross_entropy(
        torch.sigmoid(x.clamp(-80, 80)), torch.full((4, 6), 0.3), weight=torch.arange(6.0)
    ),
    "binary_cross_entropy of a target": lambda x: F.binary_cross_entropy(
        torch.full((4, 6), 0.3), torch.sigmoid(x), reduction="sum"
    ),
    "norm": lambda x: x.norm(dim=1),
    "norm of all": lambda x: x.norm(),
    "norm of order 1": lambda x: x.norm(p=1, dim=1),
    "norm of order 3": lambda x: x.norm(p=3, dim=1),
    "norm of infinite order": lambda x: x.norm(p=float("inf"), dim=1),
    "normalize": F.normalize,
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "dist": lambda x: torch.stack([torch.dist(row, torch.zeros(6)) for row in x]),
    "cdist": lambda x: torch.cdist(x[:, :, None], x[:, :, None]),
    "cdist of many rows": lambda x: torch.cdist(x.repeat(8, 1) * 0, x)[:, :4],
    "std": lambda x: x.std(1),
    "std of all": lambda x: x.std(correction=0),
    "std_mean": lambda x: torch.stack(torch.std_mean(x, 1, keepdim=True)),
    "max": lambda x: x.max(1).values,
    "min, kept": lambda x: x.view(4, 2, 3).min(-2, keepdim=True)[0],
    "places of max": lambda x: x.max(1)[1].float() * x[:, 0],
    "sinc": lambda x: torch.sinc((10 * x).round().clamp(-3, 3) / 2),
    "attention that sees nothing": lambda x: F.scaled_dot_product_attention(
        heads(x), heads(x), heads(x), attn_mask=HIDDEN
    ),
    "attention by infinities": lambda x: F.scaled_dot_product_attention(
        heads(x), heads(x), heads(x), attn_mask=torch.zeros(2, 2).masked_fill(~HIDDEN, -torch.inf)
    ),
}


def _with_abs_of_a_part(x):
    x[:, :2].abs_()
    return x


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(4, 6))


@functools.cache
def model():
    return pytorch.Model(Numbers)


@pytest.mark.parametrize("name", OPERATORS)
def test_derivatives_are_pytorchs(name):
    weights = torch.from_numpy(np.random.default_rng(3).normal(size=200).astype(np.float32))

    def loss(module):
        found = OPERATORS[name](module.x).flatten()
        return (found * weights[: len(found)]).sum()

    found = jax.jit(jax.value_and_grad(lambda x: compiled(model(), loss)(x, {})))
    for x in (ZEROS, BENDS, LARGE, OTHERS):
        module = model().module({"x": x})
        expected = loss(module)
        slope = torch.autograd.grad(expected, [module.x])[0].numpy()
        value, slopes = found({"x": x})
        size = np.abs(x).max() + np.abs(slope).max()
        np.testing.assert_allclose(value, expected.detach(), rtol=1e-4, atol=1e-5 * size)
        np.testing.assert_allclose(slopes["x"], slope, rtol=1e-4, atol=1e-5 * np.abs(slope).max())


def rated(net, batch):
    return (net(batch["x"])[:, 0] - batch["y"]) ** 2


def examples(n=3):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(n, 8)).astype(np.float32), "y": np.zeros(n, np.float32)}


class Bent(nn.Module):
    """The operator's derivative at 0 is another one in JAX, and torchax has no rule for it."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return 1 + torch.fmax(self.out(x), torch.zeros(()))


def test_the_first_model_is_tried_as_it_is():
    bent = pytorch.Model(Bent)
    loss = bent.loss(rated)
    slopes = jax.grad(lambda x: loss(x, examples()).sum())(bent.init(jax.random.key(0)))
    assert "off by" in loss.notes[0]
    assert np.abs(slopes["out.bias"]).max() > 1


def test_a_large_model_is_tried(monkeypatch):
    """softplus as torchax has it: its derivative overflows."""
    from mixfl.pytorch.torchax_bridge import environment

    operator = environment()._ops[torch.ops.aten.softplus]
    monkeypatch.setattr(
        operator,
        "func",
        lambda x, *_: jax.numpy.where(x > 20, x, jax.numpy.log1p(jax.numpy.exp(x))),
    )
    net = pytorch.Model(lambda: nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1)))
    loss = net.loss(rated)
    loss(net.init(jax.random.key(0)), examples())
    assert "not finite for large parameters" in loss.notes[0]


def test_other_examples_are_tried_too():
    """A path that only few examples take."""

    def rare(net, batch):
        with torch.no_grad():  # which torchax does not know
            stopped = net(batch["x"])[:, 0]
        return torch.where(batch["y"] > 0, stopped, net(batch["x"])[:, 0]) ** 2

    net = pytorch.Model(lambda: nn.Linear(8, 1))
    data = examples(40)
    data["y"][3:] = 1
    clients = mixfl.ClientData.from_arrays(data, client=np.arange(40) // 4)
    loss = mixfl.Federated(net.loss(rare), clients).loss
    loss(net.init(jax.random.key(0)), {name: column[:5] for name, column in data.items()})
    assert "off by" in loss.notes[0]


def test_where_pytorch_itself_fails_nothing_is_compared():
    """At the large model."""

    def limited(net, batch):
        if type(net.weight) is nn.Parameter and net.weight.abs().max() > 5:
            raise ValueError("too large")
        return rated(net, batch)

    largest = [np.abs(params["w"]).max() for params, _ in models({"w": OTHERS})]
    assert largest[2] > 100 * largest[0] > 50 * largest[1]
    net = pytorch.Model(lambda: nn.Linear(8, 1))
    loss = net.loss(limited)
    loss(net.init(jax.random.key(0)), examples())
    (verdict,) = loss.verdicts.values()
    assert verdict.compiled is not None, verdict.note


def test_what_pytorch_can_not_differentiate_is_said_at_once():
    def changed(net, batch):
        scores = net(batch["x"]).relu()
        kept = scores.exp()
        return (kept.mul_(2) * scores)[:, 0]

    net = pytorch.Model(lambda: nn.Linear(8, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net.loss(changed)(net.init(jax.random.key(0)), examples())


class Shortened(torch.autograd.Function):
    """Limits gradients: at small ones, nothing is to be seen of it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-9, 9)


def by_function(net, batch):
    return Shortened.apply(net(batch["x"]))[:, 0] - batch["y"]


def by_hook(net, batch):
    scores = net(batch["x"])
    if scores.requires_grad:
        scores.register_hook(lambda g: g.clamp(-9, 9))
    return scores[:, 0] - batch["y"]


def hooked():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    net[1].register_full_backward_hook(lambda module, given, out: (given[0],))
    return net


@pytest.mark.parametrize(
    ("make", "function", "said"),
    [
        (lambda: nn.Linear(8, 1), by_function, "a derivative of its own (Shortened)"),
        (lambda: nn.Linear(8, 1), by_hook, "hooks on gradients"),
        (hooked, rated, "hooks on gradients"),
    ],
)
def test_derivatives_of_the_users_own_stay_in_pytorch(make, function, said):
    net = pytorch.Model(make)
    loss = net.loss(function)
    slopes = jax.grad(lambda x: 100 * loss(x, examples()).sum())(net.init(jax.random.key(0)))
    assert said in loss.notes[0]
    if function is not rated:
        np.testing.assert_allclose(slopes["bias"], 27)  # of three examples


def test_a_hook_of_a_parameter_is_refused():
    def make():
        net = nn.Linear(8, 1)
        net.weight.register_hook(lambda g: g.clamp(-1, 1))
        return net

    with pytest.raises(mixfl.MixflError, match="weight has a hook on its gradient"):
        pytorch.Model(make)

"""Operators that torchax lacks, or has wrong, are PyTorch's: values, derivatives and places."""

import functools

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mixfl import pytorch
from mixfl.pytorch.compiled import compiled

SHAPE = 2, 4, 9, 8  # images
WEIGHTS = torch.from_numpy(np.random.default_rng(3).normal(size=6000).astype(np.float32))
KERNEL = WEIGHTS[:72].view(4, 2, 3, 3)


def line(x):
    return x[:, :, 0]


def space(x):
    return x.view(2, 4, 3, 3, 8)


def transposed(x, groups, **more):
    return F.conv_transpose2d(x, KERNEL * (1 + x.mean()), groups=groups, **more)


def with_places(x, pooled):
    values, places = pooled
    return values * (1 + places % 7)


OPERATORS = {
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "avg_pool2d, padded": lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0)),
    "avg_pool2d, padding not counted": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool2d, last windows cut": lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
    "avg_pool2d, cut and padded": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d, cut, padding not counted": lambda x: F.avg_pool2d(x, 4, 3, 2, True, False),
    "avg_pool2d, no window in the padding": lambda x: F.avg_pool2d(x, 2, 3, 1, ceil_mode=True),
    "avg_pool2d, of a sum": lambda x: F.avg_pool2d(x, 3, divisor_override=5),
    "avg_pool2d, one size": lambda x: F.avg_pool2d(x, [2], [1]),
    "avg_pool2d, whole numbers": lambda x: F.avg_pool2d((9 * x).long(), 3) * x.mean(),
    "avg_pool2d, bfloat16": lambda x: F.avg_pool2d(x.abs().bfloat16(), (9, 8)).float(),
    "avg_pool1d": lambda x: F.avg_pool1d(line(x), 3, 2, 1, ceil_mode=True),
    "avg_pool3d": lambda x: F.avg_pool3d(space(x), (2, 2, 3), ceil_mode=True),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "adaptive_max_pool2d, equal windows": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "adaptive_max_pool2d, places": lambda x: with_places(
        x, F.adaptive_max_pool2d(x, (4, 5), return_indices=True)
    ),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(line(x), 3),
    "adaptive_max_pool2d, no examples": lambda x: torch.cat(
        [F.adaptive_max_pool2d(x[:0], (2, 3)).flatten(), x.flatten()]
    ),
    "adaptive_max_pool3d": lambda x: F.adaptive_max_pool3d(space(x), (2, 3, 5)),
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d, gaps": lambda x: F.max_pool2d(x, 3, 1, dilation=2),
    "max_pool2d, gaps and padding": lambda x: F.max_pool2d(x, (3, 2), 2, 1, (2, 3), True),
    "max_pool2d, places": lambda x: with_places(
        x, F.max_pool2d(x, 2, 1, dilation=(1, 3), return_indices=True)
    ),
    "max_pool1d, gaps": lambda x: F.max_pool1d(line(x), 2, 1, dilation=3),
    "max_pool2d, gaps, masked": lambda x: F.max_pool2d(
        x.masked_fill(x < 0.8, -torch.inf), 3, 1, 1, dilation=3
    ).clamp_min(-1),
    "max_pool2d, gaps, whole numbers": lambda x: (
        F.max_pool2d(2**24 + (3 * x).long(), 2, 1, 1, 2) % 9 * x.mean()
    ),
    "max_pool3d, gaps": lambda x: F.max_pool3d(space(x), 2, dilation=(1, 2, 2)),
    "conv_transpose2d of groups": lambda x: transposed(x, 2),
    "conv_transpose2d of channels": lambda x: transposed(
        x, 4, stride=2, padding=1, output_padding=1, dilation=2
    ),
    "mT": lambda x: torch.ops.aten.mT(x) @ x,
}


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SHAPE))


@functools.cache
def model():
    return pytorch.Model(Numbers)


FEW = (
    "avg_pool2d, cut and padded", "adaptive_max_pool2d, places", "max_pool2d, gaps, masked",
    "conv_transpose2d of channels",
)  # fmt: skip
NAMES = [n if n in FEW else pytest.param(n, marks=pytest.mark.numbers) for n in OPERATORS]


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_pytorchs(name):
    def loss(module):
        found = OPERATORS[name](module.x).flatten()
        return (found * WEIGHTS[: len(found)]).sum()

    found = jax.jit(jax.value_and_grad(lambda x: compiled(model(), loss)(x, {})))
    rng = np.random.default_rng(0)
    for x in (rng.normal(size=SHAPE), rng.integers(-2, 2, SHAPE)):  # many are equal
        x = x.astype(np.float32)
        module = model().module({"x": x})
        expected = loss(module)
        slope = torch.autograd.grad(expected, [module.x])[0].numpy()
        value, slopes = found({"x": x})
        np.testing.assert_allclose(value, expected.detach(), rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(slopes["x"], slope, rtol=1e-4, atol=1e-5 * np.abs(slope).max())

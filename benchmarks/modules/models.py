"""Modules as people write them, most of them unlike anything that mixfl was tuned for.

`MODULES` has, by name: what makes the module, the columns of its data, the loss of each example,
and the size of a round.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.in_torch import MODULES as ZOO
from benchmarks.zoo.models import MODELS

Columns = dict[str, np.ndarray]


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    columns: Callable[[np.random.Generator, int], Columns]
    losses: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    S: int = 10
    K: int = 2
    B: int = 10


def norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


class Inverted(nn.Module):
    """An inverted residual: wide, depthwise, narrow; with squeeze-and-excite if asked for."""

    def __init__(self, inputs, outputs, stride, wider=4, act=nn.ReLU6, squeeze=False):
        super().__init__()
        wide = wider * inputs
        self.same = stride == 1 and inputs == outputs
        self.up = nn.Sequential(nn.Conv2d(inputs, wide, 1, bias=False), norm(wide), act())
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), norm(wide), act()
        )
        self.squeeze = Squeeze(wide, inputs // 4) if squeeze else nn.Identity()
        self.down = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), norm(outputs))

    def forward(self, x):
        y = self.down(self.squeeze(self.depth(self.up(x))))
        return x + y if self.same else y


class Squeeze(nn.Module):
    def __init__(self, channels, few):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, few, 1), nn.Conv2d(few, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))


def inverted(act, squeeze):
    plan = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), norm(16), act(),
        *(Inverted(*p, act=act, squeeze=squeeze) for p in plan),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, widths=(16, 32, 64)):
        super().__init__()
        ins = (3, *widths)
        self.down = nn.ModuleList(map(double, ins, widths))
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.joined = nn.ModuleList(double(2 * b, b) for _, b in pairs)
        self.out = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x):
        kept = []
        for i, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, joined, skipped in zip(self.up, self.joined, kept[-2::-1], strict=True):
            x = joined(torch.cat([up(x), skipped], 1))
        return self.out(x)


def double(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), norm(outputs), nn.ReLU(),
    )  # fmt: skip


class ViT(nn.Module):
    def __init__(self, width=96, layers=4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 65, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.out(self.encoder(x)[:, 0])


def signals_net():
    layers: list[nn.Module] = []
    for a, b, dilation in [(6, 32, 1), (32, 64, 2), (64, 64, 4), (64, 96, 8)]:
        layers += [nn.Conv1d(a, b, 5, padding="same", dilation=dilation), norm(b), nn.ReLU(),
                   nn.MaxPool1d(2)]  # fmt: skip
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(96, 10))


class GRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.gru = nn.GRU(64, 128, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(256, 10)

    def forward(self, tokens):
        return self.out(self.gru(self.table(tokens))[0].mean(1))


def autoencoder():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 16),
        nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 784),
    )  # fmt: skip


class Odd(nn.Module):
    """nn.Bilinear, an einsum of four factors, sorting, a cumulative sum."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 48), nn.Linear(64, 48)
        self.both = nn.Bilinear(48, 48, 64)
        self.core = nn.Parameter(0.1 * torch.randn(64, 16, 16))
        self.a, self.b = nn.Linear(64, 16), nn.Linear(64, 16)
        self.out = nn.Linear(64, 10)

    def forward(self, x):
        h = torch.tanh(self.both(self.left(x), self.right(x)))
        t = torch.einsum("nsh,hij,nsi,nsj->nsh", h, self.core, self.a(h), self.b(h))
        ranked = torch.cumsum(torch.sort(t, dim=1).values, 1) / t.shape[1]
        return self.out((h + ranked).mean(1))


def images(rng, n) -> Columns:
    return {"x": rng.normal(size=(n, 3, 32, 32)).astype(np.float32), "y": rng.integers(0, 10, n)}


def masks(rng, n) -> Columns:
    return {"x": images(rng, n)["x"], "y": rng.integers(0, 2, (n, 32, 32))}


def signals(rng, n) -> Columns:
    return {"x": rng.normal(size=(n, 6, 256)).astype(np.float32), "y": rng.integers(0, 10, n)}


def sentences(rng, n) -> Columns:
    return {"x": rng.integers(0, 1000, (n, 40)), "y": rng.integers(0, 10, n)}


def digits(rng, n) -> Columns:
    return {"x": rng.uniform(size=(n, 784)).astype(np.float32)}


def sets(rng, n) -> Columns:
    return {"x": rng.normal(size=(n, 24, 64)).astype(np.float32), "y": rng.integers(0, 10, n)}


def classes(module, batch):
    return F.cross_entropy(module(batch["x"]), batch["y"].long(), reduction="none")


def pixels(module, batch):
    return classes(module, batch).mean((1, 2))


def rebuilt(module, batch):
    return F.mse_loss(module(batch["x"]), batch["x"], reduction="none").mean(1)


def of_zoo(name: str) -> Case:
    size, columns = MODELS[name].size, MODELS[name].columns

    def made(rng: Any, n: int) -> Columns:
        return columns(size.model, n, rng)

    def losses(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return module.losses(**batch)

    return Case(lambda: ZOO[name](size.model), made, losses, size.S, size.K, size.B)


MODULES = {
    **{name: of_zoo(name) for name in ("mlp", "cnn", "resnet", "lstm", "gpt")},
    "mobilenet": Case(lambda: inverted(nn.ReLU6, False), images, classes),
    "efficientnet": Case(lambda: inverted(nn.SiLU, True), images, classes),
    "unet": Case(UNet, masks, pixels),
    "vit": Case(ViT, images, classes),
    "conv1d": Case(signals_net, signals, classes),
    "gru": Case(GRU, sentences, classes),
    "autoencoder": Case(autoencoder, digits, rebuilt),
    "odd": Case(Odd, sets, classes),
}

"""The zoo as ordinary PyTorch modules: the same models as in `in_jax.py`.

`losses(**columns)` returns one loss per example. JAX's parameters have the names of the modules',
as in blocks/0/qkv/w for blocks.0.qkv.weight, and JAX's layouts.
"""

import math

from torch import nn
from torch.nn import functional as F

from benchmarks.peers.turns import KERNEL, SAME, TRANSPOSED, Turn


class Zoo(nn.Module):
    weight = 1.0
    turns: dict[str, Turn] = {}  # of parameters whose layout their kind does not tell

    def loss(self, **columns):
        return self.weight * self.losses(**columns).mean()

    def translation(self):
        """JAX's name -> the parameter, and how its layout changes."""
        return {
            name: (p, self.turns.get(name, turn))
            for path, layer in self.named_modules()
            for own, p in layer.named_parameters(recurse=False)
            for name, turn in [translated(path, layer, own, p)]
        }


def translated(path, layer, own, parameter):
    folder = path.replace(".", "/")
    if isinstance(layer, nn.Embedding):
        return folder, SAME
    name = f"{folder}/{own.replace('weight', 'w').replace('bias', 'b')}"
    return name, {1: SAME, 2: TRANSPOSED, 4: KERNEL}[parameter.ndim]


def pixels(image):
    return image.float() / 255


class Logistic(Zoo):
    def __init__(self, m):
        super().__init__()
        self.dense = nn.Linear(math.prod(m["image"]), m["classes"])

    def losses(self, image, label):
        return F.cross_entropy(self.dense(pixels(image).flatten(1)), label.long(), reduction="none")


class MLP(Zoo):
    def __init__(self, m):
        super().__init__()
        self.dense0 = nn.Linear(math.prod(m["image"]), m["hidden"])
        self.dense1 = nn.Linear(m["hidden"], m["hidden"])
        self.dense2 = nn.Linear(m["hidden"], m["classes"])

    def losses(self, image, label):
        x = F.relu(self.dense0(pixels(image).flatten(1)))
        z = self.dense2(F.relu(self.dense1(x)))
        return F.cross_entropy(z, label.long(), reduction="none")


class CNN(Zoo):
    def __init__(self, m):
        super().__init__()
        c1, c2 = m["channels"]
        self.conv1, self.conv2 = nn.Conv2d(1, c1, 3), nn.Conv2d(c1, c2, 3)
        side = (m["image"][0] - 4) // 2  # after both convolutions and the pool
        self.dense1 = nn.Linear(side * side * c2, m["hidden"])
        self.dense2 = nn.Linear(m["hidden"], m["classes"])

        def to_torch(w):  # images are flattened with the channels last in JAX, first in PyTorch
            return w.reshape(side, side, c2, -1).transpose(3, 2, 0, 1).reshape(w.shape[1], -1)

        def to_jax(w):
            return w.reshape(-1, c2, side, side).transpose(2, 3, 1, 0).reshape(w.shape[1], -1)

        self.turns = {"dense1/w": Turn(to_torch, to_jax)}

    def losses(self, image, label):
        x = F.relu(self.conv1(pixels(image)[:, None]))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        z = self.dense2(F.relu(self.dense1(x.flatten(1))))
        return F.cross_entropy(z, label.long(), reduction="none")


class Block(nn.Module):
    def __init__(self, inputs, outputs, groups):
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.short = None if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (self.short(x) if self.short else x))


class ResNet(Zoo):
    def __init__(self, m):
        super().__init__()
        widths = [w for w in m["stages"] for _ in range(m["blocks"])]
        first = m["stages"][0]
        self.conv = nn.Conv2d(3, first, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(m["groups"], first)
        self.blocks = nn.Sequential(
            *(Block(a, b, m["groups"]) for a, b in zip([first, *widths], widths))  # noqa: B905
        )
        self.dense = nn.Linear(widths[-1], m["classes"])

    def losses(self, image, label):
        x = self.conv(pixels(image).permute(0, 3, 1, 2).contiguous())
        x = self.blocks(F.relu(self.norm(x)))
        return F.cross_entropy(self.dense(x.mean((2, 3))), label.long(), reduction="none")


class LSTM(Zoo):
    def __init__(self, m):
        super().__init__()
        self.embedding = nn.Embedding(m["vocabulary"], m["embedding"])
        self.lstm = nn.LSTM(m["embedding"], m["hidden"], m["layers"])
        self.dense = nn.Linear(m["hidden"], m["vocabulary"])

    def losses(self, text):
        ids = text.T.long()
        h, _ = self.lstm(self.embedding(ids[:-1]))
        return F.cross_entropy(self.dense(h[-1]), ids[-1], reduction="none")


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, head, time, width]
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(Zoo):
    def __init__(self, m):
        super().__init__()
        self.tokens = nn.Embedding(m["vocabulary"], m["width"])
        self.places = nn.Embedding(m["length"], m["width"])
        self.blocks = nn.Sequential(*(Layer(m["width"], m["heads"]) for _ in range(m["layers"])))
        self.norm = nn.LayerNorm(m["width"])
        self.head = nn.Linear(m["width"], m["vocabulary"])

    def losses(self, text):
        ids = text.long()
        x = self.blocks(self.tokens(ids[:, :-1]) + self.places.weight)
        z = self.head(self.norm(x)).transpose(1, 2)
        return F.cross_entropy(z, ids[:, 1:], reduction="none").mean(-1)


class Factors(Zoo):
    def __init__(self, m):
        super().__init__()
        self.users = nn.Embedding(m["users"], m["width"])
        self.items = nn.Embedding(m["items"], m["width"])
        self.user_bias, self.item_bias = nn.Embedding(m["users"], 1), nn.Embedding(m["items"], 1)

    def losses(self, user, item, rating):
        guess = (self.users(user) * self.items(item)).sum(-1)
        guess = guess + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0]
        return (guess + 3 - rating) ** 2


MODULES = {
    "logistic": Logistic, "mlp": MLP, "cnn": CNN, "resnet": ResNet, "lstm": LSTM, "gpt": GPT,
    "factors": Factors,
}  # fmt: skip

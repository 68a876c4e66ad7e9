"""Small models of the kinds that people train, each with a few examples."""

import jax
import jax.numpy as jnp
import numpy as np

import mixfl

SIDE, CLASSES, WORDS, LENGTH, ITEMS, DIM = 8, 3, 11, 6, 40, 8


def weights(key, *shapes):
    keys = jax.random.split(key, len(shapes))
    return [0.3 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def conv(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def normed(x, groups=2):
    """GroupNorm without scale and bias."""
    g = x.reshape(*x.shape[:-1], groups, -1)
    mean = g.mean((1, 2, 4), keepdims=True)
    return ((g - mean) / jnp.sqrt(g.var((1, 2, 4), keepdims=True) + 1e-5)).reshape(x.shape)


def pixels(batch):
    return batch["image"].astype(jnp.float32) / 255


def logistic_regression(p, batch):
    return cross_entropy(pixels(batch).reshape(-1, SIDE * SIDE) @ p[0], batch["label"])


def mlp(p, batch):
    hidden = jax.nn.relu(pixels(batch).reshape(-1, SIDE * SIDE) @ p[0])
    return cross_entropy(hidden @ p[1], batch["label"])


def cnn(p, batch):
    x = jax.nn.relu(conv(pixels(batch)[..., None], p[0]))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return cross_entropy(x.reshape(len(x), -1) @ p[1], batch["label"])


def resnet(p, batch):
    x = conv(pixels(batch)[..., None], p[0])
    for first, second in (p[1:3], p[3:5]):
        x = x + conv(jax.nn.relu(normed(conv(jax.nn.relu(normed(x)), first))), second)
    return cross_entropy(x.mean((1, 2)) @ p[5], batch["label"])


def lstm(p, batch):
    table, w, out = p

    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((len(batch["text"]), DIM))
    _, h = jax.lax.scan(cell, (zeros, zeros), jnp.swapaxes(table[batch["text"][:, :-1]], 0, 1))
    return cross_entropy(jnp.swapaxes(h, 0, 1) @ out, batch["text"][:, 1:]).mean(1)


def gpt(p, batch):
    table, place, qkv, mixed, up, down = p
    x = table[batch["text"][:, :-1]] + place
    q, k, v = jnp.split(x @ qkv, 3, -1)
    scores = q @ jnp.swapaxes(k, 1, 2) / np.sqrt(DIM)
    scores = jnp.where(np.tri(LENGTH - 1, dtype=bool), scores, -1e9)
    x = x + (jax.nn.softmax(scores) @ v) @ mixed
    x = x + jax.nn.gelu(x @ up) @ down
    return cross_entropy(x @ table.T, batch["text"][:, 1:]).mean(1)


def factorization(p, batch):
    return (jnp.sum(p["users"] * p["items"][batch["item"]], 1) - batch["stars"]) ** 2


PIXELS = SIDE * SIDE
MODELS = {
    "logistic regression": (logistic_regression, [(PIXELS, CLASSES)]),
    "mlp": (mlp, [(PIXELS, DIM), (DIM, CLASSES)]),
    "cnn": (cnn, [(3, 3, 1, 4), (PIXELS, CLASSES)]),
    "resnet": (resnet, [(3, 3, 1, 4), *[(3, 3, 4, 4)] * 4, (4, CLASSES)]),
    "lstm": (lstm, [(WORDS, DIM), (2 * DIM, 4 * DIM), (DIM, WORDS)]),
    "gpt": (gpt, [(WORDS, DIM), (LENGTH - 1, DIM), (DIM, 3 * DIM), (DIM, DIM), (DIM, 4 * DIM),
                  (4 * DIM, DIM)]),
}  # fmt: skip
KINDS = [*MODELS, "matrix factorization"]


def problem(kind: str) -> mixfl.Problem:
    """Clients of unequal size, and examples at the server."""
    rng, sizes = np.random.default_rng(0), (2, 5, 3, 1)
    n = sum(sizes)
    columns = {
        "image": rng.integers(0, 256, (n, SIDE, SIDE), dtype=np.uint8),
        "label": rng.integers(0, CLASSES, n),
        "text": rng.integers(0, WORDS, (n, LENGTH)),
        "item": rng.integers(0, ITEMS, n),
        "stars": rng.normal(size=n).astype(np.float32),
    }
    rows = {}
    if kind == "matrix factorization":
        loss, used, rows = factorization, ("item", "stars"), {"items": "item"}

        def init(key):
            return dict(zip(("items", "users"), weights(key, (ITEMS, DIM), (DIM,)), strict=True))
    else:
        loss, shapes = MODELS[kind]
        used = ("text",) if kind in ("lstm", "gpt") else ("image", "label")

        def init(key):
            return weights(key, *shapes)

    data = {name: columns[name] for name in used}
    people = mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(len(sizes)), sizes))
    return mixfl.Problem(
        init, [mixfl.Federated(loss, people, 0.6, rows=rows), mixfl.Central(loss, data, 0.4)]
    )

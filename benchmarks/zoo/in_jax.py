"""The zoo in plain JAX, as one would write it without mixfl. Works with old and new versions.

`init(key, model)` makes the parameters; `loss(params, batch, model)` returns one loss per example.
`model` has the model's numbers (models.py).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax


def uniform(key, shape, fan_in):
    return jax.random.uniform(key, shape, minval=-1, maxval=1) * fan_in**-0.5


def dense_init(key, inputs, outputs):
    w, b = jax.random.split(key)
    return {"w": uniform(w, (inputs, outputs), inputs), "b": uniform(b, (outputs,), inputs)}


def norm_init(channels):
    return {"w": jnp.ones(channels), "b": jnp.zeros(channels)}


def dense(p, x):
    return x @ p["w"] + p["b"]


def cross_entropy(z, label):
    right = jnp.take_along_axis(z, label[..., None].astype(jnp.int32), -1)[..., 0]
    return jax.nn.logsumexp(z, -1) - right


def pixels(batch):
    return batch["image"].astype(jnp.float32) / 255


def flat_pixels(batch):
    return pixels(batch).reshape(len(batch["image"]), -1)


# Logistic regression


def logistic_init(key, model):
    return {"dense": dense_init(key, math.prod(model["image"]), model["classes"])}


def logistic(params, batch, model):
    return cross_entropy(dense(params["dense"], flat_pixels(batch)), batch["label"])


# MLP: 784-200-200-10


def mlp_init(key, model):
    sizes = [math.prod(model["image"]), model["hidden"], model["hidden"], model["classes"]]
    keys = jax.random.split(key, 3)
    return {f"dense{i}": dense_init(k, *sizes[i : i + 2]) for i, k in enumerate(keys)}


def mlp(params, batch, model):
    x = flat_pixels(batch)
    for i in range(2):
        x = jax.nn.relu(dense(params[f"dense{i}"], x))
    return cross_entropy(dense(params["dense2"], x), batch["label"])


# The CNN for EMNIST: two convolutions, a pool, two dense layers


def conv(x, w, stride=1, padding=0):
    return lax.conv_general_dilated(
        x, w, (stride, stride), [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def kernel_init(key, side, inputs, outputs):
    return uniform(key, (side, side, inputs, outputs), side * side * inputs)


def cnn_init(key, model):
    (c1, c2), hidden = model["channels"], model["hidden"]
    side = (model["image"][0] - 4) // 2  # after both convolutions and the pool
    k = jax.random.split(key, 6)
    return {
        "conv1": {"w": kernel_init(k[0], 3, 1, c1), "b": uniform(k[1], (c1,), 9)},
        "conv2": {"w": kernel_init(k[2], 3, c1, c2), "b": uniform(k[3], (c2,), 9 * c1)},
        "dense1": dense_init(k[4], side * side * c2, hidden),
        "dense2": dense_init(k[5], hidden, model["classes"]),
    }


def cnn(params, batch, model):
    x = pixels(batch)[..., None]
    for name in ("conv1", "conv2"):
        x = jax.nn.relu(conv(x, params[name]["w"]) + params[name]["b"])
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(dense(params["dense1"], x.reshape(len(x), -1)))
    return cross_entropy(dense(params["dense2"], x), batch["label"])


# ResNet-20 with GroupNorm, for CIFAR


def block_init(key, inputs, outputs):
    k = jax.random.split(key, 3)
    p = {
        "conv1": {"w": kernel_init(k[0], 3, inputs, outputs)}, "norm1": norm_init(outputs),
        "conv2": {"w": kernel_init(k[1], 3, outputs, outputs)},
        "norm2": {"w": jnp.full(outputs, 0.1), "b": jnp.zeros(outputs)},  # nearly the identity
    }  # fmt: skip
    if inputs != outputs:
        p["short"] = {"w": kernel_init(k[2], 1, inputs, outputs)}
    return p


def resnet_blocks(model):
    """Inputs and outputs of each block."""
    widths = [w for w in model["stages"] for _ in range(model["blocks"])]
    return list(zip([model["stages"][0], *widths], widths))  # noqa: B905


def resnet_init(key, model):
    shapes = resnet_blocks(model)
    k = jax.random.split(key, len(shapes) + 2)
    first = model["stages"][0]
    return {
        "conv": {"w": kernel_init(k[0], 3, 3, first)}, "norm": norm_init(first),
        "blocks": {str(i): block_init(k[i + 2], *s) for i, s in enumerate(shapes)},
        "dense": dense_init(k[1], model["stages"][-1], model["classes"]),
    }  # fmt: skip


def group_norm(p, x, groups):
    grouped = x.reshape(*x.shape[:3], groups, -1)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    var = jnp.square(grouped - mean).mean((1, 2, 4), keepdims=True)
    return ((grouped - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape) * p["w"] + p["b"]


def block(p, x, groups):
    stride = 2 if "short" in p else 1
    y = conv(x, p["conv1"]["w"], stride, 1)
    y = jax.nn.relu(group_norm(p["norm1"], y, groups))
    y = group_norm(p["norm2"], conv(y, p["conv2"]["w"], 1, 1), groups)
    if "short" in p:
        x = conv(x, p["short"]["w"], stride)
    return jax.nn.relu(x + y)


def resnet(params, batch, model):
    groups = model["groups"]
    x = conv(pixels(batch), params["conv"]["w"], 1, 1)
    x = jax.nn.relu(group_norm(params["norm"], x, groups))
    for i in range(len(params["blocks"])):
        x = block(params["blocks"][str(i)], x, groups)
    return cross_entropy(dense(params["dense"], x.mean((1, 2))), batch["label"])


# LEAF's LSTM for Shakespeare: reads 80 characters, predicts the next


def lstm_init(key, model):
    E, H, V = model["embedding"], model["hidden"], model["vocabulary"]
    k = iter(jax.random.split(key, 2 + 4 * model["layers"]))
    lstm = {}
    for i in range(model["layers"]):
        lstm |= {
            f"w_ih_l{i}": uniform(next(k), (H if i else E, 4 * H), H),
            f"w_hh_l{i}": uniform(next(k), (H, 4 * H), H),
            f"b_ih_l{i}": uniform(next(k), (4 * H,), H),
            f"b_hh_l{i}": uniform(next(k), (4 * H,), H),
        }
    embedding = 0.1 * jax.random.normal(next(k), (V, E))
    return {"embedding": embedding, "lstm": lstm, "dense": dense_init(next(k), H, V)}


def lstm_layer(x, w, u, b, b_u):
    """x: [time, batch, inputs]."""
    inputs = x @ w + b

    def step(state, x):
        h, c = state
        i, f, g, o = jnp.split(x + (h @ u + b_u), 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[1], u.shape[0]), x.dtype)
    return lax.scan(step, (zeros, zeros), inputs)[1]


def lstm(params, batch, model):
    ids = batch["text"].T.astype(jnp.int32)
    x, p = params["embedding"][ids[:-1]], params["lstm"]
    for i in range(model["layers"]):
        names = ("w_ih", "w_hh", "b_ih", "b_hh")
        x = lstm_layer(x, *(p[f"{n}_l{i}"] for n in names))
    return cross_entropy(dense(params["dense"], x[-1]), ids[-1])


# A small GPT: layer norms first, learned positions


def gpt_init(key, model):
    W, V = model["width"], model["vocabulary"]
    k = iter(jax.random.split(key, 3 + 4 * model["layers"]))

    def layer():
        return {
            "norm1": norm_init(W), "qkv": dense_init(next(k), W, 3 * W),
            "out": dense_init(next(k), W, W), "norm2": norm_init(W),
            "up": dense_init(next(k), W, 4 * W), "down": dense_init(next(k), 4 * W, W),
        }  # fmt: skip

    return {
        "tokens": 0.1 * jax.random.normal(next(k), (V, W)),
        "places": 0.1 * jax.random.normal(next(k), (model["length"], W)),
        "head": dense_init(next(k), W, V), "norm": norm_init(W),
        "blocks": {str(i): layer() for i in range(model["layers"])},
    }  # fmt: skip


def layer_norm(p, x):
    mean = x.mean(-1, keepdims=True)
    var = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * p["w"] + p["b"]


def attention(p, x, heads):
    B, T, W = x.shape
    qkv = dense(p["qkv"], x).reshape(B, T, 3, heads, W // heads)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (W // heads) ** -0.5
    past = jnp.tril(jnp.ones((T, T), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf), -1)
    return dense(p["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, T, W))


def gpt(params, batch, model):
    ids = batch["text"].astype(jnp.int32)
    x = params["tokens"][ids[:, :-1]] + params["places"]
    for i in range(model["layers"]):
        p = params["blocks"][str(i)]
        x = x + attention(p, layer_norm(p["norm1"], x), model["heads"])
        x = x + dense(p["down"], jax.nn.gelu(dense(p["up"], layer_norm(p["norm2"], x))))
    z = dense(params["head"], layer_norm(params["norm"], x))
    return cross_entropy(z, ids[:, 1:]).mean(-1)


# Matrix factorization: ratings from a user's and an item's factors and biases


def factors_init(key, model):
    users, items = jax.random.split(key)
    return {
        "users": 0.3 * jax.random.normal(users, (model["users"], model["width"])),
        "items": 0.3 * jax.random.normal(items, (model["items"], model["width"])),
        "user_bias": jnp.zeros((model["users"], 1)), "item_bias": jnp.zeros((model["items"], 1)),
    }  # fmt: skip


def factors(params, batch, model):
    user, item = batch["user"], batch["item"]
    guess = jnp.sum(params["users"][user] * params["items"][item], -1)
    guess += params["user_bias"][user][:, 0] + params["item_bias"][item][:, 0]
    return jnp.square(guess + 3 - batch["rating"])


LOSSES = {
    "logistic": logistic, "mlp": mlp, "cnn": cnn, "resnet": resnet, "lstm": lstm, "gpt": gpt,
    "factors": factors,
}  # fmt: skip
INITS = {
    "logistic": logistic_init, "mlp": mlp_init, "cnn": cnn_init, "resnet": resnet_init,
    "lstm": lstm_init, "gpt": gpt_init, "factors": factors_init,
}  # fmt: skip

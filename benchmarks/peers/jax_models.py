"""The losses in straightforward JAX, for fedjax and the bare loops.

Each returns one loss per example of a batch. They work with old and new versions of JAX.
"""

import jax
import jax.numpy as jnp

from benchmarks.zoo import in_jax


def smile(params, batch, model):
    pixels = batch["image"].reshape(len(batch["image"]), -1).astype(jnp.float32) * (1 / 255)
    hidden = jax.nn.relu(pixels @ params["hidden"]["w"] + params["hidden"]["b"])
    z = (hidden @ params["logit"]["w"] + params["logit"]["b"])[:, 0]
    return jnp.logaddexp(0.0, z) - batch["smiling"] * z


def unit(vectors):
    return vectors * jax.lax.rsqrt(jnp.sum(vectors**2, axis=-1, keepdims=True) + 1e-12)


def movie(params, batch, model):
    context = params["movies"][batch["context"]]
    length = batch["length"].astype(jnp.int32)
    counts = jnp.arange(context.shape[1]) < length[:, None]
    total = jnp.sum(jnp.where(counts[..., None], context, 0), axis=1)
    mean = total / jnp.maximum(length, 1)[:, None]
    left = unit(jax.nn.relu(mean @ params["context"]["w"] + params["context"]["b"]))
    cosine = jnp.sum(left * unit(params["movies"][batch["movie"]]), axis=-1)
    return jnp.maximum(model["margin"] - cosine, 0) ** 2


def text(params, batch, model):
    """A GRU like Keras' (reset_after). Inputs are multiplied by their weights before the scan."""
    ids = batch["text"].T.astype(jnp.int32)  # [time, batch]
    gru = params["gru"]
    inputs = params["embedding"][ids[:-1]] @ gru["w"] + gru["b"]

    def step(h, x):
        x_z, x_r, x_h = jnp.split(x, 3, -1)
        a_z, a_r, a_h = jnp.split(h @ gru["u"] + gru["b_u"], 3, -1)
        z, r = jax.nn.sigmoid(x_z + a_z), jax.nn.sigmoid(x_r + a_r)
        h = z * h + (1 - z) * jnp.tanh(x_h + r * a_h)
        return h, h

    start = jnp.zeros((ids.shape[1], gru["u"].shape[0]))
    _, h = jax.lax.scan(step, start, inputs)
    z = h @ params["dense"]["w"] + params["dense"]["b"]
    right = jnp.take_along_axis(z, ids[1:, :, None], -1)[..., 0]
    return (jax.nn.logsumexp(z, -1) - right).mean(0)


LOSSES = {"smile": smile, "movie": movie, "text": text, **in_jax.LOSSES}

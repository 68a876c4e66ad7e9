"""PyTorch's recurrent layers as loops in JAX.

torchax writes out every step of a sequence: an LSTM over 80 characters became a program that took
minutes to compile. Here one step is compiled, and loops.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch


def _lstm(z, c):
    i, f, g, o = jnp.split(z, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _cell(kind: str) -> Callable:
    """From the input's part of the gates, the state and its weights to the next state."""
    if kind == "lstm":
        return lambda x, state, w, b: _lstm(x + (state[0] @ w + b), state[1])
    if kind == "gru":

        def gru(x, state, w, b):
            (h,) = state
            (xr, xz, xn), (hr, hz, hn) = (jnp.split(a, 3, -1) for a in (x, h @ w + b))
            r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
            return ((1 - z) * jnp.tanh(xn + r * hn) + z * h,)

        return gru
    bend = jnp.tanh if kind == "rnn_tanh" else jax.nn.relu
    return lambda x, state, w, b: (bend(x + (state[0] @ w + b)),)


def layer(kind: str, x, start, weights, reverse: bool):
    """x [time, batch, inputs]; start: the state before the first step. -> h of all steps, the last
    state."""
    w_x, w_h, *biases = weights
    b_x, b_h = biases or (jnp.zeros((), x.dtype), jnp.zeros((), x.dtype))
    inputs, w, cell = x @ w_x.T + b_x, w_h.T, _cell(kind)

    def step(state, x):
        state = cell(x, state, w, b_h)
        return state, state[0]

    last, h = jax.lax.scan(step, tuple(start), inputs, reverse=reverse)
    return h, last


def recurrent(kind: str, x, start, weights, biased, layers, bidirectional, batch_first):
    """torch.lstm and its like, without dropout. `start` has h (and c) of all layers."""
    directions, each = 1 + bidirectional, 4 if biased else 2
    flat = x.ndim == 2  # one sequence without a batch
    x = x[:, None] if flat else jnp.swapaxes(x, 0, 1) if batch_first else x
    start = [s[:, None] if flat else s for s in start]
    ends = []
    for i in range(layers):
        passes = []
        for d in range(directions):
            at = i * directions + d
            h, last = layer(
                kind, x, [s[at] for s in start], weights[at * each : (at + 1) * each], d == 1
            )
            passes.append(h)
            ends.append(last)
        x = jnp.concatenate(passes, -1)
    last = [jnp.stack(of_all) for of_all in zip(*ends, strict=True)]
    x = x[:, 0] if flat else jnp.swapaxes(x, 0, 1) if batch_first else x
    return (x, *(s[:, 0] if flat else s for s in last))


KINDS = {getattr(torch, kind): kind for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


def replacement(func: Any, args: tuple, kwargs: dict | None) -> Callable | None:
    """A function of `args` as JAX arrays; None if PyTorch must do it itself."""
    try:
        kind = KINDS.get(func)
    except TypeError:
        return None
    if kind is None or kwargs or len(args) != 9:
        return None
    _, _, weights, biased, layers, dropout, training, bidirectional, _ = args
    if isinstance(weights, torch.Tensor) or not isinstance(biased, bool):
        return None  # sequences of different lengths, packed
    each = (4 if biased else 2) * layers * (1 + bidirectional)
    if len(weights) != each or (dropout and training):
        return None  # an LSTM with projections; random numbers

    def function(x, start, weights, *rest):
        start = start if kind == "lstm" else [start]
        return recurrent(kind, x, start, weights, biased, layers, bidirectional, rest[-1])

    return function

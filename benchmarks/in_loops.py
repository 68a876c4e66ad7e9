"""Operators inside a compiled loop and outside of one: the time of a gradient, in a `lax.scan` of
five steps over that of five steps written out.

    python -m benchmarks.in_loops [--only conv]

A ratio near 1 means that the operator may stand in a compiled round. `mixfl/engine/loops.py` lists
those (KNOWN); any other is timed before a run. mixfl computes convolutions as products.
"""

import time

import click
import jax
import jax.numpy as jnp
import numpy as np

from mixfl.cli import print_table
from mixfl.forms.products import InProducts, found_in

STEPS, TRIALS = 5, 5


def conv(shape, kernel, layout, padding="SAME", **more):
    def loss(w, x):
        y = jax.lax.conv_general_dilated(
            x, w, (1,) * (len(shape) - 2), padding, dimension_numbers=layout, **more
        )
        return jnp.sum(jnp.square(y))

    return loss, kernel, shape


def scan_of(cell, h):
    def loss(w, x):
        last, _ = jax.lax.scan(lambda c, x_t: (cell(w, c, x_t), None), jnp.zeros((20, h)), x)
        return jnp.sum(last)

    return loss


def attention(w, x):
    q, k, v = jnp.split(x @ w, 3, -1)
    return jnp.sum(jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v)


HWIO = ("NHWC", "HWIO", "NHWC")
CASES = {  # name: loss(w, x), shape of w, shape of x
    "convolution 3x3": conv((20, 24, 24, 32), (3, 3, 32, 32), HWIO),
    "convolution 1-D": conv((20, 256, 32), (3, 32, 32), ("NHC", "HIO", "NHC")),
    "depthwise": conv((20, 24, 24, 32), (3, 3, 1, 32), HWIO, feature_group_count=32),
    "transposed": conv((20, 12, 12, 32), (3, 3, 32, 32), HWIO, [(1, 1)] * 2, lhs_dilation=(2, 2)),
    "dense": (lambda w, x: jnp.sum(jnp.tanh(x @ w)), (512, 512), (64, 512)),
    "recurrent": (scan_of(lambda w, c, x: jnp.tanh((c + x) @ w), 128), (128, 128), (50, 20, 128)),
    "attention": (attention, (64, 192), (20, 64, 64)),
    "pooling": (
        lambda w, x: jnp.sum(
            jax.lax.reduce_window(x * w, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        ), (32,), (20, 24, 24, 32),
    ),
    "sort": (lambda w, x: jnp.sum(jnp.sort(x * w) ** 2), (512,), (256, 512)),
    "top k": (lambda w, x: jnp.sum(jax.lax.top_k(x * w, 8)[0]), (512,), (256, 512)),
    "cumulative sum": (lambda w, x: jnp.sum(jnp.cumsum(x * w, 1) ** 2), (512,), (256, 512)),
    "segment sum": (
        lambda w, x: jnp.sum(jax.ops.segment_sum(x * w, jnp.arange(256) % 7, 8) ** 2),
        (512,), (256, 512),
    ),
    "lookup": (lambda w, x: jnp.sum(w[jnp.arange(4096) % 1000] ** 2), (1000, 64), (1,)),
    "FFT": (lambda w, x: jnp.sum(jnp.abs(jnp.fft.rfft(x * w)) ** 2), (512,), (256, 512)),
    "Cholesky": (
        lambda w, x: jnp.sum(jnp.linalg.cholesky(x @ x.T + 64 * jnp.eye(64) + w @ w.T)),
        (64, 64), (64, 64),
    ),
}  # fmt: skip


def ratio(loss, w_shape, x_shape) -> tuple[float, float]:
    """Milliseconds of five steps written out, and how many times as long they take in a loop."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=w_shape) / 10, jnp.float32)
    xs = jnp.asarray(rng.normal(size=(STEPS, *x_shape)), jnp.float32)

    def step(w, x):
        return w - 1e-3 * jax.grad(loss)(w, x)

    def written_out(w, xs):
        for x in xs:
            w = step(w, x)
        return w

    def loop(w, xs):
        return jax.lax.scan(lambda w, x: (step(w, x), None), w, xs)[0]

    programs = [jax.jit(written_out), jax.jit(loop)]
    taken: list[list[float]] = [[], []]
    for _ in range(TRIALS + 1):
        for program, times in zip(programs, taken, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(program(w, xs))
            times.append(time.perf_counter() - begin)
    alone, inside = (float(np.median(times[1:])) for times in taken)  # the first compiles
    return 1000 * alone, inside / alone


@click.command()
@click.option("--only", default="", help="Only cases whose name has this text.")
def main(only: str) -> None:
    rows = []
    for name, (loss, w, x) in CASES.items():
        if only not in name:
            continue
        alone, times = ratio(loss, w, x)
        products = ""
        if any(found_in(loss, jnp.zeros(w), jnp.zeros(x))[:2]):
            own, own_times = ratio(InProducts(loss), w, x)
            products = f"{own * own_times / alone:.2f}"
        rows.append([name, f"{alone:.1f}", f"{times:.2f}", products])
    print_table(["operator", "5 steps, ms", "in a loop", "in mixfl's form, in a loop"], rows)


if __name__ == "__main__":
    main()

"""A user's own file, for test_distributed.py: clients of unequal size, and an embedding
table of which a client has only some rows. Its evaluation can end another process."""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np

import mixfl

ROWS, WIDTH = 300, 4
SIZES = (1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 11, 13)  # examples of each client


def loss(params, batch):
    z = (params["table"][batch["word"]].mean(1) * batch["x"]) @ params["w"] + params["b"]
    return jnp.logaddexp(0.0, z) - batch["y"] * z


def init(key):
    one, two = jax.random.split(key)
    return {
        "table": jax.random.normal(one, (ROWS, WIDTH)),
        "w": jax.random.normal(two, (WIDTH,)),
        "b": jnp.zeros(()),
    }


def examples(seed, n):
    rng = np.random.default_rng(seed)
    x = rng.normal(0.5, 1.0, (n, WIDTH))
    word = rng.integers(0, ROWS, (n, 5))
    return {"x": x, "word": word, "y": (x.sum(1) > word[:, 0] / 150).astype(float)}


clients = mixfl.ClientData.from_arrays(
    examples(1, sum(SIZES)), client=np.repeat(np.arange(len(SIZES)), SIZES)
)
test = {name: jnp.asarray(a, jnp.float32) for name, a in examples(3, 100).items()}
test["word"] = test["word"].astype(int)


calls = itertools.count()


def evaluate(params):
    """SIGNAL="pid,number,n" sends that signal to that process in the n-th evaluation."""
    pid, number, n = map(int, os.environ.get("SIGNAL", "0,0,-1").split(","))
    if next(calls) == n:
        os.kill(pid, number)
    return {"loss": jnp.mean(loss(params, test))}


# The cohort of 5 does not fill the devices evenly, and is fed in two pieces.
problem = mixfl.Problem(
    init,
    [
        mixfl.Federated(loss, clients, weight=0.6, rows={"table": "word"}),
        mixfl.Central(loss, examples(2, 41), weight=0.4),
    ],
    evaluate,
    dict(
        rounds=6, cohort_size=5, cohort_chunk=3, client_batch=3, local_steps=2, client_lr=0.2,
        central_batch=13, central_chunk=8, eval_every=2, checkpoint_every=2,
    ),
)  # fmt: skip

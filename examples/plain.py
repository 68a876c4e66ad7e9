"""Trains a model in plain JAX: a dict of arrays, and a function of them.

There are three kinds of points. The 60 clients have only points of the first two kinds; the
datacenter has the third. Federated learning alone never learns it; mixed federated learning does.

    python examples/plain.py
    mixfl run examples/plain.py:problem --algorithm 2wgt
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mixfl

rng = np.random.default_rng(0)
centers = rng.normal(0, 1.2, (3, 8))  # [kinds, features]
shifts = rng.normal(0, 0.5, (60, 8))  # no client's points look quite like another's


def points(kind, shift=0.0):
    return {"x": centers[kind] + shift + rng.normal(0, 1, (len(kind), 8)), "y": kind}


owner = rng.integers(60, size=1800)
clients = mixfl.ClientData.from_arrays(points(rng.integers(2, size=1800), shifts[owner]), owner)
datacenter = points(np.full(600, 2))
test = points(rng.integers(3, size=1500))


def init(key):
    first, second = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": {"w": glorot(first, (8, 16)), "b": jnp.zeros(16)},
        "out": {"w": glorot(second, (16, 3)), "b": jnp.zeros(3)},
    }


def logits(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss(params, batch):  # one number per example
    z = logits(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z, batch["y"])


@jax.jit
def evaluate(params):
    right = logits(params, test["x"]).argmax(1) == test["y"]
    return {"loss": loss(params, test).mean(), "accuracy": right.mean()}


terms = [mixfl.Federated(loss, clients, 2 / 3), mixfl.Central(loss, datacenter, 1 / 3)]
problem = mixfl.Problem(init, terms, evaluate, settings={"rounds": 60, "local_steps": 3})

if __name__ == "__main__":
    for algorithm in ("fedavg", "2wgt"):
        result = mixfl.train(problem, algorithm)
        print(f"{algorithm}: accuracy {result.metrics[-1]['eval/accuracy']:.3f}")

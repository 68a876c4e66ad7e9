"""A problem with two row-sparse tables, trained with and without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator

N = 60  # rows of the table
DIM = 4
ROUNDS = 20
SETTINGS = dict(
    rounds=ROUNDS, cohort_size=4, client_batch=2, local_steps=5, client_lr=0.3, devices=1,
    central_steps=3, central_batch=8,
)  # fmt: skip


def init(key):
    a, b = jax.random.split(key)
    return {
        "towers": {"items": jax.random.normal(a, (N, DIM)), "bias": jnp.zeros((N,))},
        "dense": 0.5 * jax.random.normal(b, (DIM, DIM)),
    }


def loss(params, batch):
    """The next item should look like the mean of the items before."""
    towers = params["towers"]
    seen = jnp.tanh(towers["items"][batch["seen"]].mean(1) @ params["dense"])
    score = jnp.sum(seen * towers["items"][batch["next"]], 1) + towers["bias"][batch["next"]]
    return jnp.logaddexp(0.0, -score)


def penalty(params):
    towers = params["towers"]
    return jnp.mean(jnp.cos(towers["items"]) + towers["items"] ** 2) + jnp.sum(towers["bias"] ** 2)


def data(seed, n):
    rng = np.random.default_rng(seed)
    return {"seen": rng.integers(0, N, (n, 2)), "next": rng.integers(0, N, n)}


ROWS = {"towers/items": ("seen", "next"), "towers/bias": "next"}


def population(seed=0, name="federated", rows=ROWS, weight=0.6):
    sizes = (1, 2, 5, 9, 12, 3)  # 1 to 5 steps, the last batch often short
    clients = mixfl.ClientData.from_arrays(
        data(seed, sum(sizes)), client=np.repeat(np.arange(len(sizes)), sizes)
    )
    return mixfl.Federated(loss, clients, weight, name, rows=rows)


PROBLEMS = {
    "regularizer": lambda: [population(), mixfl.Central(penalty, weight=0.5)],
    "central data": lambda: [population(), mixfl.Central(loss, data(7, 30), weight=0.4)],
    "two populations, one of them dense": lambda: [
        population(), mixfl.Central(penalty, weight=0.5), population(3, "other", {}, 0.3)
    ],
}  # fmt: skip


def simulator(algorithm, terms="regularizer", **changes) -> Simulator:
    s = mixfl.Settings(**(SETTINGS | changes))
    problem = mixfl.Problem(init, PROBLEMS[terms]())
    return Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)


@functools.cache
def trained(algorithm, terms="regularizer", **changes):
    sim = simulator(algorithm, terms, **changes)
    *_, result = sim.rounds(sim.init(), 0, ROUNDS)
    return sim, jax.tree.map(np.array, result.state), jax.tree.map(np.array, result.info)


def assert_equal(actual, expected, rtol=1e-5):
    """To `rtol` of each array's size."""
    for path, e in jax.tree_util.tree_leaves_with_path(expected):
        (f,) = [leaf for p, leaf in jax.tree_util.tree_leaves_with_path(actual) if p == path]
        np.testing.assert_allclose(f, e, rtol=rtol, atol=rtol * np.abs(e).max(), err_msg=str(path))

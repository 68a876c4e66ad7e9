"""A user's own file, for `mixfl run tiny_problem.py:problem`: small enough to kill often."""

import jax
import jax.numpy as jnp
import numpy as np

import mixfl

FEATURES = 4
SIZES = (1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 11, 13)  # examples of each client


def loss(params, batch):
    z = batch["x"] @ params["w"] + params["b"]
    return jnp.logaddexp(0.0, z) - batch["y"] * z


def penalty(params):
    return 0.1 * jnp.sum((params["w"] - 1.0) ** 2)


def init(key):
    return {"w": 0.1 * jax.random.normal(key, (FEATURES,)), "b": jnp.zeros(())}


def examples(seed, n, shift):
    rng = np.random.default_rng(seed)
    x = rng.normal(shift, 1.0, (n, FEATURES))
    return {"x": x, "y": (x.sum(1) + rng.normal(size=n) > 0).astype(float)}


clients = mixfl.ClientData.from_arrays(
    examples(1, sum(SIZES), 0.3), client=np.repeat(np.arange(len(SIZES)), SIZES)
)
test = {name: jnp.asarray(a, jnp.float32) for name, a in examples(3, 100, 0.0).items()}


def evaluate(params):
    return {"loss": jnp.mean(loss(params, test))}


federated = mixfl.Federated(loss, clients, weight=0.6)
settings = dict(
    rounds=12, cohort_size=5, client_batch=3, local_steps=2, client_lr=0.2, eval_every=1,
    checkpoint_every=2,
)  # fmt: skip

problem = mixfl.Problem(
    init, [federated, mixfl.Central(loss, examples(2, 40, -0.5), weight=0.4)], evaluate, settings
)
# For `baseline`, whose central terms have no data.
regularized = mixfl.Problem(init, [federated, mixfl.Central(penalty)], evaluate, settings)

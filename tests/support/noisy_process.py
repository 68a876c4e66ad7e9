"""A program for test_distributed.py: one of several processes that make private runs of a model
that has nothing to learn, so that its table is the noise. Each process saves its tables."""

import jax.numpy as jnp
import numpy as np

import mixfl
from mixfl.engine import processes

SHAPE, NOISE, CLIP, COHORT = (2000, 8), 1.5, 0.2, 6
KEYS = dict(rounds=1, cohort_size=COHORT, client_batch=4, local_steps=2, client_lr=0.1, devices=2)


def loss(params, batch):
    return 0.0 * params["table"][batch["row"]].sum(-1) + batch["y"]


def problem():
    rng = np.random.default_rng(0)
    data = {"row": rng.integers(0, 50, 48).astype(np.int32), "y": np.zeros(48, np.float32)}
    people = mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(6), 8))
    init = lambda key: {"table": jnp.zeros(SHAPE)}  # noqa: E731
    return mixfl.Problem(init, [mixfl.Federated(loss, people, rows={"table": "row"})])


def table(seed):
    dp = mixfl.DP(noise_multiplier=NOISE, clip=CLIP, delta=1e-3, sampling="none", seed=seed)
    return np.asarray(
        mixfl.train(problem(), "fedavg", dp=dp, progress=False, **KEYS).params["table"]
    )


if __name__ == "__main__":
    processes.start()
    np.savez("tables.npz", seeded=table(3), secret=table(None), again=table(None))

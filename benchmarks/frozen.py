"""The memory that a frozen base costs: python -m benchmarks.frozen [MB]

Trains a small head on a base of that size (100 MB) with 2-way Gradient Transfer: the base in a
closure of the loss, and as Problem(frozen=...). Each way has a process of its own. The peak of its
memory is compared with that of a process whose base is small.
"""

import json
import resource
import subprocess
import sys

WIDTH = 256
WAYS = ("nothing", "closure", "frozen")


def peak(way: str, megabytes: int) -> float:
    """MB, in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import mixfl

    rows = (1 if way == "nothing" else megabytes) * (1 << 20) // (4 * WIDTH)
    rng = np.random.default_rng(0)
    base = rng.standard_normal((rows, WIDTH), np.float32)
    ids = rng.integers(rows, size=(400, 8))
    data = {"ids": ids, "y": (ids.sum(1) % 2).astype(np.float32)}
    clients = mixfl.ClientData.from_arrays(
        {k: a[:300] for k, a in data.items()}, client=np.arange(300) % 20
    )

    def loss(params, batch, frozen):
        features = jnp.tanh(frozen[batch["ids"]].mean(1)) + jnp.mean(frozen[:8] @ frozen[8:16].T)
        z = features @ params["w"]
        return jnp.logaddexp(0.0, z) - batch["y"] * z

    given: dict = {"frozen": base}
    used = loss
    if way == "closure":
        constant, given = jnp.asarray(base), {}

        def used(params, batch):
            return loss(params, batch, constant)

    terms = [
        mixfl.Federated(used, clients),
        mixfl.Central(used, {k: a[300:] for k, a in data.items()}),
    ]
    problem = mixfl.Problem(lambda key: {"w": jnp.zeros(WIDTH)}, terms, **given)
    mixfl.train(problem, "2wgt", rounds=3, cohort_size=5, local_steps=2, devices=1)
    jax.effects_barrier()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(megabytes: int) -> dict[str, float]:
    peaks = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.frozen", str(megabytes), way]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks[way] = json.loads(done.stdout.splitlines()[-1])
    for way in WAYS[1:]:
        print(f"{megabytes} MB as {way}: {peaks[way] - peaks['nothing']:.0f} MB more")
    return peaks


if __name__ == "__main__":
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    if len(sys.argv) > 2:
        print(json.dumps(peak(sys.argv[2], size)))
    else:
        main(size)

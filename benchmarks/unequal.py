"""Measures what one large client costs the others.

    python -m benchmarks.unequal [--trials N] [--quick]

A network with two hidden layers of 128 units, 100 clients of 20 rows, with and without one of 4,000
rows; |B_i|=10, S=20, FedAvg. The large client takes part in a fifth of the rounds. All variants are
in one process and take turns. `one size` pads all clients to the largest; their
steps still end before the padding.
"""

import json
import time
from pathlib import Path

import click
import numpy as np

import mixfl
from mixfl.cli import print_table

RESULTS = Path(__file__).parent / "unequal.json"
INPUTS, UNITS, ROUNDS = 128, 128, 40
SMALL, LARGE = [20] * 100, 4000


def problem(sizes: list[int]) -> mixfl.Problem:
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(sum(sizes), INPUTS)).astype(np.float32),
        "y": rng.integers(0, 2, sum(sizes)).astype(np.float32),
    }
    clients = mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(len(sizes)), sizes))

    def init(key):
        shapes = ((INPUTS, UNITS), (UNITS, UNITS), (UNITS,))
        keys = jax.random.split(key, len(shapes))
        return [0.1 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]

    def loss(p, batch):
        z = jnp.tanh(jnp.tanh(batch["x"] @ p[0]) @ p[1]) @ p[2]
        return jnp.logaddexp(0.0, z) - batch["y"] * z

    return mixfl.Problem(init, [mixfl.Federated(loss, clients)])


def simulator(sizes: list[int], K: int, most: int):
    from mixfl.algorithms import ALGORITHMS
    from mixfl.engine import Simulator
    from mixfl.engine import sizes as module

    p, several = problem(sizes), module.MOST
    s = mixfl.Settings(cohort_size=20, client_batch=10, local_steps=K, devices=1)
    module.MOST = most
    try:
        return Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
    finally:
        module.MOST = several


def run(engine) -> float:
    """Milliseconds per round."""
    import jax

    state, begun = engine.init(), time.perf_counter()
    for result in engine.rounds(state, 0, ROUNDS):
        state = result.state
    jax.block_until_ready(state)
    return 1000 * (time.perf_counter() - begun) / ROUNDS


@click.command()
@click.option("--trials", default=5, show_default=True)
@click.option("--quick", is_flag=True, help="One trial of the smaller case.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Where to write.")
def main(trials: int, quick: bool, out: Path) -> None:
    mixfl.prepare_process()
    from mixfl.engine.sizes import MOST

    rows = []
    for K in (50,) if quick else (50, LARGE // 10):
        variants = {
            "without": simulator(SMALL, K, MOST),
            "several_sizes": simulator([*SMALL, LARGE], K, MOST),
            "one_size": simulator([*SMALL, LARGE], K, 1),
        }
        for engine in variants.values():
            run(engine)  # compiles
        times = [[run(e) for e in variants.values()] for _ in range(1 if quick else trials)]
        rows.append({"K": K, **dict(zip(variants, np.median(times, axis=0).round(2), strict=True))})
    names = ("without", "several_sizes", "one_size")
    print_table(
        ["K", "without", "with", "ratio", "one size", "ratio"],
        [[str(r["K"]), *(f"{v:.3g}" for v in (
            r[names[0]], r[names[1]], r[names[1]] / r[names[0]], r[names[2]],
            r[names[2]] / r[names[0]]))] for r in rows],
        title="ms per round, 100 clients of 20 rows, without and with one of 4,000",
    )  # fmt: skip
    out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measures where a round's time goes: the compiled round, reading, and smile's products.

python -m benchmarks.parts [--tasks smile,movie,text]
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

import mixfl

TRIALS = 9


def medians(calls: dict[str, Callable[[], None]], trials: int = TRIALS) -> dict[str, float]:
    """Milliseconds of each call, measured in turns."""
    import numpy as np

    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(trials):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - begun))
    return {name: float(np.median(times)) for name, times in times.items()}


def round_parts(engine, rounds: int, trials: int = TRIALS) -> dict[str, float]:
    """The parts of a round of an engine of benchmarks.mixfl_worker."""
    import jax

    simulator = engine.simulator
    algorithm = simulator.at(0)
    pieces = list(simulator.feeder.pieces(algorithm, 0))
    state = simulator.program(algorithm).place(simulator.init())

    def compiled():
        nonlocal state
        for _ in range(rounds):
            state, _ = simulator._round(0, state, iter(pieces))
        jax.block_until_ready(state)

    def reading():
        for t in range(rounds):
            list(simulator.feeder.pieces(algorithm, t))

    calls = {
        "the whole loop": lambda: engine.run(rounds),
        "the compiled round alone": compiled,
        "reading alone": reading,
    }
    return {name: ms / rounds for name, ms in medians(calls, trials).items()}


def task_parts(task: str) -> dict[str, float]:
    from benchmarks import workloads
    from benchmarks.mixfl_worker import Engine

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "workload"
        workloads.write(workloads.SIZES[task], folder, rounds=1)
        engine = Engine("fedavg")
        engine.init(folder)
        return round_parts(engine, {"smile": 5, "movie": 20, "text": 1}[task])


def products() -> dict[str, float]:
    """The products of smile's low-rank first layer, at the paper's settings."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from mixfl.forms.low_rank import gram

    rng = np.random.default_rng(0)
    S, K, B, D, H = 100, 2, 5, 84 * 84 * 3, 64
    images = jnp.asarray(rng.integers(0, 256, (S * K * B, D), dtype=np.uint8))
    w = jnp.asarray(rng.normal(size=(D, H)), jnp.float32)
    c = jnp.asarray(rng.normal(size=(S * K * B, H)), jnp.float32)
    x = jax.jit(lambda u: u.astype(jnp.float32) / 255)(images)
    parts = {
        "images to numbers, X W": (
            lambda u, w: (u.astype(jnp.float32) / 255) @ w, images, w
        ),
        "products of a client's steps": (lambda x: gram(x, S, K), x),
        "X'C": (lambda c, x: c.T @ x, c, x),
    }  # fmt: skip
    calls = {}
    for name, (function, *arguments) in parts.items():
        compiled = jax.jit(function)
        calls[name] = lambda f=compiled, a=arguments: jax.block_until_ready(f(*a))
    return medians(calls)


@click.command()
@click.option("--tasks", default="smile,movie,text", show_default=True)
def main(tasks: str):
    mixfl.prepare_process()  # as the command line does
    from mixfl.cli import print_table

    for task in tasks.split(","):
        parts = task_parts(task) | (products() if task == "smile" else {})
        print_table([task, "ms"], [[name, f"{ms:.3g}"] for name, ms in parts.items()])


if __name__ == "__main__":
    main()

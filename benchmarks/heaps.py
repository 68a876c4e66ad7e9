"""What threads with heaps of their own change: the first round with nothing compiled, and later
rounds.

    python -m benchmarks.heaps [--models smile,mlp,gpt] [--trials N]

Every start is a process of its own with an empty cache of compiled programs. "One" is one heap for
all threads; "own" is a heap for each, with programs that run in a thread of JAX; "chosen" is what
`mixfl.prepare_process` sets up: a heap for each, and programs on one device run in the main thread.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from benchmarks import workloads
from benchmarks.zoo.models import MODELS
from mixfl.cli import print_table

WAYS = ("one", "own", "chosen")
SECONDS = 2.0  # of rounds


def started(way: str, folder: str, cache: str) -> dict[str, float]:
    """In a process of its own."""
    import jax

    import mixfl
    from mixfl.process import memory

    if way == "one":
        memory.ARENAS = 1
    mixfl.prepare_process()
    if way != "chosen":
        jax.config.update("jax_cpu_enable_async_dispatch", True)
    jax.config.update("jax_compilation_cache_dir", cache)
    from benchmarks.mixfl_worker import Engine

    engine, begun = Engine(), time.perf_counter()
    engine.init(folder)
    engine.run(1)
    start = time.perf_counter() - begun
    times: list[float] = []
    while sum(times) < SECONDS:
        begun = time.perf_counter()
        engine.run(3)
        times.append(time.perf_counter() - begun)
    return {"start": start, "ms": 1000 * float(np.median(times)) / 3}


def measured(way: str, folder: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.heaps", "--child", way, folder, cache]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


@click.command()
@click.option("--models", default="smile,mlp,gpt", show_default=True)
@click.option("--trials", default=3, show_default=True)
@click.option("--child", nargs=3, hidden=True)
def main(models: str, trials: int, child: tuple[str, str, str] | None) -> None:
    if child:
        print(json.dumps(started(*child)))
        return
    known = {**workloads.SIZES, **{name: model.size for name, model in MODELS.items()}}
    rows = []
    for name in models.split(","):
        if name not in known:
            raise click.UsageError(f"no model '{name}'; there are {', '.join(known)}.")
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / name
            workloads.write(known[name], folder)
            found = [{way: measured(way, str(folder)) for way in WAYS} for _ in range(trials)]
        for what, unit in (("start", "s"), ("ms", "ms")):
            medians = [float(np.median([f[way][what] for f in found])) for way in WAYS]
            label = "first round" if what == "start" else "later rounds"
            rows.append([name, f"{label}, {unit}", *(f"{m:.3g}" for m in medians)])
    print_table(["", "", *WAYS], rows, title="With nothing compiled before, by the threads' heaps")


if __name__ == "__main__":
    main()

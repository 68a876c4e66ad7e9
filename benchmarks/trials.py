"""Compares ways in which several trials can share the cores: a process per core, one trial after
another on all cores, or all trials compiled into one program.

    python -m benchmarks.trials [--turns N] [--quick]

There are as many trials as cores. The ways take turns; a turn is about two seconds of rounds.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

import click
import numpy as np

from benchmarks.engines import Worker, module
from mixfl.cli import print_table

RESULTS = Path(__file__).parent / "trials.json"
TASKS = ("smile", "text", "movie")
WAYS = {
    "processes": "a process per core",
    "turns": "one after the other",
    "devices": "one program, a core each",
    "vmap": "one program, vmap",
}


class Way:
    def __init__(self, task: str, way: str, cores: int):
        seeds = list(map(str, range(cores)))
        given = [(seed, "alone") for seed in seeds] if way == "processes" else [
            (",".join(seeds), way)
        ]  # fmt: skip
        self.workers = [Worker(module("trials_worker", task, *g)) for g in given]

    def ask(self, do: str, **more) -> float:
        """Sends a request to all workers at once. Returns the seconds until the last answer."""
        failed: list[Exception] = []

        def one(worker):
            try:
                worker.ask(do, **more)
            except Exception as error:
                failed.append(error)

        begun = time.perf_counter()
        threads = [threading.Thread(target=one, args=(w,)) for w in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return time.perf_counter() - begun

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def measure(task: str, cores: int, turns: int, seconds: float) -> dict[str, float]:
    """Milliseconds per round of one trial (medians)."""
    with contextlib.ExitStack() as stack:
        ways, counts = {}, {}
        for way in WAYS:
            ways[way] = Way(task, way, cores)
            stack.callback(ways[way].close)
            ways[way].ask("init", folder="")
            ways[way].ask("run", rounds=2)
            counts[way] = int(np.clip(seconds / (ways[way].ask("run", rounds=4) / 4), 2, 500))
        times = {way: [] for way in WAYS}
        for _ in range(turns):
            for way, n in counts.items():
                times[way].append(1000 * ways[way].ask("run", rounds=n) / n / cores)
        return {way: round(float(np.median(ms)), 2) for way, ms in times.items()}


@click.command()
@click.option("--turns", default=5, show_default=True)
@click.option("--quick", is_flag=True, help="One short turn each.")
def main(turns: int, quick: bool) -> None:
    cores = os.cpu_count() or 1
    turns, seconds = (1, 0.2) if quick else (turns, 2.0)
    rows = [{"task": t, "ms": measure(t, cores, turns, seconds)} for t in TASKS]
    print_table(
        ["task", *WAYS.values()],
        [[str(r["task"]), *(f"{r['ms'][way]:.3g}" for way in WAYS)] for r in rows],
        title=f"ms per round of a trial, {cores} trials on {cores} cores",
    )
    if not quick:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        click.echo(f"Written to {RESULTS}")


if __name__ == "__main__":
    main()

"""Measures what clipping costs: rounds with `clip = quantile` and `clip = off`, in turns.

python -m benchmarks.clipping [--tasks smile,movie,text] [--algorithms fedavg,2wgt] [--trials N]
"""

import tempfile
from functools import partial
from pathlib import Path

import click

import mixfl
from benchmarks.parts import medians

ROUNDS = {"smile": 5, "movie": 20, "text": 1}  # per turn


def measured(task: str, algorithm: str, trials: int) -> dict[str, float]:
    """Milliseconds per round, including reading."""
    from benchmarks import workloads
    from benchmarks.mixfl_worker import Engine

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "workload"
        workloads.write(workloads.SIZES[task], folder, rounds=1)
        engines = {clip: Engine(algorithm, clip=clip) for clip in ("quantile", "off")}
        for engine in engines.values():
            engine.init(folder)
        rounds = ROUNDS[task]
        turns = {clip: partial(engine.run, rounds) for clip, engine in engines.items()}
        return {clip: ms / rounds for clip, ms in medians(turns, trials).items()}


@click.command()
@click.option("--tasks", default="smile,movie,text")
@click.option("--algorithms", default="fedavg,2wgt")
@click.option("--trials", default=9)
def main(tasks: str, algorithms: str, trials: int) -> None:
    mixfl.prepare_process()  # as the command line does
    from mixfl.cli import print_table

    rows = []
    for task in tasks.split(","):
        for algorithm in algorithms.split(","):
            ms = measured(task, algorithm, trials)
            ratio = ms["quantile"] / ms["off"]
            times = [f"{ms[clip]:.1f}" for clip in ("off", "quantile")]
            rows.append([task, algorithm, *times, f"{ratio:.2f}"])
    print_table(["task", "algorithm", "off, ms", "quantile, ms", "ratio"], rows)


if __name__ == "__main__":
    main()

"""Measures what evaluating every 10 rounds costs, as a share of a run's time.

    python -m benchmarks.evaluation [--trials N] [--rounds N] [--presets cpu,demo]

Each trial trains twice, without and with evaluation. The first round compiles and is not counted.
The last evaluation has no round to overlap with. The share of CPU time shows what evaluation
computes; the share of wall-clock time shows what it costs.
"""

import dataclasses
import time

import click
import numpy as np

from mixfl.cli import print_table, start_jax

TASKS = ("smile", "text", "movie")
EVERY = 10


def trial(plan, evaluate: bool) -> np.ndarray:
    """Wall-clock and CPU seconds per round."""
    from mixfl.runs.sinks.terminal import Quiet
    from mixfl.runs.training import run

    class Clock(Quiet):
        begun: np.ndarray | None = None

        def advance(self, done):
            if self.begun is None:
                self.begun = now()

    if not evaluate:
        plan = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, evaluate=None))
    clock = Clock()
    run(plan, None, False, clock)
    return (now() - clock.begun) / (plan.settings.rounds - 1)


def now() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


@click.command()
@click.option("--trials", default=5, show_default=True)
@click.option("--rounds", default=60, show_default=True)
@click.option("--tasks", default=",".join(TASKS), show_default=True)
@click.option("--presets", default="cpu,demo", show_default=True)
@click.option("--algorithm", default="2wgt", show_default=True)
def main(trials: int, rounds: int, tasks: str, presets: str, algorithm: str) -> None:
    start_jax({})
    from mixfl.runs.plan import plan

    cells = []
    for task in tasks.split(","):
        for preset in presets.split(","):
            given = dict(rounds=rounds, eval_every=EVERY, checkpoint_every=rounds + 1)
            planned = plan(task, algorithm, preset=preset, given=given)
            times = np.array(
                [[trial(planned, evaluate) for evaluate in (False, True)] for _ in range(trials)]
            )  # [trials, without and with, wall clock and CPU]
            best, middle = 1000 * times.min(0), 1000 * np.median(times, 0)
            shares = [1 - t[0] / t[1] for t in (middle, best)]
            cells.append([
                task, preset, f"{middle[0, 0]:.1f}", f"{middle[1, 0]:.1f}",
                *(f"{100 * share[i]:.1f} %" for i in range(2) for share in shares),
            ])  # fmt: skip
            click.echo(f"{task} {preset} done", err=True)
    header = ["task", "preset", "ms/round without", "with", "share", "of the best", "CPU share",
              "of the best"]  # fmt: skip
    title = f"{algorithm}, evaluated every {EVERY} rounds; medians and best of {trials} trials"
    print_table(header, cells, title=title)


if __name__ == "__main__":
    main()

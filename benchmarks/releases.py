"""Times rounds of this mixfl beside another checkout of it, on the same data and seeds.

    python -m benchmarks.releases PATH [--tasks smile,movie,text] [--algorithms fedavg,pt,1wgt,2wgt]
                                       [--pairs N] [--trials N] [--set key=value]

PATH is the other checkout. A task may also be a model of the zoo. Both run as processes of their
own and take turns. Processes of the same program differ by some percent, so several pairs are
started; a ratio is the median over pairs. Above 1 it means that this one is slower. On cores with
other work on them, only that of the processor time says something. The models after two rounds are
compared too.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import numpy as np

from benchmarks import workloads
from benchmarks.comparison import known
from benchmarks.engines import ROOT, Worker, module
from benchmarks.zoo.models import MODELS
from mixfl.cli import print_table

SECONDS = 1.5  # of a trial


def compare(pairs: int, *given) -> dict:
    rows = [compare_pair(*given) for _ in range(pairs)]
    median = {
        name: statistics.median(r[name] for r in rows)
        for name in ("here_ms", "there_ms", "ratio", "cpu_ratio", "apart")
    }
    return {"algorithm": rows[0]["algorithm"], **median, "pairs": rows}


def compare_pair(
    algorithm: str, folder: Path, other: Path, trials: int, keys: tuple[str, ...]
) -> dict:
    """One process of each."""
    command = module("mixfl_worker", algorithm, *keys)
    workers = {"here": Worker(command, cwd=ROOT), "there": Worker(command, cwd=other)}
    try:
        models, rounds = {}, {}
        for name, worker in workers.items():
            worker.ask("init", folder=str(folder))
            worker.run(2)
            models[name] = worker.parameters()
            rounds[name] = int(np.clip(round(SECONDS / (worker.run(3) / 3)), 2, 1000))
        count = min(rounds.values())
        ms: dict[str, list[float]] = {name: [] for name in workers}
        cpu: dict[str, list[float]] = {name: [] for name in workers}
        for turn in range(trials):
            order = list(workers.items())
            for name, worker in order if turn % 2 else reversed(order):
                took, used = worker.timed(count)
                ms[name].append(1000 * took / count)
                cpu[name].append(1000 * used / count)
    finally:
        for worker in workers.values():
            worker.close()
    here, there = (statistics.median(ms[name]) for name in ("here", "there"))
    return {
        "algorithm": algorithm, "here_ms": here, "there_ms": there, "ratio": here / there,
        "cpu_ratio": statistics.median(cpu["here"]) / statistics.median(cpu["there"]),
        "apart": apart(models["here"], models["there"]), "trials": ms, "cpu_trials": cpu,
    }  # fmt: skip


def apart(a: dict, b: dict) -> float:
    """The largest difference, in parts of the largest number of each array."""
    return max(float(np.abs(a[k] - b[k]).max() / max(np.abs(b[k]).max(), 1e-30)) for k in {*a, *b})


@click.command()
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tasks", default=",".join(workloads.SIZES), show_default=True)
@click.option("--algorithms", default="fedavg,pt,1wgt,2wgt", show_default=True)
@click.option("--pairs", default=3, show_default=True)
@click.option("--trials", default=5, show_default=True)
@click.option("--set", "keys", multiple=True, help="key=value for both.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    other: Path, tasks: str, algorithms: str, pairs: int, trials: int, keys, out: Path | None
) -> None:
    rows = []
    for task in known(tasks, [*workloads.SIZES, *MODELS]):
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / task
            # By the other one: this one reads older formats.
            code = (
                "from pathlib import Path; from benchmarks import workloads as w; "
                "from benchmarks.zoo.models import MODELS; "
                f"size = w.SIZES.get({task!r}) or MODELS[{task!r}].size; "
                f"w.write(size, Path({str(data)!r}))"
            )
            subprocess.run([sys.executable, "-c", code], cwd=other, check=True)
            for algorithm in algorithms.split(","):
                row = compare(pairs, algorithm, data, other.resolve(), trials, keys)
                rows.append({"task": task, **row})
                print(f"{task} {algorithm}: {row['cpu_ratio']:.3f}", flush=True)
    cells = [
        [r["task"], r["algorithm"], f"{r['here_ms']:.1f}", f"{r['there_ms']:.1f}",
         f"{r['ratio']:.3f}", f"{r['cpu_ratio']:.3f}", f"{r['apart']:.1e}"]
        for r in rows
    ]  # fmt: skip
    header = ["task", "algorithm", "here ms", "there ms", "ratio", "of processor time", "apart"]
    print_table(header, cells)
    if out:
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

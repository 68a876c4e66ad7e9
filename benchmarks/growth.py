"""Measures how mixfl's time and memory grow with S, K, |B_i|, the population and the model.

    python -m benchmarks.growth [--tasks smile,movie,text] [--trials N] [--quick]

One number at a time is multiplied, from a base that is smaller than the paper's settings. Each
point is a separate process that runs FedAvg from a store. The exponent is the slope of a line
through the logarithms: 0 if the number makes no difference, 1 if time is proportional to it. Memory
includes Python and JAX.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from benchmarks import workloads
from benchmarks.engines import OutsideLoad, Worker, module
from mixfl.cli import print_table

RESULTS = Path(__file__).parent / "growth.json"
FACTORS = (1, 2, 4, 8)
PATIENT = 0.05  # share of the cores used by others, above which a trial is repeated
BASES = {
    "smile": replace(
        workloads.SIZES["smile"], S=25, clients=400, per_client=10, central=100,
        model={"side": 28, "hidden": 64},
    ),
    "movie": replace(workloads.SIZES["movie"], S=25, K=4, clients=500, per_client=64),
    "text": replace(
        workloads.SIZES["text"], S=4, K=2, B=4, clients=100, per_client=8, central=100,
        model={"vocabulary": 88, "embedding": 32, "hidden": 32, "length": 50},
    ),
}  # fmt: skip
MODEL = {"smile": "side", "movie": "movies", "text": "hidden"}  # what makes the model larger


def sizes(base: workloads.Size, what: str) -> list[tuple[int, workloads.Size]]:
    """The number that grows, and the workload with it."""
    grown = []
    for factor in FACTORS:
        if what == "S":
            size = replace(base, S=base.S * factor)
        elif what in ("K", "B"):
            more = {what: getattr(base, what) * factor}
            size = replace(base, **more, per_client=base.per_client * factor)
        elif what == "population":
            size = replace(base, clients=base.clients * factor**2)
        else:
            name = MODEL[base.task]
            size = replace(base, model={**base.model, name: base.model[name] * factor})
        number = {"S": size.S, "K": size.K, "B": size.B, "population": size.clients}
        grown.append((number.get(what) or parameters(size), size))
    return grown


def parameters(size: workloads.Size) -> int:
    import jax

    shapes = jax.eval_shape(workloads.model(size)[0], jax.random.key(0))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y against log x, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def point(size: workloads.Size, trials: int, seconds: float) -> tuple[float, float, int]:
    """Milliseconds per round, megabytes, and how many of the trials used were disturbed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "workload"
        workloads.write(size, folder, rounds=1)
        worker = Worker(module("mixfl_worker", "fedavg"))
        try:
            worker.ask("init", folder=str(folder))
            worker.run(1)
            n = int(np.clip(seconds / (worker.run(3) / 3), 3, 2000))
            timed: list[tuple[float, float]] = []
            while len(timed) < 2 * trials:
                with OutsideLoad() as load:
                    took = worker.run(n)
                timed.append((load.share, 1000 * took / n))
                if sum(share <= PATIENT for share, _ in timed) >= trials:
                    break
            kept = sorted(timed)[:trials]
            ms = float(np.median([ms for _, ms in kept]))
            return ms, worker.peak_mb(), sum(share > PATIENT for share, _ in kept)
        finally:
            worker.close()


def grow(task: str, what: str, trials: int, seconds: float) -> dict:
    points = []
    for number, size in sizes(BASES[task], what):
        ms, mb, disturbed = point(size, trials, seconds)
        points.append({"value": number, "ms": round(ms, 3), "peak_mb": round(mb),
                       "disturbed": disturbed})  # fmt: skip
    x = [p["value"] for p in points]
    return {
        "task": task, "against": what, "points": points,
        "time_exponent": round(exponent(x, [p["ms"] for p in points]), 2),
        "memory_exponent": round(exponent(x, [p["peak_mb"] for p in points]), 2),
    }  # fmt: skip


def show(row: dict) -> None:
    cells = [[str(p["value"]), f"{p['ms']:.3g}", str(p["peak_mb"])] for p in row["points"]]
    cells.append(["exponent", f"{row['time_exponent']:.2f}", f"{row['memory_exponent']:.2f}"])
    print_table([row["against"], "ms/round", "peak MB"], cells, title=f"{row['task']}: growth")
    disturbed = sum(p["disturbed"] for p in row["points"])
    if disturbed:
        print(f"{disturbed} trials were disturbed by other processes: don't trust the times")


@click.command()
@click.option("--tasks", default=",".join(BASES), show_default=True)
@click.option("--trials", default=5, show_default=True)
@click.option("--quick", is_flag=True, help="2 short trials, to see that everything works.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Where to write.")
def main(tasks: str, trials: int, quick: bool, out: Path) -> None:
    rows = []
    for task in tasks.split(","):
        if task not in BASES:
            raise click.UsageError(f"'{task}' is unknown; known: {', '.join(BASES)}.")
        for what in ("S", "K", "B", "population", "parameters"):
            rows.append(grow(task, what, 2 if quick else trials, 0.2 if quick else 1.0))
            show(rows[-1])
            out.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"Written to {out}")


if __name__ == "__main__":
    main()

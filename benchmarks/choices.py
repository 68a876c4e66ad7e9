"""Measures what mixfl's automatic settings choose between: one device or all, low-rank or plain.

    python -m benchmarks.choices [--trials N] [--quick]

The two variants of a workload are processes that take turns, one trial each. FedAvg, from a store.
"""

import contextlib
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from benchmarks import workloads
from benchmarks.engines import Worker, module
from benchmarks.zoo.models import MODELS, sized
from mixfl.cli import print_table

RESULTS = Path(__file__).parent / "choices.json"
SMILE = workloads.SIZES["smile"]
SMALL = replace(SMILE, S=50, B=10, model={"side": 28, "hidden": 64})
DEVICES = {
    "smile, 84x84": SMILE,
    "smile, 28x28, S=50, |B_i|=10": SMALL,
    "movie": workloads.SIZES["movie"],
    "text": workloads.SIZES["text"],
    "mlp, 784-200-200-10": MODELS["mlp"].size,
}
STEPS = (2, 8, 16, 32, 64)  # K of 5 examples each, for a layer of 64 units
#        inputs' width, units, K, |B_i|; an MLP with a second layer
WIDTHS = (
    (32, 128, 2, 10), (128, 128, 2, 10), (512, 128, 2, 10), (2048, 128, 2, 10),
    (128, 64, 5, 10), (512, 64, 5, 10), (784, 200, 5, 10), (3072, 64, 5, 10),
)  # fmt: skip


def versus(size: workloads.Size, ways: list[str], trials: int, seconds: float) -> list[float]:
    """Milliseconds per round with each setting (medians)."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name) / "workload"
        workloads.write(size, folder, rounds=1)
        workers = [Worker(module("mixfl_worker", "fedavg", way)) for way in ways]
        counts = []
        for worker in workers:
            stack.callback(worker.close)
            worker.ask("init", folder=str(folder))
            worker.run(1)
            counts.append(int(np.clip(seconds / (worker.run(2) / 2), 2, 500)))
        times = [
            [1000 * w.run(n) / n for w, n in zip(workers, counts, strict=True)]
            for _ in range(trials)
        ]
        return [round(float(ms), 2) for ms in np.median(times, axis=0)]


@click.command()
@click.option("--trials", default=5, show_default=True)
@click.option("--quick", is_flag=True, help="One short trial each.")
def main(trials: int, quick: bool):
    trials, seconds = (1, 0.2) if quick else (trials, 1.0)
    cores = os.cpu_count()
    rows = []
    for name, size in DEVICES.items():
        one, all_ = versus(size, ["devices=1", f"devices={cores}"], trials, seconds)
        rows.append({"what": "devices", "workload": name, "one": one, "all": all_})
    print_table(
        ["", "one", f"{cores}", "ratio"],
        [[r["workload"], f"{r['one']:.3g}", f"{r['all']:.3g}", f"{r['one'] / r['all']:.2f}"]
         for r in rows],
        title="ms per round, by number of devices",
    )  # fmt: skip
    layers = []
    for K in STEPS[:2] if quick else STEPS:
        size = replace(SMILE, S=20, K=K, clients=40, per_client=5 * K, central=100)
        plain, low = versus(size, ["first_layer=plain", "first_layer=low-rank"], trials, seconds)
        layers.append({"what": "first_layer", "inputs": 5 * K, "units": 64, "plain": plain,
                       "low_rank": low})  # fmt: skip
    print_table(
        ["K |B_i|", "plain", "low-rank", "ratio"],
        [[str(r["inputs"]), f"{r['plain']:.3g}", f"{r['low_rank']:.3g}",
          f"{r['plain'] / r['low_rank']:.2f}"] for r in layers],
        title="ms per round of smile (S=20), a first layer of 64 units",
    )  # fmt: skip
    widths = []
    for D, H, K, B in WIDTHS[:2] if quick else WIDTHS:
        size = sized("mlp", S=50, K=K, B=B, lr=0.1, clients=200, image=(D,), classes=10, hidden=H)
        plain, low = versus(size, ["first_layer=plain", "first_layer=low-rank"], trials, seconds)
        widths.append({"what": "width", "width": D, "units": H, "inputs": K * B, "plain": plain,
                       "low_rank": low})  # fmt: skip
    print_table(
        ["width", "units", "K |B_i|", "plain", "low-rank", "ratio"],
        [[str(r["width"]), str(r["units"]), str(r["inputs"]), f"{r['plain']:.3g}",
          f"{r['low_rank']:.3g}", f"{r['plain'] / r['low_rank']:.2f}"] for r in widths],
        title="ms per round of an MLP (S=50), by the width of its inputs",
    )  # fmt: skip
    if not quick:
        RESULTS.write_text(json.dumps([*rows, *layers, *widths], indent=1) + "\n")
        click.echo(f"Written to {RESULTS}")


if __name__ == "__main__":
    main()

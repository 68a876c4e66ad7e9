"""A model larger than the cache: time and memory of a round, beside PyTorch and a prediction.

    python -m benchmarks.large [--trials N] [--devices 1,2]

A GPT with 6 layers of 384. How engines are compared: `benchmarks/comparison.py`. The memory of a
round is the state, and by how much the resident size grows during rounds, measured in the worker
after it has compiled; `mixfl/engine/memory.py` predicts it.
"""

import json
import signal
import sys
import tempfile
from pathlib import Path

import click

from benchmarks import report
from benchmarks.comparison import Runner, Wanted, bench, show
from benchmarks.zoo.models import sized
from mixfl.cli import print_table

ALGORITHMS = ("fedavg", "pt", "1wgt", "2wgt")
SIZE = sized(
    "gpt", S=4, K=2, B=4, lr=0.1, clients=8, vocabulary=4096, width=384, layers=6, heads=6,
    length=64,
)  # fmt: skip


def look_into(runners: list[Runner], initial: dict) -> float:
    """Adds the memory of mixfl's rounds. Returns how far results may differ."""
    for runner in runners:
        m = runner.measured
        if m.engine.startswith("mixfl"):
            print(f"  memory of {m.engine} {m.algorithm}", flush=True)
            m.more["memory"] = runner.worker.ask("memory")
    return report.TOLERANCE


def memory_table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    header = ["engine", "algorithm", "devices", "measured MB", "in models", "predicted MB", "ratio"]
    cells = []
    for r in rows:
        if m := r.get("memory"):
            measured, predicted = m["measured_mb"], m["predicted_mb"]
            models, ratio = measured / m["model_mb"], predicted / measured
            cells.append([
                r["engine"], r["algorithm"], str(m["devices"]), f"{measured:.0f}",
                f"{models:.1f}", f"{predicted:.0f}", f"{ratio:.2f}",
            ])  # fmt: skip
    return header, cells


@click.command()
@click.option("--trials", default=3, show_default=True, help="Trials of each engine.")
@click.option("--devices", default="auto", show_default=True, help="Of mixfl; or several: 1,2.")
@click.option("--algorithms", default=",".join(ALGORITHMS), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the rows, as JSON.")
def main(trials: int, devices: str, algorithms: str, out: Path | None) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers are closed
    with tempfile.TemporaryDirectory() as name:
        wanted = Wanted(Path(name) / "large")
        for count in devices.split(","):
            for algorithm in algorithms.split(","):
                engine = "mixfl" if count == "auto" else f"mixfl, devices={count}"
                wanted.add(engine, algorithm, "mixfl_worker", algorithm, f"devices={count}")
        wanted.add_peer("torch")
        rows = bench(SIZE, wanted, trials, None, 1.0, look_into)
    show(SIZE, rows)
    print_table(*memory_table(rows), title="memory of a round")
    if out:
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

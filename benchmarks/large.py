"""A model larger than the cache: time and memory of a round, beside PyTorch and a prediction.

    python -m benchmarks.large [--trials N] [--devices 1,2]

A GPT with 6 layers of 384, and every algorithm also as a plain PyTorch loop. How engines are
compared: `benchmarks/comparison.py`. Results may differ by what rounding alone changes, as in the
zoo. Other work on the cores disturbs elapsed time, so processor time is measured too. The memory of
a round is the state, and by how much the resident size grows during rounds, measured in the worker
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
from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo.models import sized
from mixfl.cli import print_table

ALGORITHMS = ("fedavg", "pt", "1wgt", "2wgt")
SIZE = sized(
    "gpt", S=4, K=2, B=4, lr=0.1, clients=8, vocabulary=4096, width=384, layers=6, heads=6,
    length=64,
)  # fmt: skip


class More(zoo.More):
    """Adds the processor time of rounds, and the memory of mixfl's."""

    def __call__(self, runners: list[Runner], initial: dict) -> float:
        """Returns how far results may differ."""
        tolerance = report.TOLERANCE
        for runner in runners:
            m = runner.measured
            if m.engine == "sgemm":
                continue
            print(f"  processor time and memory of {m.engine} {m.algorithm}", flush=True)
            m.more["cpu_s"] = round(runner.worker.timed(1)[1], 2)
            if m.engine.startswith("mixfl"):
                m.more["memory"] = runner.worker.ask("memory")
            elif m.algorithm == "fedavg":
                tolerance = self.tolerance(m, initial)
        return tolerance


def time_table(rows: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Processor time beside PyTorch's, where the results agree."""
    torch = {r["algorithm"]: r["cpu_s"] for r in rows if r["engine"] == "torch" and "cpu_s" in r}
    cells = []
    for r in rows:
        if "cpu_s" in r:
            agrees = r["engine"] == "torch" or "torch" in r["ratio_to"]
            times = f"{torch[r['algorithm']] / r['cpu_s']:.2f}" if agrees else "differs"
            cells.append([r["engine"], r["algorithm"], f"{r['cpu_s']:.2f}", times])
    return ["engine", "algorithm", "processor s/round", "x torch"], cells


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
        for algorithm in algorithms.split(","):
            wanted.add_peer("torch", algorithm)
        rows = bench(SIZE, wanted, trials, None, 1.0, More(wanted.folder))
    show(SIZE, rows)
    print_table(*time_table(rows), title="processor time of a round")
    print_table(*memory_table(rows), title="memory of a round")
    if out:
        out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

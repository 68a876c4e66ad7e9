"""Rounds of FedAvg with PyTorch modules: compiled, by PyTorch itself, as `auto` chooses, and in a
plain PyTorch loop in two processes with a thread each.

    python -m benchmarks.modules [--modules resnet,gru] [--ways compiled,pytorch,plain] [--rounds 5]

Medians of interleaved rounds, in ms of processor time of all threads and processes: elapsed time
depends on what else the cores do.
"""

import ast
import statistics
import subprocess
import sys

import click

from benchmarks.modules.models import MODULES
from mixfl.cli import print_table

PROCESSES = 2


class Way:
    """The processes that run a way."""

    def __init__(self, module: str, way: str):
        if way == "plain":
            given = [["plain", module, str(i), str(PROCESSES)] for i in range(PROCESSES)]
        else:
            loops, _, devices = way.partition(":")  # pytorch:2 is with two clients at once
            given = [["mixfl", module, loops, devices]]
        self.processes = [
            subprocess.Popen([sys.executable, "-m", "benchmarks.modules.worker", *args], text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for args in given
        ]  # fmt: skip
        self.about, *_ = [ast.literal_eval(self._line(p)) for p in self.processes]

    def _line(self, process) -> str:
        return process.stdout.readline()

    def round(self) -> tuple[float, float]:
        """Seconds of processor time, and elapsed."""
        for process in self.processes:
            process.stdin.write("\n")
            process.stdin.flush()
        took = [tuple(map(float, self._line(p).split())) for p in self.processes]
        return sum(t[0] for t in took), max(t[1] for t in took)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.wait()


@click.command()
@click.option("--modules", default=",".join(MODULES))
@click.option("--ways", default="compiled,pytorch,plain")
@click.option("--rounds", default=5)
def main(modules: str, ways: str, rounds: int) -> None:
    rows = []
    for module in modules.split(","):
        running = {way: Way(module, way) for way in ways.split(",")}
        taken: dict[str, list] = {way: [] for way in running}
        for i in range(rounds + 2):
            for way, processes in running.items():
                took = processes.round()
                if i >= 2:  # the first ones compile
                    taken[way].append(took)
        for way, processes in running.items():
            processor, elapsed = (statistics.median(t) for t in zip(*taken[way], strict=True))
            chosen = " ".join(f"{v:.3g}" if isinstance(v, float) else str(v)
                              for v in processes.about.values())  # fmt: skip
            rows.append([module, way, f"{1000 * processor:.0f}", f"{1000 * elapsed:.0f}", chosen])
            print(*rows[-1], flush=True)
            processes.close()
    print_table(["module", "way", "processor ms", "elapsed ms", "chosen"], rows)


if __name__ == "__main__":
    main()

"""Times a round of mixfl, its peers and a bare JAX loop on the same arrays: `make bench`.

    python -m benchmarks.rounds [--tasks smile,movie,text] [--peers fedjax,pfl,flower]
                                [--trials N] [--rounds N] [--quick]

How they are compared: `benchmarks/comparison.py`.
"""

import json
import signal
import sys
import tempfile
from pathlib import Path

import click

from benchmarks import report, workloads
from benchmarks.comparison import Wanted, bench, known, show
from benchmarks.peers import install

RESULTS = Path(__file__).parent / "results.json"
PLOT = Path(__file__).parent / "results.png"
ALGORITHMS = ("fedavg", "pt", "1wgt", "2wgt")


def wanted(task: str, folder: Path, peers: list[str]) -> Wanted:
    engines = Wanted(folder)
    for algorithm in ALGORITHMS:
        engines.add("mixfl", algorithm, "mixfl_worker", algorithm)
    if task == "movie":
        engines.add("scan", "fedavg", "scan_worker", "--rows")
        engines.add("scan-dense", "fedavg", "scan_worker")
    else:
        engines.add("scan", "fedavg", "scan_worker")
    for peer in peers:
        engines.add_peer(peer)
    return engines


@click.command()
@click.option("--tasks", default=",".join(workloads.SIZES), show_default=True)
@click.option("--peers", default=",".join(install.PEERS), show_default=True, help="'' for none.")
@click.option("--trials", default=7, show_default=True, help="Trials of each engine.")
@click.option("--rounds", type=int, help="Rounds in a trial; default: about two seconds' worth.")
@click.option("--quick", is_flag=True, help="3 short trials, to see that everything works.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Where to write.")
def main(tasks: str, peers: str, trials: int, rounds: int | None, quick: bool, out: Path) -> None:
    chosen, peers_chosen = known(tasks, list(workloads.SIZES)), known(peers, install.PEERS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers are closed
    seconds = 0.5 if quick else 2.0
    trials = min(trials, 3) if quick else trials
    rows: list[dict] = []
    for task in chosen:
        with tempfile.TemporaryDirectory() as folder:
            size = workloads.SIZES[task]
            engines = wanted(task, Path(folder) / task, peers_chosen)
            task_rows = bench(size, engines, trials, rounds, seconds)
        show(size, task_rows)
        rows += task_rows
        out.write_text(json.dumps(rows, indent=1) + "\n")
    picture = PLOT if out == RESULTS else out.with_suffix(".png")
    report.plot(rows, picture)
    print(f"Written to {out} and {picture}")


if __name__ == "__main__":
    main()

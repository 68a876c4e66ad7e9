"""Times a round of mixfl, its peers and a bare JAX loop on the same arrays: `make bench`.

    python -m benchmarks.rounds [--tasks smile,movie,text] [--peers fedjax,pfl,flower]
                                [--trials N] [--rounds N] [--quick]

Every engine is a separate process. First, each runs the same two rounds; a ratio is given only if
the results agree. Then they take turns, one trial each. See docs/benchmarks.md.
"""

import importlib.metadata
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import numpy as np

from benchmarks import report, workloads
from benchmarks.engines import OutsideLoad, Worker, WorkerFailed, module
from benchmarks.peers import install
from benchmarks.sgemm_worker import FLOPS
from mixfl.cli import print_table

RESULTS = Path(__file__).parent / "results.json"
PLOT = Path(__file__).parent / "results.png"
ALGORITHMS = ("fedavg", "pt", "1wgt", "2wgt")
ALIKE = 2  # rounds that are the same for all engines
DISTURBED = 0.05  # share of the cores used by others, above which a trial counts as disturbed
HOPELESS = 3  # a setting this many times slower than the one before is given up
# Settings in which a peer might be faster. All are tried, and the fastest is used.
VARIANTS: dict[str, list[dict[str, str]]] = {
    "fedjax": [{"FEDJAX_BACKEND": "jit"}, {"FEDJAX_BACKEND": "pmap"}],
    "pfl": [{"PFL_PROCESSES": str(os.cpu_count())}, {"PFL_PROCESSES": "1"}],
    "flower": [{}],
}


@dataclass
class Runner:
    """A running engine that has finished the first rounds."""

    measured: report.Measured
    worker: Worker
    round_s: float  # approximate seconds of a warm round
    trials: list[tuple[float, float]] = field(default_factory=list)  # outside load, ms per round

    def trial(self, rounds: int | None, seconds: float) -> None:
        n = rounds or int(np.clip(round(seconds / self.round_s), 2, 1000))
        with OutsideLoad() as load:
            took = self.worker.run(n)
        self.trials.append((load.share, 1000 * took / n))

    def finish(self, trials: int) -> None:
        """Keeps the quietest trials."""
        kept = sorted(self.trials)[:trials]
        m = self.measured
        m.ms = [ms for _, ms in kept]
        m.peak_mb = self.worker.peak_mb()
        m.more["disturbed"] = sum(load > DISTURBED for load, _ in kept)
        m.more["outside_load"] = round(max(load for load, _ in kept), 3)
        m.more["repeated"] = len(self.trials) - len(kept)


def start(
    engine: str, algorithm: str, command, folder: Path, env=None, slowest: float = np.inf
) -> Runner:
    """Starts a worker and runs the rounds that all engines share, and some more."""
    worker = Worker(command, env)
    try:
        m = report.Measured(engine, algorithm)
        worker.ask("init", folder=str(folder))
        m.first_s = worker.run(1)
        second = worker.run(ALIKE - 1) / (ALIKE - 1)
        if second > slowest:
            raise WorkerFailed(f"slow: {1000 * second:.0f} ms a round")
        m.params = worker.parameters()
        worker.run(1)
        return Runner(m, worker, worker.run(2) / 2)
    except BaseException:
        worker.close()
        raise


def start_peer(peer: str, folder: Path) -> Runner:
    """Starts a peer with the fastest of its settings."""
    python = install.python(peer)
    best: Runner | None = None
    tried: dict[str, float | str] = {}
    failed = ""
    for env in VARIANTS[peer]:
        setting = " ".join(f"{k}={v}" for k, v in env.items())
        try:
            command = module(f"peers.{peer}_worker", python=python)
            slowest = HOPELESS * best.round_s if best else np.inf
            runner = start(peer, "fedavg", command, folder, env, slowest)
        except WorkerFailed as error:
            tried[setting] = failed = str(error)
            continue
        tried[setting] = round(1000 * runner.round_s, 1)
        slower = runner
        if best is None or runner.round_s < best.round_s:
            best, slower, runner.measured.more["setting"] = runner, best, setting  # type: ignore
        if slower is not None:
            slower.worker.close()
    if best is None:
        raise WorkerFailed(failed)
    best.measured.more["tried"] = tried
    return best


def start_all(size: workloads.Size, folder: Path, peers) -> tuple[list[Runner], list]:
    """Returns the engines that could be started, and those that could not."""
    wanted: list[tuple[str, str, Callable[[], Runner]]] = []

    def want(engine: str, algorithm: str, *command: str) -> None:
        wanted.append(
            (engine, algorithm, partial(start, engine, algorithm, module(*command), folder))
        )

    want("sgemm", "", "sgemm_worker")
    for algorithm in ALGORITHMS:
        want("mixfl", algorithm, "mixfl_worker", algorithm)
    if size.task == "movie":
        want("scan", "fedavg", "scan_worker", "--rows")
        want("scan-dense", "fedavg", "scan_worker")
    else:
        want("scan", "fedavg", "scan_worker")
    for peer in peers:
        wanted.append((peer, "fedavg", partial(start_peer, peer, folder)))
    runners, missing = [], []
    try:
        for engine, algorithm, begin in wanted:
            print(f"{size.task}: starting {engine} {algorithm}".rstrip(), flush=True)
            try:
                runners.append(begin())
            except (WorkerFailed, install.NotInstalled) as error:
                print(f"  left out: {error}", flush=True)
                missing.append(report.Measured(engine, algorithm, failed=str(error)))
    except BaseException:
        close(runners)
        raise
    return runners, missing


def close(runners: list[Runner]) -> None:
    for runner in runners:
        runner.worker.close()


def measure(runners: list[Runner], trials: int, rounds: int | None, seconds: float) -> None:
    """Lets the engines take turns, one trial each. Repeats disturbed trials, at most as many times
    as there are trials."""
    for turn in range(trials):
        print(f"  trial {turn + 1} of {trials}", flush=True)
        for runner in runners:
            runner.trial(rounds, seconds)
    for turn in range(trials):
        again = [r for r in runners if sorted(r.trials)[trials - 1][0] > DISTURBED]
        if not again:
            break
        print(f"  disturbed by others: repeating {len(again)} engines ({turn + 1})", flush=True)
        for runner in again:
            runner.trial(rounds, seconds)
    for runner in runners:
        runner.finish(trials)


def bench(size: workloads.Size, folder: Path, peers, trials, rounds, seconds) -> list[dict]:
    """The rows of one task."""
    print(f"{size.task}: making the data", flush=True)
    workloads.write(size, folder)
    with np.load(folder / "params.npz") as stored:
        initial = dict(stored)
    runners, missing = start_all(size, folder, peers)
    try:
        measure(runners, trials, rounds, seconds)
    finally:
        close(runners)
    limit = None
    for runner in runners:
        if runner.measured.engine == "sgemm":
            limit = FLOPS / (min(ms for _, ms in runner.trials) / 1000)
    per_example = workloads.flops_per_example(size)
    measured = [r.measured for r in runners if r.measured.engine != "sgemm"]
    for m in measured:
        # The other algorithms also compute on the same number of central examples.
        examples = size.S * size.K * size.B * (1 if m.algorithm == "fedavg" else 2)
        m.flops = None if per_example is None else per_example * examples
    rows = report.rows(size.task, measured + missing, initial, limit)
    about = {
        "S": size.S, "K": size.K, "B": size.B,
        "sgemm_gflops": round(limit / 1e9, 1) if limit else None, "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "jax": importlib.metadata.version("jax"),
    }  # fmt: skip
    return [{**row, **about} for row in rows]


def show(size: workloads.Size, rows: list[dict]) -> None:
    header, cells = report.table(rows)
    print_table(header, cells, title=f"{size.task}, S={size.S} K={size.K} |B_i|={size.B}")
    for line in report.notes(rows):
        print(line)
    print(f"sgemm limit: {rows[0]['sgemm_gflops']} GFLOP/s")


@click.command()
@click.option("--tasks", default=",".join(workloads.SIZES), show_default=True)
@click.option("--peers", default=",".join(install.PEERS), show_default=True, help="'' for none.")
@click.option("--trials", default=7, show_default=True, help="Trials of each engine.")
@click.option("--rounds", type=int, help="Rounds in a trial; default: about two seconds' worth.")
@click.option("--quick", is_flag=True, help="3 short trials, to see that everything works.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Where to write.")
def main(tasks: str, peers: str, trials: int, rounds: int | None, quick: bool, out: Path) -> None:
    chosen = [p for p in peers.split(",") if p]
    for name, known in [(t, workloads.SIZES) for t in tasks.split(",")] + [
        (p, install.PEERS) for p in chosen
    ]:
        if name not in known:
            raise click.UsageError(f"'{name}' is unknown; known: {', '.join(known)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers are closed
    seconds = 0.5 if quick else 2.0
    trials = min(trials, 3) if quick else trials
    rows: list[dict] = []
    for task in tasks.split(","):
        with tempfile.TemporaryDirectory() as folder:
            size = workloads.SIZES[task]
            task_rows = bench(size, Path(folder) / task, chosen, trials, rounds, seconds)
        show(size, task_rows)
        rows += task_rows
        out.write_text(json.dumps(rows, indent=1) + "\n")
    picture = PLOT if out == RESULTS else out.with_suffix(".png")
    report.plot(rows, picture)
    print(f"Written to {out} and {picture}")


if __name__ == "__main__":
    main()

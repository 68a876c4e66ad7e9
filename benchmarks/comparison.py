"""Runs engines side by side on one workload: the same first rounds, then trials in turns.

Every engine is a separate process. First, each runs the same two rounds; a ratio is given only if
the results agree. Then they take turns, one trial each. See docs/benchmarks.md.
"""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click
import numpy as np

from benchmarks import report, workloads
from benchmarks.engines import LONGEST, OutsideLoad, Worker, WorkerFailed, module
from benchmarks.peers import install
from benchmarks.sgemm_worker import FLOPS
from mixfl.cli import print_table

ALIKE = 2  # rounds that are the same for all engines
DISTURBED = 0.05  # share of the cores used by others, above which a trial counts as disturbed
HOPELESS = 3  # a setting this many times slower than the one before is given up
# Settings in which a peer might be faster. All are tried, and the fastest is used.
VARIANTS: dict[str, list[dict[str, str]]] = {
    "fedjax": [{"FEDJAX_BACKEND": "jit"}, {"FEDJAX_BACKEND": "pmap"}],
    "pfl": [{"PFL_PROCESSES": str(os.cpu_count())}, {"PFL_PROCESSES": "1"}],
    "flower": [{}],
    "torch": [
        {"TORCH_PROCESSES": str(os.cpu_count()), "TORCH_THREADS": "1"},
        {"TORCH_PROCESSES": "1", "TORCH_THREADS": "1"},
        {"TORCH_PROCESSES": "1", "TORCH_THREADS": str(os.cpu_count())},
    ],
}
SLOW = 4.0  # seconds of a round; for engines that take longer, the second round is the only trial
PATIENCE = 60  # seconds for the first round in another setting than the first one


@dataclass
class Runner:
    """A running engine that has finished the first rounds."""

    measured: report.Measured
    worker: Worker
    round_s: float  # approximate seconds of a warm round
    trials: list[tuple[float, float]] = field(default_factory=list)  # outside load, ms per round

    def trial(self, rounds: int | None, seconds: float) -> None:
        least = 1 if self.round_s > seconds else 2
        n = rounds or int(np.clip(round(seconds / self.round_s), least, 1000))
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
    engine: str, algorithm: str, command, folder: Path, env=None, slowest: float = np.inf,
    alone: bool = False,
) -> Runner:  # fmt: skip
    """Starts a worker and runs the rounds that all engines share, and, unless it is done with these
    (`alone`), some more."""
    worker = Worker(command, env)
    try:
        m = report.Measured(engine, algorithm)
        begun = worker.ask("init", folder=str(folder))["seconds"]
        m.first_s = worker.run(1, LONGEST if slowest == np.inf else PATIENCE)
        m.more["start_s"] = round(begun + m.first_s, 2)
        with OutsideLoad() as load:
            second = worker.run(ALIKE - 1) / (ALIKE - 1)
        if second > slowest:
            raise WorkerFailed(f"slow: {1000 * second:.0f} ms a round")
        m.params = worker.parameters()
        if second > SLOW or alone:
            return Runner(m, worker, second, [(load.share, 1000 * second)])
        worker.run(1)
        return Runner(m, worker, worker.run(2) / 2)
    except BaseException:
        worker.close()
        raise


def start_peer(peer: str, algorithm: str, folder: Path) -> Runner:
    """Starts a peer with the fastest of its settings."""
    own = {} if peer == "torch" else {"python": install.python(peer)}
    of_algorithm = () if algorithm == "fedavg" else (algorithm,)
    best: Runner | None = None
    tried: dict[str, float | str] = {}
    failed = ""
    for env in VARIANTS[peer]:
        setting = " ".join(f"{k}={v}" for k, v in env.items())
        try:
            command = module(f"peers.{peer}_worker", *of_algorithm, **own)
            slowest = HOPELESS * best.round_s if best else np.inf
            runner = start(peer, algorithm, command, folder, env, slowest)
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


class Wanted:
    """The engines to compare on one workload."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.mixed: list[str] = []  # algorithms of peers that read the server's batches
        self.engines: list[tuple[str, str, Callable[[], Runner]]] = []
        self.add("sgemm", "", "sgemm_worker")

    def add(self, engine: str, algorithm: str, *command: str, env=None) -> None:
        begin = partial(start, engine, algorithm, module(*command), self.folder, env)
        self.engines.append((engine, algorithm, begin))

    def add_peer(self, peer: str, algorithm: str = "fedavg") -> None:
        if algorithm != "fedavg":
            self.mixed.append(algorithm)
        begin = partial(start_peer, peer, algorithm, self.folder)
        self.engines.append((peer, algorithm, begin))


def start_all(task: str, wanted: Wanted) -> tuple[list[Runner], list[report.Measured]]:
    """Returns the engines that could be started, and those that could not."""
    runners, missing = [], []
    try:
        for engine, algorithm, begin in wanted.engines:
            print(f"{task}: starting {engine} {algorithm}".rstrip(), flush=True)
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
            if runner.round_s <= SLOW or not runner.trials:
                runner.trial(rounds, seconds)
    quick = [r for r in runners if r.round_s <= SLOW]
    for turn in range(trials):
        again = [r for r in quick if sorted(r.trials)[trials - 1][0] > DISTURBED]
        if not again:
            break
        print(f"  disturbed by others: repeating {len(again)} engines ({turn + 1})", flush=True)
        for runner in again:
            runner.trial(rounds, seconds)
    for runner in runners:
        runner.finish(trials)


def bench(
    size: workloads.Size, wanted: Wanted, trials, rounds, seconds,
    more: Callable[[list[Runner], dict], float] = lambda runners, start: report.TOLERANCE,
) -> list[dict]:  # fmt: skip
    """The rows of one task. `more` is called with the running engines and the initial model, and
    returns how far results may differ."""
    print(f"{size.task}: making the data", flush=True)
    workloads.write(size, wanted.folder, mixed=wanted.mixed)
    with np.load(wanted.folder / "params.npz") as stored:
        initial = dict(stored)
    runners, missing = start_all(size.task, wanted)
    try:
        measure(runners, trials, rounds, seconds)
        tolerance = more(runners, initial)
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
    rows = report.rows(size.task, measured + missing, initial, limit, tolerance)
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


def known(names: str, among: Sequence[str]) -> list[str]:
    """The names in a list with commas; all must be known."""
    given = [n for n in names.split(",") if n]
    for name in given:
        if name not in among:
            raise click.UsageError(f"'{name}' is unknown; known: {', '.join(among)}.")
    return given

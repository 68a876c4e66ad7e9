"""Times a round of each model of the zoo, in JAX and in PyTorch, in mixfl and other engines.

    python -m benchmarks.zoo [--models cnn,gpt] [--peers fedjax,pfl,flower] [--trials N] [--quick]
    python -m benchmarks.zoo --markdown     # prints the table of the last run, and measures nothing

How they are compared: `benchmarks/comparison.py` and docs/benchmarks.md.
"""

import json
import signal
import sys
import tempfile
from pathlib import Path

import click

from benchmarks import report
from benchmarks.comparison import Runner, Wanted, bench, known, show, start
from benchmarks.engines import Worker, WorkerFailed, module
from benchmarks.peers import install
from benchmarks.zoo import summary
from benchmarks.zoo.models import MODELS

RESULTS = Path(__file__).parents[1] / "zoo.json"
NUDGED = {"TORCH_PROCESSES": "1", "TORCH_THREADS": "1", "TORCH_NUDGED": "1"}
ROUNDING = 3  # results may differ by this many times what another rounding of the start changes
LOOK_S = 90  # at most, to see where the time goes
CHAOS = 0.3  # where results may differ by more than this, nothing can be compared
WORKERS = {"mixfl": "mixfl_worker", "mixfl-torch": "zoo.mixfl_torch_worker"}


def caching(folder: Path, engine: str) -> dict[str, str]:
    """The environment of a worker that keeps compiled programs, in a folder of its own."""
    cache = folder.parent / f"{engine}-programs"
    return {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(cache)}


def wanted(model: str, folder: Path, peers: list[str]) -> Wanted:
    engines = Wanted(folder)
    for engine, worker in WORKERS.items():
        engines.add(engine, "fedavg", worker, "fedavg", env=caching(folder, engine))
    engines.add("mixfl", "2wgt", "mixfl_worker", "2wgt")
    engines.add("scan", "fedavg", "scan_worker")
    engines.add_peer("torch")
    for peer in peers:
        if peer in MODELS[model].peers:
            engines.add_peer(peer)
    return engines


class More:
    """What the zoo measures besides rounds."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, runners: list[Runner], initial: dict) -> float:
        """Returns how far results may differ."""
        fedavg = {r.measured.engine: r for r in runners if r.measured.algorithm == "fedavg"}
        for engine in WORKERS:
            if engine in fedavg:
                self.look_into(fedavg[engine])
        if "torch" not in fedavg:
            return report.TOLERANCE
        return self.tolerance(fedavg["torch"].measured, initial)

    def look_into(self, runner: Runner) -> None:
        engine, more = runner.measured.engine, runner.measured.more
        print(f"  where the time of {engine} goes, and a warm start", flush=True)
        try:
            more["parts"] = runner.worker.ask("parts", longest=LOOK_S)
        except WorkerFailed as error:
            more["parts_failed"] = str(error)
        try:
            more["warm_s"] = self.warm_start(engine)
        except WorkerFailed as error:
            more["warm_failed"] = str(error)

    def warm_start(self, engine: str) -> float:
        """Seconds to the end of the first round, with all programs compiled before."""
        worker = Worker(module(WORKERS[engine], "fedavg"), caching(self.folder, engine))
        try:
            return round(worker.ask("init", folder=str(self.folder))["seconds"] + worker.run(1), 2)
        finally:
            worker.close()

    def tolerance(self, measured: report.Measured, initial: dict) -> float:
        command = module("peers.torch_worker")
        try:
            nudged = start("torch", "fedavg", command, self.folder, NUDGED, alone=True)
        except WorkerFailed:
            return report.TOLERANCE
        nudged.worker.close()
        assert measured.params is not None
        assert nudged.measured.params is not None
        apart = report.difference(nudged.measured.params, measured.params, initial)
        measured.more["rounding"] = float(f"{apart:.1e}")
        wide = ROUNDING * apart
        return max(report.TOLERANCE, wide) if wide <= CHAOS else report.TOLERANCE


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--peers", default=",".join(install.PEERS), show_default=True, help="'' for none.")
@click.option("--trials", default=5, show_default=True, help="Trials of each engine.")
@click.option("--rounds", type=int, help="Rounds in a trial; default: about a second's worth.")
@click.option("--quick", is_flag=True, help="2 short trials, to see that everything works.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="Where to write.")
@click.option("--markdown", is_flag=True, help="Print the table of the results in --out.")
def main(models, peers, trials, rounds, quick, out: Path, markdown) -> None:
    if markdown:
        if not out.is_file():
            raise click.UsageError(f"there is no {out}: run python -m benchmarks.zoo first.")
        print("\n".join(summary.markdown(json.loads(out.read_text()))))
        return
    chosen, others = known(models, list(MODELS)), known(peers, install.PEERS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers are closed
    seconds = 0.3 if quick else 1.0
    trials = min(trials, 2) if quick else trials
    rows: list[dict] = []
    for model in chosen:
        size = MODELS[model].size
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / model
            engines = wanted(model, folder, others)
            model_rows = bench(size, engines, trials, rounds, seconds, More(folder))
        model_rows = summary.judged(model_rows, MODELS[model].asked)
        show(size, model_rows)
        for line in summary.lines(model_rows):
            print(line)
        rows += model_rows
        out.write_text(json.dumps(rows, indent=1) + "\n")
    report.plot(rows, out.with_suffix(".png"))
    print(f"Written to {out} and {out.with_suffix('.png')}")


if __name__ == "__main__":
    main()

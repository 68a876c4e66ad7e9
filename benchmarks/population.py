"""Does a large population cost anything? Opens and samples a store of Stack Overflow's size.

    python -m benchmarks.population [--clients N] [--examples N] [--folder DIR]

Streams a store with 342,477 clients and 10^8 examples to disk (four int16 each, 0.8 GB, log-normal
client sizes) and one a hundredth of its size, and removes both at the end. A separate process for
each measures: the time to open it; the time to draw a cohort of 100 and read its batches (K = 16,
|B_i| = 8) as the simulator does, for rounds read before (warm) and for new ones; and how much the
process's memory has grown afterwards, its own and mapped from the file.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from mixfl.cli import print_table
from mixfl.data.writer import StoreWriter

S, K, B = 100, 16, 8
ROUNDS, PASSES = 100, 5
WIDTH = 4
RESULTS = Path(__file__).parent / "population.json"


def client_sizes(clients: int, examples: int) -> np.ndarray:
    """At least 1 each, `examples` in total."""
    drawn = np.random.default_rng(0).lognormal(0, 1.2, clients)
    sizes = np.maximum(1, drawn / drawn.sum() * examples).astype(np.int64)
    sizes[sizes.argmax()] += examples - sizes.sum()
    return sizes


def make(path: Path, clients: int, examples: int) -> None:
    rng = np.random.default_rng(1)
    block = rng.integers(0, 2**15, (1 << 22, WIDTH), dtype=np.int16)  # the values don't matter
    with StoreWriter(path) as store:
        for i, n in enumerate(client_sizes(clients, examples).tolist()):
            start = int(rng.integers(0, len(block) - n))
            store.add(f"user{i:07d}", {"x": block[start : start + n]})


def memory() -> dict[str, float]:
    """MB of this process: its own (anonymous) memory, and mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return {"own": int(sizes["RssAnon"]) / 1024, "mapped": int(sizes["RssFile"]) / 1024}


def measure(path: Path) -> dict:
    """Runs in a separate process."""
    from mixfl.algorithms import ALGORITHMS
    from mixfl.data import ClientData
    from mixfl.engine.feeding import Feeder
    from mixfl.problem import Federated, Problem
    from mixfl.settings import Settings

    s = Settings(cohort_size=S, client_batch=B, local_steps=K)
    small = ClientData.from_arrays({"x": np.zeros((S, WIDTH), np.int16)}, client=np.arange(S))

    def feeder(clients):
        problem = Problem(lambda key: None, [Federated(lambda x, b: b["x"], clients)])
        return Feeder(problem, s), ALGORITHMS["fedavg"].build(problem, s)

    def read(feeder, algorithm, round):
        """Wall-clock and CPU milliseconds."""
        begun = time.perf_counter(), time.thread_time()
        for piece in feeder.pieces(algorithm, round):
            assert len(piece.clients[0][0].batches.mask)
        ended = time.perf_counter(), time.thread_time()
        return 1000 * np.subtract(ended, begun)

    read(*feeder(small), 0)  # imports, and NumPy's one-time work
    before = memory()
    begun = time.perf_counter()
    clients = ClientData.open(path)
    opened = time.perf_counter() - begun
    begun = time.perf_counter()
    made = feeder(clients)
    prepared = time.perf_counter() - begun
    after_open = memory()
    new, _ = np.transpose([read(*made, t) for t in range(ROUNDS)])
    warm, cpu = np.transpose([read(*made, t) for _ in range(PASSES) for t in range(ROUNDS)])
    after = memory()
    return dict(
        clients=len(clients), examples=len(clients.examples), open_s=opened, prepare_s=prepared,
        cohort_ms_warm=float(np.median(warm)), cohort_ms_warm_p10=float(np.percentile(warm, 10)),
        cohort_ms_cpu=float(np.median(cpu)), cohort_ms_new=float(np.median(new)),
        own_mb_open=after_open["own"] - before["own"], own_mb=after["own"] - before["own"],
        mapped_mb=after["mapped"] - before["mapped"],
    )  # fmt: skip


@click.command()
@click.option("--clients", default=342_477, show_default=True)
@click.option("--examples", default=10**8, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where the stores are made.")
@click.option("--measure", "store", type=click.Path(path_type=Path), hidden=True)
def main(clients: int, examples: int, folder: Path | None, store: Path | None) -> None:
    if store is not None:
        print(json.dumps(measure(store)))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for part in (100, 1):
            path = Path(made) / f"store{part}"
            begun = time.perf_counter()
            make(path, clients // part, examples // part)
            seconds = time.perf_counter() - begun
            size = sum(p.stat().st_size for p in path.iterdir())
            call = [sys.executable, "-m", "benchmarks.population", "--measure", str(path)]
            done = subprocess.run(call, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout) | {"store_bytes": size, "make_s": seconds})
    print_table(
        ["clients", "examples", "store MB", "open s", "prepare s", "warm ms", "p10", "CPU ms",
         "new ms", "own MB", "mapped MB"],
        [[f"{r['clients']:,}", f"{r['examples']:,}", f"{r['store_bytes'] / 2**20:.0f}",
          f"{r['open_s']:.3f}", f"{r['prepare_s']:.3f}", f"{r['cohort_ms_warm']:.2f}",
          f"{r['cohort_ms_warm_p10']:.2f}", f"{r['cohort_ms_cpu']:.2f}",
          f"{r['cohort_ms_new']:.2f}", f"{r['own_mb']:.1f}", f"{r['mapped_mb']:.0f}"]
         for r in rows],
        title=f"a cohort of {S}, K={K}, |B_i|={B}, examples of {2 * WIDTH} bytes",
    )  # fmt: skip
    about = {"machine": platform.processor() or platform.machine(), "S": S, "K": K, "B": B}
    RESULTS.write_text(json.dumps([{**r, **about} for r in rows], indent=1) + "\n")
    print(f"Written to {RESULTS}")


if __name__ == "__main__":
    main()

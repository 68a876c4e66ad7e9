"""Measures the movie task's bytes per client over a real network, next to the paper's Table 3.

    python -m benchmarks.flower_bytes [--data data/movielens]

A SuperLink and three SuperNodes run on this machine. Each node has the data of one user of
MovieLens-1M (or of synthetic ratings of the same size) with at least 160 examples, enough for ten
steps of 16. All bytes of Flower's messages count, in the second round (with uploads of few bits,
the first has two exchanges). Gradient transfer is measured with codes of several sizes, too; the
saving is against the baseline in 32 bits.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import mixfl
from benchmarks.deployment import Deployment
from mixfl.data.synthetic.ratings import ratings

MOVIES, EXAMPLES, NODES = 3952, 160, 3
PAPER = {"baseline": 494, "pt": 20, "1wgt": 30, "2wgt": 30}  # KB
PLAIN = ("float32", "float32")  # upload, download
CODES = [PLAIN, ("int8", "float32"), ("int8", "bf16"), ("int8", "int8")]


def users(data: str | None) -> mixfl.ClientData:
    if data:
        return mixfl.ClientData.open(data)
    drawn = ratings(users=60, movies=MOVIES, per_user=200)
    return mixfl.ClientData.from_arrays(drawn, client=drawn.pop("user"))


def stores(everyone: mixfl.ClientData, folder: Path) -> list[int]:
    """Writes a store per node, with one user's first 160 examples, and one for the server. Returns
    how many table rows each node uses."""
    chosen = np.flatnonzero(everyone.sizes() >= EXAMPLES)[:NODES]
    others = np.setdiff1d(np.arange(len(everyone)), chosen)[:50]
    everyone.select(others).write(folder / "server")
    rows = []
    for n, i in enumerate(chosen, 1):
        own = everyone.examples.take(everyone.rows(i)[:EXAMPLES])
        mixfl.ClientData.from_arrays(own, client=np.zeros(EXAMPLES, int)).write(
            folder / f"node-{n}"
        )
        rows.append(len(np.unique(np.append(own["context"], own["movie"]))))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = stores(users(given.data), folder)
        deployment = Deployment(folder / "movie", "movie", MIXFL_DATA=str(folder / "server"))
        deployment.own = {f"node-{n}": {"MIXFL_DATA": str(folder / f"node-{n}"), "NODES": "1"}
                          for n in range(1, NODES + 1)}  # fmt: skip
        print(f"{MOVIES} movies; the nodes' users have {', '.join(map(str, rows))} of them")
        configured(deployment.folder / "pyproject.toml")
        print("algorithm upload  download  paper KB  measured KB  down KB   up KB  saved %"
              "   (per client and round)")  # fmt: skip
        whole = 0.0
        with deployment:
            for algorithm, paper in PAPER.items():
                for codes in CODES if algorithm.endswith("wgt") else [PLAIN]:
                    down, up = measured(deployment, algorithm, *codes)
                    whole = whole or down + up
                    print(f"{algorithm:9} {codes[0]:7} {codes[1]:8} {paper:9} {down + up:12.1f} "
                          f"{down:8.1f} {up:7.1f} {100 - 100 * (down + up) / whole:8.1f}",
                          flush=True)  # fmt: skip


def configured(file: Path) -> None:
    """Flower lets a run change only keys that the project has."""
    section = "[tool.flwr.app.config]"
    own = 'upload = "float32"\ndownload = "float32"\neval_every = 1'
    file.write_text(file.read_text().replace(section, f"{section}\n{own}"))


def measured(
    deployment: Deployment, algorithm: str, upload: str, download: str
) -> tuple[float, float]:
    """KB down and up, in the second round."""
    out = deployment.folder / "runs" / f"{algorithm}-{upload}-{download}"
    run = deployment.run(
        rounds=2, algorithm=algorithm, out=str(out), upload=upload, download=download
    )
    assert deployment.finished(run) == "finished:completed", deployment.told(run)
    last = mixfl.load(out).metrics[-1]
    return last["comm/down_bytes"] / 1024, last["comm/up_bytes"] / 1024


if __name__ == "__main__":
    main()

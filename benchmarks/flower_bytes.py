"""Measures the movie task's bytes per client over a real network, next to the paper's Table 3.

    python -m benchmarks.flower_bytes [--data data/movielens]

A SuperLink and three SuperNodes run on this machine. Each node has the data of one user of
MovieLens-1M (or of synthetic ratings of the same size) with at least 160 examples, enough for ten
steps of 16. All bytes of Flower's messages count.
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
        print("algorithm  paper KB  measured KB   down KB  up KB   (per client and round)")
        with deployment:
            for algorithm, paper in PAPER.items():
                out = deployment.folder / "runs" / algorithm
                run = deployment.run(rounds=2, algorithm=algorithm, out=str(out))
                assert deployment.finished(run) == "finished:completed", deployment.told(run)
                last = mixfl.load(out).metrics[-1]
                down, up = last["comm/down_bytes"] / 1024, last["comm/up_bytes"] / 1024
                print(f"{algorithm:9} {paper:9} {down + up:12.1f} {down:9.1f} {up:6.1f}")


if __name__ == "__main__":
    main()

"""Rounds per hour of a deployment on this machine, by the number of nodes.

    python -m benchmarks.flower_rounds [--nodes 3,10,30] [--linger 0,1,2] [--rounds 8] [--json]

Real processes, TLS and authentication; the smile project, whose work is small, so that what is
measured is waiting. Plain and secure aggregation, with 0, 1 or 2 empty messages after each task
(`linger`). Medians over all rounds but the first two. A node takes about 0.6 GB of memory.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import mixfl
from benchmarks.deployment import Deployment


def seconds_per_round(deployment: Deployment, out: Path, **config) -> float:
    run = deployment.run(out=str(out), **config)
    assert deployment.finished(run, 3600) == "finished:completed", deployment.told(run)
    metrics = mixfl.load(out).metrics
    assert "rounds/failed" not in metrics[-1], metrics[-1]
    return statistics.median(row["time/round_ms"] / 1000 for row in metrics[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", default="3,10,30")
    parser.add_argument("--linger", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for nodes in map(int, given.nodes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            deployment = Deployment(Path(folder) / "smile", nodes=nodes)
            file = deployment.folder / "pyproject.toml"
            text = file.read_text().replace('clip = "quantile"', 'clip = "off"')
            section = "[tool.flwr.app.config]"
            more = f"eval_every = 1\ncohort_size = {nodes}"  # everybody, in every round
            file.write_text(text.replace(section, f"{section}\n{more}"))
            with deployment:
                for linger in map(int, given.linger.split(",")):
                    for secure in (False, True):
                        out = deployment.folder / f"runs/{linger}-{secure}"
                        seconds = seconds_per_round(
                            deployment, out, rounds=given.rounds, linger=linger, secure=secure,
                            min_clients=nodes,
                        )  # fmt: skip
                        row = {
                            "nodes": nodes, "secure": secure, "linger": linger,
                            "seconds": round(seconds, 2), "per_hour": round(3600 / seconds),
                        }  # fmt: skip
                        print(json.dumps(row) if given.json else row, flush=True)


if __name__ == "__main__":
    main()

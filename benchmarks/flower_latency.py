"""Measures what a round on Flower costs beyond the clients' work, against an app that does nothing.

    python -m benchmarks.flower_latency [--without-worker] [--rounds 6] [--repeats 2]

A SuperLink and three SuperNodes run on this machine, with TLS and authentication. The two apps take
turns. The medians over all rounds, except the first of each run, are printed. The app that does
nothing sends each node an array of the model's size and gets it back at once. Without the worker,
Flower starts a process for each message.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import mixfl
from benchmarks.deployment import Deployment, second_project

BARE = '''
"""An app that does nothing."""

import json
import time

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@client.train()
def train(message, context):
    return Message(message.content, reply_to=message)


@server.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < 3:
        time.sleep(0.5)
    seconds = []
    for t in range(context.run_config["rounds"]):
        begun = time.perf_counter()
        content = RecordDict({"x": ArrayRecord([np.zeros(SIZE, np.float32)])})
        messages = [Message(content, node, "train", ttl=600, group_id=str(t)) for node in nodes]
        left = set(grid.push_messages(messages))
        while left:
            for reply in grid.pull_messages(list(left)):
                assert reply.has_content()
                left.discard(reply.metadata.reply_to_message_id)
            time.sleep(0.1)
        seconds.append(time.perf_counter() - begun)
    with open(context.run_config["out"], "w") as file:
        json.dump(seconds, file)
'''


def bare(deployment: Deployment, project: Path, rounds: int) -> list[float]:
    out = project / "seconds.json"
    run = deployment.run(project, rounds=rounds, out=str(out))
    assert deployment.finished(run, 600) == "finished:completed", deployment.told(run)
    return json.loads(out.read_text())[1:]


def mixed(deployment: Deployment, out: Path, rounds: int) -> list[float]:
    run = deployment.run(rounds=rounds, out=str(out))
    assert deployment.finished(run, 600) == "finished:completed", deployment.told(run)
    return [line["time/round_ms"] / 1000 for line in mixfl.load(out).metrics[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-worker", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    worker = "no" if given.without_worker else "yes"
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder) / "smile", WORKER=worker)
        file = deployment.folder / "pyproject.toml"
        section = "[tool.flwr.app.config]"
        file.write_text(file.read_text().replace(section, f"{section}\neval_every = 1"))
        project = second_project(deployment, "smile")
        pixels, hidden = 28 * 28 * 3, 64
        (project / "app.py").write_text(BARE.replace("SIZE", str((pixels + 2) * hidden + 1)))
        seconds_of: dict[str, list[float]] = {"nothing": [], "mixfl": []}
        with deployment:
            for i in range(given.repeats):
                seconds_of["nothing"] += bare(deployment, project, given.rounds)
                out = deployment.folder / f"runs/{i}"
                seconds_of["mixfl"] += mixed(deployment, out, given.rounds)
    kind = "without worker" if given.without_worker else "with worker"
    for name, seconds in seconds_of.items():
        middle = statistics.median(seconds)
        print(f"{kind:15} {name:8} median {middle:6.2f} s   of {len(seconds)} rounds: "
              f"{min(seconds):.2f} to {max(seconds):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()

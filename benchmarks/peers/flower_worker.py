"""Flower: its simulation engine on Ray, one core per client, its FedAvg.

A virtual node is a place in the cohort; its data is that of the client in this place in the current
round. So there are S nodes, and all take part in every round. The simulation runs as long as the
worker does; a request to run rounds calls the strategy within it.
"""

import os
import queue
import threading

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")

import logging

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers import flower_client, protocol, torch_models

logging.getLogger("flwr").setLevel(logging.ERROR)
server = ServerApp()
requests: queue.Queue = queue.Queue()  # numbers of rounds; None ends it
answers: queue.Queue = queue.Queue()
folders: queue.Queue = queue.Queue()


@server.main()
def main(grid, context):
    work = protocol.Workload(os.environ[flower_client.FOLDER])
    module = torch_models.build(work)
    arrays = ArrayRecord(module.state_dict())
    strategy = FedAvg(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=work.S,
        min_available_nodes=work.S,
    )  # fmt: skip
    t = 0
    answers.put("ready")
    while (rounds := requests.get()) is not None:
        try:
            config = ConfigRecord({"first-round": t})
            result = strategy.start(grid, arrays, num_rounds=rounds, train_config=config)
            failed = rounds - len(result.train_metrics_clientapp)
            if failed:
                raise RuntimeError(f"{failed} of {rounds} rounds had no result")
            arrays, t = result.arrays, t + rounds
            answers.put((module, arrays))
        except Exception as error:
            answers.put(error)


class Engine:
    def init(self, folder):
        folders.put(folder)
        answers.get()

    def run(self, rounds):
        requests.put(rounds)
        answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        self.module, self.arrays = answer

    def parameters(self):
        self.module.load_state_dict(self.arrays.to_torch_state_dict())
        return torch_models.named(self.module)


def talk():
    protocol.serve(Engine())
    folders.put(None)
    requests.put(None)


if __name__ == "__main__":
    threading.Thread(target=talk).start()
    folder = folders.get()  # the simulation must run in the main thread
    if folder is not None:
        os.environ[flower_client.FOLDER] = str(folder)
        run_simulation(
            server_app=server,
            client_app=flower_client.app,
            num_supernodes=protocol.Workload(folder).S,
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {"num_cpus": os.cpu_count()},
            },
        )

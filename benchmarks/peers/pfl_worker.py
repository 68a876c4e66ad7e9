"""pfl-research: its simulated federated averaging on PyTorch.

PFL_PROCESSES=2 starts a second process, which is how pfl uses more than one core for small models:
each trains half of a cohort, and the sums are all-reduced. The first process talks to the driver.
"""

import os
import socket
import subprocess
import sys

PROCESSES = int(os.environ.get("PFL_PROCESSES", "1"))
FIRST = "PFL_WORKER_RANK" not in os.environ


def start_others():
    """This process becomes the first of PROCESSES; returns the others."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([address] * PROCESSES)
    os.environ["OMP_NUM_THREADS"] = str(max(1, os.cpu_count() // PROCESSES))
    command = [sys.executable, "-m", "benchmarks.peers.pfl_worker"]
    others = [
        subprocess.Popen(
            command, env={**os.environ, "PFL_WORKER_RANK": str(rank)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(1, PROCESSES)
    ]  # fmt: skip
    os.environ["PFL_WORKER_RANK"] = "0"
    return others


OTHERS = start_others() if FIRST and PROCESSES > 1 else []  # before pfl is imported, as it joins

import json

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel

from benchmarks.peers import protocol, torch_models

NEVER = 10**9


class Users:
    """Yields the users' names (round, place in the cohort) in the workload's order."""

    def __init__(self, work):
        self.work, self.next = work, 0

    def __call__(self):
        user = divmod(self.next, self.work.S)
        self.next += 1
        return user

    def data(self, user):
        columns = self.work.client(*user)
        return PyTorchTensorDataset(torch_models.tensors(columns), user_id=str(user))


class Averaging(FederatedAveraging):
    """Continues where it stopped, from iteration 1: pfl would evaluate all users in iteration 0."""

    def __init__(self):
        super().__init__()
        self._current_central_iteration = 1


class Engine:
    def init(self, folder):
        self.others("init", folder=folder)
        w = protocol.Workload(folder)
        self.module = torch_models.build(w)
        self.module.metrics = lambda **columns: {}
        users = Users(w)
        data = FederatedDataset(users.data, users)
        self.model = PyTorchModel(
            self.module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(self.module.parameters(), lr=1.0),
        )
        self.backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
        self.algorithm = Averaging()
        self.S = w.S
        self.training = NNTrainHyperParams(
            local_num_epochs=None, local_num_steps=w.K, local_batch_size=w.B,
            local_learning_rate=w.size["lr"],
        )  # fmt: skip
        self.others()

    def run(self, rounds):
        self.others("run", rounds=rounds)
        params = NNAlgorithmParams(
            central_num_iterations=self.algorithm._current_central_iteration + rounds,
            evaluation_frequency=NEVER, train_cohort_size=self.S, val_cohort_size=0,
        )  # fmt: skip
        self.algorithm.run(
            params, self.backend, self.model, self.training, send_metrics_to_platform=False
        )
        self.others()

    def others(self, do=None, **more):
        """Tells the other processes to do the same; without arguments, waits for them."""
        for other in OTHERS:
            if do:
                other.stdin.write(json.dumps({"do": do, **more}) + "\n")
                other.stdin.flush()
            else:
                answer = json.loads(other.stdout.readline())
                if "error" in answer:
                    raise RuntimeError(answer["error"])

    def parameters(self):
        return torch_models.named(self.module)


if __name__ == "__main__":
    protocol.serve(Engine())
    for other in OTHERS:
        other.stdin.close()
        other.wait()

"""mixfl's simulator with a model of the zoo as a PyTorch module.

python -m benchmarks.zoo.mixfl_torch_worker ALGORITHM [key=value ...]
"""

import numpy as np

from benchmarks import mixfl_worker, workloads
from benchmarks.peers import protocol, torch_models
from mixfl.data import ClientData
from mixfl.pytorch import Model, tensor


class Engine(mixfl_worker.Engine):
    def problem(self, size, folder):
        self.work = protocol.Workload(folder)
        self.module = torch_models.build(self.work)
        model = Model(lambda: torch_models.build(self.work))
        loss = model.loss(lambda module, batch: module.losses(**batch))
        rows = {f"{name}.weight": c for name, c in workloads.marked_rows(size.task).items()}
        clients = ClientData.open(folder / "store")
        return workloads.problem(size, clients, model.init, loss, rows)

    def parameters(self):
        """In JAX's names and layouts, as for all engines."""
        state = {name: tensor(np.asarray(a)) for name, a in self.state.x.items()}
        self.module.load_state_dict(state)
        return torch_models.named(self.module)


if __name__ == "__main__":
    mixfl_worker.main(Engine)

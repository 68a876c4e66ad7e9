"""A plain PyTorch loop: for every client, K steps of SGD from a copy of the model.

TORCH_THREADS and TORCH_PROCESSES say how it uses the cores. The processes divide the cohort, and
add up their clients' changes in shared memory. A copy of the model is a copy of one vector.
TORCH_NUDGED=1 starts from parameters that are rounded differently, to see what that changes.
"""

import os

THREADS = int(os.environ.get("TORCH_THREADS", "1"))
PROCESSES = int(os.environ.get("TORCH_PROCESSES", "1"))

import torch
import torch.multiprocessing as mp

from benchmarks.peers import protocol, torch_models


class Clients:
    """Trains every PROCESSES-th client of a round."""

    def __init__(self, folder, rank):
        torch.set_num_threads(THREADS)
        self.work, self.rank = protocol.Workload(folder), rank
        self.module = torch_models.build(self.work)
        self.parameters = [p for p in self.module.parameters()]
        self.y = torch.cat([p.detach().flatten() for p in self.parameters])
        parts = self.y.split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.data = part.view_as(p)  # so `y` is the whole model

    def train(self, t, x, total):
        """Adds up the changes of this process's clients."""
        work = self.work
        total.zero_()
        for i in range(self.rank, work.S, PROCESSES):
            data = torch_models.tensors(work.client(t, i))
            self.y.copy_(x)
            for k in range(work.K):
                part = slice(k * work.B, (k + 1) * work.B)
                loss = self.module.loss(**{name: c[part] for name, c in data.items()})
                grads = torch.autograd.grad(loss, self.parameters)
                with torch.no_grad():
                    torch._foreach_add_(self.parameters, grads, alpha=-work.size["lr"])
            total.add_(self.y - x)


def assist(folder, rank, x, total, rounds):
    clients = Clients(folder, rank)
    rounds.send(None)
    while (t := rounds.recv()) is not None:
        clients.train(t, x, total)
        rounds.send(t)


class Engine:
    def init(self, folder):
        self.clients, self.t = Clients(folder, 0), 0
        self.x = self.clients.y.clone().share_memory_()
        if os.environ.get("TORCH_NUDGED"):
            signs = torch.randint(2, self.x.shape, generator=torch.Generator().manual_seed(0))
            self.x.mul_(1 + 2**-24 * (2.0 * signs - 1).double())
        self.totals = [torch.zeros_like(self.x).share_memory_() for _ in range(PROCESSES)]
        self.others = [self.start(folder, rank) for rank in range(1, PROCESSES)]
        for other in self.others:
            other.recv()

    def start(self, folder, rank):
        here, there = mp.Pipe()
        given = (folder, rank, self.x, self.totals[rank], there)
        mp.get_context("spawn").Process(target=assist, args=given, daemon=True).start()
        return here

    def run(self, rounds):
        for _ in range(rounds):
            for other in self.others:
                other.send(self.t)
            self.clients.train(self.t, self.x, self.totals[0])
            for other in self.others:
                other.recv()
            for total in self.totals:
                self.x.add_(total, alpha=1 / self.clients.work.S)
            self.t += 1

    def parameters(self):
        self.clients.y.copy_(self.x)
        return torch_models.named(self.clients.module)


if __name__ == "__main__":
    protocol.serve(Engine())

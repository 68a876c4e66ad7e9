"""The paper's algorithms as plain PyTorch loops: for every client, K steps of SGD from a copy of
the model.

    python -m benchmarks.peers.torch_worker [fedavg|pt|1wgt|2wgt]

TORCH_THREADS and TORCH_PROCESSES say how it uses the cores. The processes divide the cohort and
every batch at the server, and add up what they find in shared memory. A copy of the model is a copy
of one vector. TORCH_NUDGED=1 starts from parameters that are rounded differently, to see what that
changes.
"""

import os
import sys

THREADS = int(os.environ.get("TORCH_THREADS", "1"))
PROCESSES = int(os.environ.get("TORCH_PROCESSES", "1"))

import torch
import torch.multiprocessing as mp

from benchmarks.peers import protocol, torch_models


class Shared:
    """Vectors of the model's size that all processes see."""

    def __init__(self, x, mixed):
        self.x = x.clone().share_memory_()
        self.totals = [torch.zeros_like(x).share_memory_() for _ in range(PROCESSES)]
        if mixed:
            self.x_c = x.clone().share_memory_()  # the model of the server's steps
            self.g_c = torch.zeros_like(x).share_memory_()  # what clients add to each step

    def total(self):
        return self.totals[0] if PROCESSES == 1 else sum(self.totals)


class Part:
    """What one of the processes does: every PROCESSES-th client, or row of a batch."""

    def __init__(self, folder, rank):
        torch.set_num_threads(THREADS)
        self.work, self.rank = protocol.Workload(folder), rank
        self.module = torch_models.build(self.work)
        self.parameters = [p for p in self.module.parameters()]
        self.y = torch.cat([p.detach().flatten() for p in self.parameters])
        parts = self.y.split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.data = part.view_as(p)  # so `y` is the whole model

    def grads(self, data):
        return torch.autograd.grad(self.module.loss(**data), self.parameters)

    @torch.no_grad()
    def clients(self, shared, t, augmented):
        """Adds up the changes of this process's clients."""
        work, lr, total = self.work, self.work.size["lr"], shared.totals[self.rank]
        total.zero_()
        for i in range(self.rank, work.S, PROCESSES):
            data = torch_models.tensors(work.client(t, i))
            self.y.copy_(shared.x)
            for k in range(work.K):
                part = slice(k * work.B, (k + 1) * work.B)
                with torch.enable_grad():
                    grads = self.grads({name: c[part] for name, c in data.items()})
                torch._foreach_add_(self.parameters, grads, alpha=-lr)
                if augmented:
                    self.y.add_(shared.g_c, alpha=-lr)
            total.add_(self.y - shared.x)

    @torch.no_grad()
    def central(self, shared, t, k, algorithm):
        """The gradient of the central loss at x_c, of this process's rows of a batch."""
        batch = self.work.central_rows(algorithm, t)[k]
        own = batch[self.rank :: PROCESSES]
        weight = self.work.size["weight"]  # of the module's loss
        factor = (1 - weight) / weight * len(own) / len(batch)
        self.y.copy_(shared.x_c)
        with torch.enable_grad():
            grads = self.grads(torch_models.tensors(self.work.central(own)))
        torch.cat([g.flatten() for g in grads], out=shared.totals[self.rank])
        shared.totals[self.rank].mul_(factor)


def assist(folder, rank, shared, asked):
    part = Part(folder, rank)
    asked.send(None)
    while (request := asked.recv()) is not None:
        do, *arguments = request
        getattr(part, do)(shared, *arguments)
        asked.send(None)


class Engine:
    def __init__(self, algorithm="fedavg"):
        self.algorithm = algorithm
        self.round = {
            "fedavg": self.fedavg, "pt": self.pt, "1wgt": self.one_way, "2wgt": self.two_way
        }[algorithm]  # fmt: skip

    def init(self, folder):
        self.part, self.t = Part(folder, 0), 0
        self.lr = self.part.work.size["lr"]
        self.shared = Shared(self.part.y, mixed=self.algorithm != "fedavg")
        self.x = self.shared.x
        if os.environ.get("TORCH_NUDGED"):
            signs = torch.randint(2, self.x.shape, generator=torch.Generator().manual_seed(0))
            self.x.mul_(1 + 2**-24 * (2.0 * signs - 1).double())
        if self.algorithm == "2wgt":
            self.g_f = torch.zeros_like(self.x)  # the clients' gradient in the round before
        self.others = [self.start(folder, rank) for rank in range(1, PROCESSES)]
        for other in self.others:
            other.recv()

    def start(self, folder, rank):
        here, there = mp.Pipe()
        given = (folder, rank, self.shared, there)
        mp.get_context("spawn").Process(target=assist, args=given, daemon=True).start()
        return here

    def all(self, do, *arguments):
        """Lets every process do its part, and returns the sum."""
        for other in self.others:
            other.send((do, *arguments))
        getattr(self.part, do)(self.shared, *arguments)
        for other in self.others:
            other.recv()
        return self.shared.total()

    def delta(self, augmented=False):
        """The mean of the clients' changes."""
        return self.all("clients", self.t, augmented) / self.part.work.S

    def central_delta(self, g_f=None):
        """The change of the model in the server's own steps, as many as a client's."""
        x_c = self.shared.x_c.copy_(self.x)
        steps = len(self.part.work.central_rows(self.algorithm, self.t))
        for k in range(steps):
            x_c.add_(self.all("central", self.t, k, self.algorithm), alpha=-self.lr)
            if g_f is not None:
                x_c.add_(g_f, alpha=-self.lr)
        return x_c - self.x, steps

    def fedavg(self):
        self.x.add_(self.all("clients", self.t, False), alpha=1 / self.part.work.S)

    def pt(self):
        delta_f = self.delta()
        self.x.add_(delta_f + self.central_delta()[0])

    def one_way(self):
        self.shared.x_c.copy_(self.x)
        self.shared.g_c.copy_(self.all("central", self.t, 0, self.algorithm))
        self.x.add_(self.delta(augmented=True))

    def two_way(self):
        """The clients' steps add the server's gradient of the round before, and its steps theirs.
        Both changes have the whole step, so the model takes half of their sum."""
        g_f, g_c, work = self.g_f, self.shared.g_c, self.part.work
        delta_f = self.delta(augmented=True)
        delta_c, steps = self.central_delta(g_f)
        self.g_f = -delta_f / (self.lr * work.K) - g_c
        g_c.copy_(-delta_c / (self.lr * steps) - g_f)
        self.x.add_((delta_f + delta_c) / 2)

    def run(self, rounds):
        for _ in range(rounds):
            self.round()
            self.t += 1

    def parameters(self):
        self.part.y.copy_(self.x)
        return torch_models.named(self.part.module)


if __name__ == "__main__":
    protocol.serve(Engine(*sys.argv[1:]))

"""Runs rounds of one module in one way. For each line of stdin it runs one more round, and answers
with the seconds of processor time and of elapsed time that it took.

    python -m benchmarks.modules.worker plain NAME PART PARTS      a part of the clients, one thread
    python -m benchmarks.modules.worker mixfl NAME LOOPS [DEVICES]

The first line that it prints is about what was chosen, and has the seconds until then.
"""

import os
import sys
import time
from collections.abc import Iterator

import numpy as np

LEAST, LR, SEED = 40, 0.01, 0  # clients, at least


def data(case):
    """Columns, the number of clients, and of examples that each has."""
    n, clients = 2 * case.K * case.B, max(LEAST, case.S)
    return case.columns(np.random.default_rng(SEED), clients * n), clients, n


def plain(name: str, part: str, parts: str) -> Iterator[dict]:
    """For every client, K steps of SGD from a copy of the model, which is one vector."""
    import torch

    from benchmarks.modules.models import MODULES

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    case = MODULES[name]
    columns, clients, n = data(case)
    module = case.make()
    parameters = list(module.parameters())
    y = torch.cat([p.detach().flatten() for p in parameters])
    for p, own in zip(parameters, y.split([p.numel() for p in parameters]), strict=True):
        p.data = own.view_as(p)
    x, rng = y.clone(), np.random.default_rng(SEED)
    yield {}
    while True:
        total = torch.zeros_like(x)
        for client in rng.choice(clients, case.S, replace=False)[int(part) :: int(parts)]:
            rows = client * n + rng.permutation(n)[: case.K * case.B]
            own = {name: torch.from_numpy(c[rows]) for name, c in columns.items()}
            y.copy_(x)
            for k in range(case.K):
                batch = {name: c[k * case.B : (k + 1) * case.B] for name, c in own.items()}
                slopes = torch.autograd.grad(case.losses(module, batch).mean(), parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, slopes, alpha=-LR)
            total.add_(y - x)
        x.add_(total, alpha=1 / case.S)
        yield {}


def mixed(name: str, loops: str, devices: str = "") -> Iterator[dict]:
    import mixfl

    mixfl.prepare_process()
    import jax

    from benchmarks.modules.models import MODULES
    from mixfl import pytorch
    from mixfl.algorithms import ALGORITHMS
    from mixfl.engine import Simulator
    from mixfl.settings import Settings

    case = MODULES[name]
    columns, clients, n = data(case)
    model = pytorch.Model(case.make)
    store = mixfl.ClientData.from_arrays(columns, np.repeat(np.arange(clients), n))
    problem = mixfl.Problem(model.init, [mixfl.Federated(model.loss(case.losses), store)])
    s = Settings(
        rounds=10**6, cohort_size=case.S, client_batch=case.B, local_steps=case.K, client_lr=LR,
        clip="off", loops=loops, devices=int(devices) if devices else "auto",
    )  # fmt: skip
    simulator = Simulator(problem, ALGORITHMS["fedavg"].build(problem, s), s)
    begin = time.perf_counter()
    chosen = simulator.resolved()
    took, state = time.perf_counter() - begin, simulator.init()
    yield {"loops": chosen.loops, "devices": chosen.devices, "took": took}
    for result in simulator.rounds(state, 0, 10**6):
        jax.block_until_ready(result.state)
        yield {}


if __name__ == "__main__":
    rounds = {"plain": plain, "mixfl": mixed}[sys.argv[1]](*sys.argv[2:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(next(rounds), file=answers, flush=True)
    for _ in sys.stdin:
        processor, elapsed = time.process_time(), time.perf_counter()
        next(rounds)
        print(time.process_time() - processor, time.perf_counter() - elapsed, file=answers,
              flush=True)  # fmt: skip

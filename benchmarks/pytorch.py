"""The time of a round with a PyTorch model: compiled by torchax, and called out of the program.

python -m benchmarks.pytorch
"""

import dataclasses
import statistics
import time

import numpy as np
import torch.nn.functional as F
from torch import nn

import mixfl
from mixfl import pytorch
from mixfl.runs.plan import plan_of

SETTINGS = dict(cohort_size=20, local_steps=4, client_batch=8, client_lr=0.05, rounds=1000)
ROUNDS = 7


def mlp():
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, 10)

    def forward(self, tokens):
        return self.out(self.encoder(self.table(tokens)).mean(1))


def loss(net, batch):
    return F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")


def problem(make, inputs) -> mixfl.Problem:
    rng = np.random.default_rng(0)
    model, n = pytorch.Model(make), 60 * 32
    of = model.loss(loss)
    columns = {"x": inputs(rng, n), "y": rng.integers(0, 10, n)}
    clients = mixfl.ClientData.from_arrays(columns, np.repeat(np.arange(60), 32))
    central = {"x": inputs(rng, 200), "y": rng.integers(0, 10, 200)}
    return mixfl.Problem(model.init, [mixfl.Federated(of, clients), mixfl.Central(of, central)])


def round_ms(problem: mixfl.Problem) -> float:
    engine = plan_of(problem, "2wgt", SETTINGS).simulator()
    rounds = engine.rounds(engine.init(), 0, ROUNDS + 2)
    times = []
    for result in rounds:
        np.asarray(next(iter(result.state.x.values())))  # wait for it
        times.append(time.perf_counter())
    return 1000 * statistics.median(np.diff(times)[1:])


PROBLEMS = {
    "MLP 784-64-10": (mlp, lambda rng, n: rng.normal(size=(n, 784)).astype(np.float32)),
    "transformer, 2 layers of 64": (Transformer, lambda rng, n: rng.integers(0, 64, (n, 32))),
}

if __name__ == "__main__":
    for name, given in PROBLEMS.items():
        compiled = problem(*given)
        terms = [dataclasses.replace(t, loss=t.loss.in_pytorch()) for t in compiled.terms]
        called = dataclasses.replace(compiled, terms=terms)
        print(f"{name}: compiled {round_ms(compiled):.1f} ms, called {round_ms(called):.1f} ms")
        assert not any(t.loss.notes for t in compiled.terms)

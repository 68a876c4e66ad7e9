"""A step in PyTorch: its products are counted, and PyTorch is taken at once where XLA can't win."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mixfl
from mixfl import pytorch
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator, loops, native, processes
from mixfl.engine.native import Flops, Step, good
from mixfl.pytorch import trial
from mixfl.settings import Settings

S = Settings(rounds=1, cohort_size=3, client_batch=2, local_steps=2, client_lr=0.1)
N = 5  # examples of a batch that is counted


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x).view(N, 2, 3, 4), *[x.view(N, 2, 3, 4)] * 2)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


def made_and_counted(make, shape):
    def sums(module, batch):
        return module(batch["x"]).reshape(N, -1).sum(1)

    x = np.random.default_rng(0).normal(size=(N, *shape)).astype(np.float32)
    return pytorch.Model(make).loss(sums).step({"x": x})


@pytest.mark.parametrize(
    ("make", "shape", "kind", "flops"),
    [
        # Forward, and the gradient of the weights; data has none.
        (lambda: nn.Linear(3, 4), (3,), "dense", 2 * 2 * N * 3 * 4),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), (3,), "dense",
         2 * 2 * N * 3 * 4 + 3 * 2 * N * 4 * 2),
        (lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1), (3, 8, 8), "convolutions",
         2 * 2 * N * 6 * 16 * 3 * 9),
        (lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 6, 6), "convolutions", 2 * 2 * N * 8 * 16 * 9),
        (lambda: nn.ConvTranspose2d(3, 6, 2, 2), (3, 4, 4), "convolutions",
         2 * 2 * N * 3 * 16 * 6 * 4),
    ],
)  # fmt: skip
def test_products_are_counted(make, shape, kind, flops):
    step = made_and_counted(make, shape)
    assert step.flops == Flops(**{kind: flops})
    assert step.layers == (kind == "convolutions")


def test_an_lstm_is_counted_with_both_products():
    """As one operator, or as dense products where PyTorch has none for it."""
    flops = made_and_counted(Recurrent, (7, 3)).flops
    forward = 2 * N * 7 * 16 * (3 + 4)
    if flops.recurrent:
        assert flops == Flops(recurrent=3 * forward)
    else:
        assert 2 * forward <= sum(flops) <= 3 * forward


def test_attention_is_counted():
    flops = made_and_counted(Attention, (3, 8)).flops
    linear, seen = 2 * N * 3 * 8 * 8, 2 * 2 * N * 2 * 3 * 3 * 4
    assert 2 * linear + seen <= sum(flops) <= 2 * linear + 3.5 * seen


def test_counting_needs_no_other_compiler():
    known = "torch._dynamo" in sys.modules
    made_and_counted(lambda: nn.Linear(3, 4), (3,))
    assert ("torch._dynamo" in sys.modules) == known


def test_the_same_operators_have_the_same_digest():
    one, again, other = (
        made_and_counted(lambda n=n: nn.Linear(3, n), (3,)).operators for n in (4, 4, 5)
    )
    assert one == again != other


@pytest.mark.parametrize(
    ("flops", "layers", "share", "expected"),
    [
        (Flops(recurrent=100.0), 0, native.GOOD + 0.01, True),
        (Flops(recurrent=100.0), 0, native.GOOD - 0.01, False),
        (Flops(convolutions=100.0), native.LAYERS, 0.6, True),
        (Flops(convolutions=100.0), native.LAYERS - 1, 0.6, False),  # compiles quickly
        (Flops(dense=100.0), 0, 0.9, False),  # XLA may be faster
        (Flops(dense=60.0, convolutions=40.0), 20, 0.9, False),
        (Flops(dense=40.0, convolutions=60.0), 20, 0.6, True),
        (Flops(), 20, 0.0, False),
    ],
)
def test_where_pytorch_is_known_to_be_as_fast(flops, layers, share, expected):
    rate = 1e3
    seconds = sum(flops) / (rate * share) if share else 1.0
    assert good(flops, layers, seconds, rate) is expected


# The choice


def squares(module, batch):
    return module(batch["x"])[:, 0] ** 2


def problem(make=lambda: nn.Linear(3, 1), loss=squares):
    model = pytorch.Model(make)
    data = {"x": np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)}
    clients = mixfl.ClientData.from_arrays(data, client=np.repeat(np.arange(4), 3))
    return mixfl.Problem(model.init, [mixfl.Federated(model.loss(loss), clients)])


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Steps are said to take so many seconds. Returns what was measured, and never compared."""
    monkeypatch.setattr(loops, "programs_folder", lambda: tmp_path)
    monkeypatch.setattr(processes, "available", lambda: 2)
    times, asked = {"seconds": 0.01, "recurrent": 1e6}, []

    def measure():
        asked.append(1)
        return times["seconds"], 1e8

    def step(self, batch):
        assert len(batch["x"]) == S.client_batch
        flops = Flops(recurrent=times["recurrent"])
        return Step("operators", flops, 0, measure, lambda threads: lambda: times["seconds"])

    def compared(*given):
        asked.append("compiled")
        return real(*given)

    real = trial._compared
    monkeypatch.setattr(pytorch.Loss, "step", step)
    monkeypatch.setattr(trial, "_compared", compared)
    return times, asked


def simulator_of(own, **more):
    s = dataclasses.replace(S, **more)
    return Simulator(own, ALGORITHMS["fedavg"].build(own, s), s)


def test_pytorch_is_taken_at_once_and_nothing_else_is_compiled(measured, tmp_path):
    simulator = simulator_of(problem())
    for result in simulator.rounds(simulator.init(), 0, 1):
        found = jax.tree.map(np.array, result.state.x)
    assert measured[1] == [1]
    chosen = simulator.resolved()
    assert (chosen.loops, chosen.devices) == ("pytorch", 2)
    assert "PyTorch itself computes the gradients, of 2 clients at once" in [*simulator.notes()]
    assert list(json.loads((tmp_path / "loops.json").read_text()).values()) == [True]
    measured[0]["seconds"] = 1.0  # it is not measured again
    assert simulator_of(problem()).resolved().loops == "pytorch"
    assert measured[1] == [1]
    compiled = simulator_of(problem(), loops="compiled")
    for result in compiled.rounds(compiled.init(), 0, 1):
        for name, a in result.state.x.items():
            np.testing.assert_allclose(a, found[name], rtol=1e-5, atol=1e-6)
    assert compiled.resolved().loops == "compiled"
    assert measured[1] == [1, "compiled"]


@pytest.mark.parametrize(
    "more",
    [dict(loops="compiled"), dict(aggregation="median"), dict(first_layer="plain", loops="host")],
)
def test_what_is_chosen_already_is_not_measured(more, measured):
    assert simulator_of(problem(), **more).loops == "compiled"
    assert 1 not in measured[1]


def test_long_steps_are_timed_with_several_numbers_of_threads(measured):
    measured[0].update(seconds=2 * native.LONG, recurrent=1e12)
    assert simulator_of(problem()).loops == "compiled"  # so far


def test_what_fails_is_left_to_the_preflight(monkeypatch, measured):
    def fails(self, batch):
        raise RuntimeError

    monkeypatch.setattr(pytorch.Loss, "step", fails)
    assert simulator_of(problem()).steps == []


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.9, ["compiled"]), (1.1, ["compiled", "pytorch"])]
)
def test_a_compiled_round_as_fast_as_the_steps_alone_is_taken(
    ratio, expected, monkeypatch, measured
):
    timed = []

    class Trial:
        steps = 10

        def __init__(self, simulator):
            timed.append(simulator.loops)
            self.seconds = lambda: 1.0

    monkeypatch.setattr(native, "Trial", Trial)
    per_step = 1.0 / Trial.steps  # on each of two cores
    measured[0].update(seconds=per_step / ratio, recurrent=0.0)
    assert simulator_of(problem(), devices=2).resolved().loops == "compiled"
    assert timed == expected


def test_steps_of_several_clients_at_once_are_timed():
    own = problem()
    loss = own.terms[0].loss
    seconds = loss.step({"x": np.ones((2, 3), np.float32)}).of_clients(2)
    assert seconds() > 0


def test_a_run_that_pytorch_computes_checks_its_loss(measured):
    def batch_norm():
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))

    keys = dict(cohort_size=3, client_batch=2, local_steps=2, client_lr=0.1, rounds=1)
    result = mixfl.train(problem(), "fedavg", **keys)
    assert result.config["loops"] == "pytorch"
    assert "compiled" not in measured[1]
    with pytest.raises(mixfl.MixflError, match="BatchNorm"):
        mixfl.train(problem(batch_norm), "fedavg", **keys)
    with pytest.raises(mixfl.MixflError, match="one loss per example"):
        mixfl.train(problem(loss=lambda m, b: squares(m, b).mean()), "fedavg", **keys)
    draws = problem(loss=lambda m, b: squares(m, b) * torch.rand(()))
    with pytest.raises(mixfl.MixflError, match="draws"):
        mixfl.train(draws, "fedavg", **keys)
    assert "compiled" not in measured[1]


def test_a_simulator_alone_checks_its_loss(measured):
    own = problem(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    simulator = simulator_of(own)
    with pytest.raises(mixfl.MixflError, match="BatchNorm"):
        next(simulator.rounds(simulator.init(), 0, 1))
    assert "compiled" not in measured[1]

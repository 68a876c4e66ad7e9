"""Gradients by PyTorch itself: the compiled round's numbers, chosen only where that is faster."""

import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import mixfl
from mixfl import pytorch
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator, loops, native, processes
from mixfl.engine.auto import native_group
from mixfl.engine.host_calls import host_call
from mixfl.pytorch import native as by_torch
from mixfl.settings import Settings

S = Settings(
    rounds=2, cohort_size=3, client_batch=2, local_steps=5, client_lr=0.1, central_batch=6,
    central_chunk=4, loops="pytorch", devices=2,
)  # fmt: skip


class Net(nn.Module):
    """With a tied layer, a frozen one and one that is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(3, 3), nn.Linear(3, 3)
        self.again.weight = self.first.weight
        self.fixed, self.out = nn.Linear(3, 3), nn.Linear(3, 1)
        self.fixed.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.out(torch.tanh(self.fixed(self.again(torch.tanh(self.first(x))))))[:, 0]


def squares(module, batch):
    return (module(batch["x"]) - batch["y"]) ** 2


def can_not_be_compiled(module, batch):
    return squares(module, batch) * (1.0 if float(batch["x"].sum()) > 1e9 else 2.0)


def problem(function=squares):
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(4), [1, 4, 7, 12])  # unequal: batches and steps are padded
    x = rng.normal(size=(len(client), 3)).astype(np.float32)
    data = {"x": x, "y": np.sin(x.sum(1))}
    loss = pytorch.Model(Net).loss(function)
    clients = mixfl.ClientData.from_arrays(data, client=client)
    terms = [
        mixfl.Federated(loss, clients, weight=0.6),
        mixfl.Central(loss, {"x": x[:9] + 1, "y": data["y"][:9]}, weight=0.4),
    ]
    return mixfl.Problem(pytorch.Model(Net).init, terms)


PROBLEM = problem()


def trained(problem, algorithm, s):
    simulator = Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)
    for result in simulator.rounds(simulator.init(), 0, s.rounds):
        last = jax.tree.map(np.array, (result.state.x, result.info))
    return simulator, *last


SETTINGS = [
    ("fedavg", {}),
    pytest.param("2wgt", {}, marks=pytest.mark.numbers),
    ("2wgt", dict(grad_clip=0.1, proximal=0.3, weight_decay=0.1, client_opt="sgd(momentum=0.9)")),
    pytest.param("pt", {}, marks=pytest.mark.numbers),
    pytest.param("1wgt", {}, marks=pytest.mark.numbers),
    pytest.param("1wgt", dict(client_lr="cosine(0.1, 4)", local_epochs=2, local_steps=9,
                              client_opt="adam"), marks=pytest.mark.numbers),
    pytest.param("fedavg", dict(aggregation="median", devices=1), marks=pytest.mark.numbers),
    pytest.param("2wgt", dict(clip=0.01, upload="int8"), marks=pytest.mark.numbers),
    pytest.param("pt", dict(cohort_chunk=2, cohort_size=4), marks=pytest.mark.numbers),
    pytest.param("oracle", dict(devices=1), marks=pytest.mark.numbers),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "more"), SETTINGS)
def test_it_gives_what_the_compiled_round_gives(algorithm, more):
    s = dataclasses.replace(S, **more)
    simulator, x, info = trained(PROBLEM, algorithm, s)
    _, y, expected = trained(PROBLEM, algorithm, dataclasses.replace(s, loops="compiled"))
    assert simulator.resolved().loops == "pytorch"
    assert [note for note in simulator.notes() if "PyTorch itself" in note]
    assert max(np.abs(y[n] - a).max() for n, a in PROBLEM.init(jax.random.key(0)).items()) > 1e-3
    for name, a in x.items():
        np.testing.assert_allclose(a, y[name], rtol=1e-5, atol=1e-6)
    for name, value in info.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


def test_what_can_not_be_compiled_takes_this_way():
    """And PyTorch is called once for a step, not twice from a compiled program."""
    s = dataclasses.replace(S, loops="auto", rounds=1)
    own = problem(can_not_be_compiled)
    simulator, x, _ = trained(own, "2wgt", s)
    assert simulator.resolved().loops == "pytorch"
    _, y, _ = trained(own, "2wgt", dataclasses.replace(s, loops="compiled"))
    for name, a in x.items():
        np.testing.assert_allclose(a, y[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("more", "kind"), [({}, by_torch.Steps), ({"client_opt": "adam"}, by_torch.Gradients)]
)
def test_plain_steps_of_all_clients_of_a_size_are_one_call(more, kind, monkeypatch):
    calls = []

    def counted(work, given, batched):
        calls.append(type(work))
        return called(work, given, batched)

    called = by_torch.Work.__call__
    monkeypatch.setattr(by_torch.Work, "__call__", counted)
    trained(PROBLEM, "fedavg", dataclasses.replace(S, rounds=1, clip="off", **more))
    assert set(calls) == {kind}
    sizes = 2
    assert len(calls) == sizes if kind is by_torch.Steps else len(calls) > sizes


@pytest.mark.parametrize(
    ("numbers", "clients", "group"),
    [(272_000, 10, 10), (272_000, 62, 2), (1_000_000, 12, 6), (30_000_000, 12, 2)],
)
def test_a_group_has_as_many_clients_as_memory_allows_and_one_for_each_thread(
    numbers, clients, group
):
    x = {"w": jax.ShapeDtypeStruct((numbers,), np.float32)}
    assert native_group(2, clients, x) == group


def test_so_many_at_once():
    """Two threads meet in each pair of calls, and the others wait for a thread."""
    both, busy, most = threading.Barrier(2), [], []

    def one(i):
        busy.append(i)
        both.wait(60)
        most.append(len(busy))
        both.wait(60)
        busy.remove(i)
        return 2 * i

    assert by_torch.in_threads(one, 6, 2) == [0, 2, 4, 6, 8, 10]
    assert set(most) == {2}


# The choice


@pytest.mark.parametrize(
    ("one", "other", "ratio", "trials"),
    [
        ([0.2] * 9, [0.1] * 9, 2.0, native.TRIALS),
        ([0.1, 0.9, 0.1], [0.2] * 3, 0.5, 3),  # once something else ran
        ([0.105] * 9, [0.1] * 9, 1.05, native.MOST),  # close
        ([50.0], [40.0], 1.25, 1),  # too long for another one
    ],
)
def test_two_ways_take_turns(one, other, ratio, trials):
    begun = []

    def of(name, seconds):
        left = iter(seconds)
        return lambda: begun.append(name) or next(left)

    assert native.slower(of("one", one), of("other", other)) == pytest.approx(ratio)
    assert begun == ["one", "other"] * trials


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_chosen_once(faster, monkeypatch, tmp_path):
    timed = []

    class Trial:
        def __init__(self, simulator):
            self.loops, self.steps = simulator.loops, 1
            timed.append(simulator.loops)

        def seconds(self):
            return 1.0 if (self.loops == "pytorch") == faster else 1.1 * native.CLEARLY

    monkeypatch.setattr(native, "Trial", Trial)
    monkeypatch.setattr(loops, "programs_folder", lambda: tmp_path)
    s = dataclasses.replace(S, loops="auto", devices=1)

    def chosen():
        return Simulator(PROBLEM, ALGORITHMS["fedavg"].build(PROBLEM, s), s).resolved().loops

    way = "pytorch" if faster else "compiled"
    assert chosen() == way
    assert timed == ["compiled", "pytorch"]
    kept = list(json.loads((tmp_path / "loops.json").read_text()).values())
    assert kept == [False, int(faster)]  # not at once; and by timing
    assert chosen() == way
    assert len(timed) == 2  # known from the file


def test_without_a_number_of_threads_only_these_are_timed(monkeypatch, tmp_path):
    seconds = {1: 1.0, 2: 2.0}

    class Trial:
        steps = 1

        def __init__(self, simulator):
            self.seconds = lambda: seconds[simulator.devices]

    monkeypatch.setattr(native, "Trial", Trial)
    monkeypatch.setattr(loops, "programs_folder", lambda: tmp_path)
    monkeypatch.setattr(processes, "available", lambda: 2)
    s = dataclasses.replace(S, devices="auto")
    assert Simulator(PROBLEM, ALGORITHMS["fedavg"].build(PROBLEM, s), s).resolved().devices == 1


def test_fewer_threads_are_timed_for_long_steps_only(monkeypatch, tmp_path):
    class Trial:
        steps = 1

        def __init__(self, simulator):
            timed.append(simulator.devices)
            self.seconds = lambda: 0.5 * native.LONG

    timed: list[int] = []
    monkeypatch.setattr(native, "Trial", Trial)
    monkeypatch.setattr(loops, "programs_folder", lambda: tmp_path)
    monkeypatch.setattr(processes, "available", lambda: 2)
    s = dataclasses.replace(S, devices="auto")
    assert Simulator(PROBLEM, ALGORITHMS["fedavg"].build(PROBLEM, s), s).resolved().devices == 2
    assert timed == [2]


def test_a_trial_is_a_part_of_a_round():
    s = dataclasses.replace(S, cohort_size=4)
    simulator = Simulator(PROBLEM, ALGORITHMS["2wgt"].build(PROBLEM, s), s)
    simulator.resolved()
    trial = native.Trial(simulator)
    assert native._steps(trial._cut(0)) == 0
    sizes = sum(map(len, trial.piece.clients))
    assert 0 < native._steps(trial._cut(1)) <= native.STEPS * simulator.devices * sizes
    assert native._steps(trial.piece) == trial.ratio * native._steps(trial._cut(1))
    assert trial.seconds() > 0


def test_a_resumed_run_keeps_its_way(tmp_path, monkeypatch):
    keys = dict(cohort_size=3, client_batch=2, local_steps=2, client_lr=0.1, central_batch=6,
                rounds=2, eval_every=1, checkpoint_every=1)  # fmt: skip
    out = tmp_path / "run"

    def interrupt(event):
        raise KeyboardInterrupt

    monkeypatch.setattr(native, "best", lambda ways, jaxpr, steps: max(ways))
    whole = mixfl.train(PROBLEM, "2wgt", **keys)
    with pytest.raises(KeyboardInterrupt):
        mixfl.train(PROBLEM, "2wgt", out=out, callbacks=[interrupt], **keys)
    assert 'loops = "pytorch"' in (out / "config.toml").read_text()
    monkeypatch.setattr(native, "best", lambda ways, jaxpr, steps: min(ways))
    again = mixfl.train(PROBLEM, "2wgt", out=out, resume=True, **keys)
    for name, a in whole.params.items():
        np.testing.assert_array_equal(a, again.params[name])


def jax_loss(params, batch):
    return (batch["x"] @ params["w"]) ** 2


def in_jax():
    clients = mixfl.ClientData.from_arrays({"x": np.ones((4, 2), np.float32)}, client=np.arange(4))
    return mixfl.Problem(lambda key: {"w": jnp.ones(2)}, [mixfl.Federated(jax_loss, clients)])


def draws(module, batch, key):
    return nn.functional.dropout(squares(module, batch), 0.5)


@pytest.mark.parametrize(
    ("make", "algorithm", "more", "reason"),
    [
        (in_jax, "fedavg", {}, "not written in PyTorch"),
        (lambda: problem(draws), "fedavg", {}, "draws"),
        (lambda: PROBLEM, "scaffold", {}, "keep a state"),
        (lambda: PROBLEM, "fedavg", {"convolutions": "products"}, "convolutions = products"),
    ],
)
def test_it_is_refused_with_the_reason(make, algorithm, more, reason):
    own, s = make(), dataclasses.replace(S, **more)
    simulator = Simulator(own, ALGORITHMS[algorithm].build(own, s), s)
    with pytest.raises(mixfl.MixflError, match=reason):
        simulator.resolved()
    s = dataclasses.replace(s, loops="auto")
    assert Simulator(own, ALGORITHMS[algorithm].build(own, s), s).resolved().loops != "pytorch"


def test_a_call_in_a_compiled_program():
    def work(given, batched):
        return given[0] * 2 if any(batched) else given[0] + 1

    a = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.jit(lambda a: host_call(work, 3, a))(a), a + 1)
    several = jnp.stack([a, a + 5], 1)
    found = jax.jit(jax.vmap(lambda a: host_call(work, 3, a), in_axes=1))(several)
    np.testing.assert_array_equal(found, several.T * 2)
    grid = jnp.arange(12.0).reshape(2, 2, 3)
    twice = jax.jit(jax.vmap(jax.vmap(lambda a: host_call(work, 3, a)), in_axes=1))(grid)
    np.testing.assert_array_equal(twice, jnp.swapaxes(grid, 0, 1) * 2)

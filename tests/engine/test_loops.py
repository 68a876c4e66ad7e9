"""Loops on the host give the results of compiled ones, and are chosen where an operator is slow."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table_problem
from layer_problem import problem as layer_problem

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.loops import scan as loop
from mixfl.engine import Simulator, dispatch, loops
from mixfl.engine.dispatch import Dispatched
from mixfl.forms.jaxpr import jaxprs_in_params
from mixfl.settings import Settings


def tables():
    return mixfl.Problem(table_problem.init, table_problem.PROBLEMS["regularizer"]())


S = Settings(
    rounds=3, cohort_size=4, client_batch=2, local_steps=6, client_lr=0.05, devices=1,
    central_batch=8, central_chunk=3,
)  # fmt: skip


def test_loops_branches_and_results():
    def function(x, rows):
        def step(carry, row):
            inner = loop(lambda c, r: (c + jnp.sin(r), c), carry, row["a"])
            return inner[0] * row["b"], (inner[1], row["b"])

        last, stacked = loop(step, x, rows)
        return jax.lax.cond(last > 0, lambda: loop(lambda c, r: (c + r, None), last, rows["b"])[0],
                            lambda: last), {"stacked": stacked}, 2.0  # fmt: skip

    rows = {"a": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.float32([1, -2, 0.5])}
    host = Dispatched(function)
    for x in (np.float32(1), np.float32(-9)):
        for a, b in zip(
            *map(jax.tree.leaves, (host(x, rows), jax.jit(function)(x, rows))), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    (pieces, _) = next(iter(host.plans.values()))
    assert len(host.plans) == 1
    assert any(dispatch.is_loop(e) for e in pieces.jaxpr.eqns)


def models(algorithm, problem, s):
    simulator = Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)
    state, x = simulator.init(), []
    for result in simulator.rounds(state, 0, s.rounds):
        x.append(jax.tree.map(np.array, result.state.x))
    return simulator, x


MORE = [pytest.param(name, marks=pytest.mark.numbers) for name in ("1wgt", "oracle", "pretrain")]


@pytest.mark.parametrize("algorithm", ["fedavg", "2wgt", *MORE])
@pytest.mark.parametrize("make", [layer_problem, tables], ids=["layers", "tables"])
def test_the_host_gives_what_the_compiled_round_gives(algorithm, make):
    problem = make()
    s = dataclasses.replace(S, loops="compiled")
    on_host, x = models(algorithm, problem, dataclasses.replace(S, loops="host"))
    compiled, y = models(algorithm, problem, s)
    assert on_host.resolved().loops == "host"
    assert compiled.resolved().loops == "compiled"
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.numbers
def test_chunks_of_a_cohort_on_the_host():
    s = dataclasses.replace(S, loops="host", cohort_chunk=2)
    _, x = models("2wgt", layer_problem(), s)
    _, y = models("2wgt", layer_problem(), dataclasses.replace(S, loops="compiled"))
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_a_loop_in_a_loss_stays_compiled():
    def loss(params, batch):
        steps = jax.lax.scan(lambda c, _: (jnp.tanh(c * params["w"]), None), batch["x"], length=7)
        return jnp.sum(steps[0], 1)

    x = np.ones((40, 2), np.float32)
    clients = mixfl.ClientData.from_arrays({"x": x}, client=np.repeat(np.arange(4), 10))
    problem = mixfl.Problem(lambda key: {"w": jnp.ones(2)}, [mixfl.Federated(loss, clients)])
    simulator = Simulator(problem, ALGORITHMS["fedavg"].build(problem, S), S)

    def scans(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("scan", "while"):
                yield eqn
            for inner in jaxprs_in_params(eqn.params):
                yield from scans(inner)

    every = list(scans(simulator._jaxpr().jaxpr))
    own = [e for e in every if e.params.get("length") == 7]
    assert own
    assert not any(map(dispatch.is_loop, own))
    assert sum(map(dispatch.is_loop, every)) == 2  # over clients, and over steps


# The choice


def odd_problem():
    """With an operator that is not known."""

    def loss(params, batch):
        a = jnp.eye(2) + jnp.einsum("ni,nj->nij", batch["x"], batch["x"]) * params["w"] ** 2
        return jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(a), axis1=1, axis2=2)), 1)

    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    clients = mixfl.ClientData.from_arrays({"x": x}, client=np.repeat(np.arange(8), 5))
    terms = [mixfl.Federated(loss, clients), mixfl.Central(loss, {"x": x})]
    return mixfl.Problem(lambda key: {"w": jnp.ones(())}, terms)


@pytest.mark.parametrize("slow", [True, False])
def test_unknown_operators_are_timed_once(slow, monkeypatch, tmp_path):
    monkeypatch.setattr(loops, "programs_folder", lambda: tmp_path)
    calls = []

    def seconds(function, given):
        calls.append(type(function))
        host = isinstance(function, Dispatched)
        assert jax.tree.leaves(function(*given))  # it runs
        return 0.1 if host == slow else 1.0

    monkeypatch.setattr(loops, "_seconds", seconds)
    first, x = models("2wgt", odd_problem(), S)
    assert "cholesky" in first.unknown
    assert first.resolved().loops == ("host" if slow else "compiled")
    assert any("slow in a compiled loop" in note for note in first.notes()) == slow
    timed = len(calls)
    assert timed >= 2
    again, y = models("2wgt", odd_problem(), dataclasses.replace(S, seed=S.seed))
    assert len(calls) == timed  # known from the file
    assert again.resolved().loops == first.resolved().loops
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_array_equal(a, b)
    assert list(json.loads((tmp_path / "loops.json").read_text()).values()) == [slow]


def test_a_damaged_file_is_timed_again(monkeypatch, tmp_path):
    (tmp_path / "loops.json").write_text("[1, ")
    monkeypatch.setattr(loops, "programs_folder", lambda: tmp_path)
    monkeypatch.setattr(loops, "_seconds", lambda function, given: 1.0)
    simulator, _ = models("fedavg", odd_problem(), S)
    assert simulator.resolved().loops == "compiled"
    assert json.loads((tmp_path / "loops.json").read_text())


def test_what_can_not_be_timed_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(loops, "programs_folder", lambda: tmp_path)

    def fails(eqn):
        raise RuntimeError("no")

    monkeypatch.setattr(loops, "timed", fails)
    simulator, _ = models("fedavg", odd_problem(), S)
    assert simulator.resolved().loops == "compiled"
    (note,) = [n for n in simulator.notes() if "could not be timed (RuntimeError)" in n]
    assert "cholesky" in note


def test_known_operators_are_not_timed(monkeypatch):
    monkeypatch.setattr(loops, "timed", lambda eqn: pytest.fail("timed"))
    for make in (layer_problem, tables):
        simulator, _ = models("2wgt", make(), S)
        assert not simulator.unknown
        assert simulator.traces == 1

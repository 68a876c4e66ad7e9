"""The three extensions of docs/architecture.md, run as they stand there."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from deployed import assert_same, deploy, simulate
from problems import flat

import mixfl
from mixfl import aggregation
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator, auto

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def extension(name: str) -> dict:
    (code,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, f"{PAGE.name}: {name}", "exec"), names)
    return names


def trained(problem, recipe, **settings):
    s = problems.settings(rounds=4, **settings)
    simulator = Simulator(problem, recipe.build(problem, s), s)
    *_, last = simulator.rounds(simulator.init(), 0, s.rounds)
    return simulator, flat(last.state.x)


def test_the_algorithm_pulls_towards_the_servers_model():
    """A client's k-th step in closed form: with a constant gradient g, the distance from the
    server's model is -eta g (1 - (1 - eta mu)^k) / (eta mu)."""
    names = extension("algorithm")
    clients = mixfl.ClientData.from_clients({"a": {"g": np.full((3, 1), 2.0, np.float32)}})
    term = mixfl.Federated(lambda x, batch: batch["g"][:, 0] * x["w"], clients)
    problem = mixfl.Problem(lambda key: {"w": jnp.zeros(())}, [term])
    keys = dict(rounds=1, cohort_size=1, client_batch=1, local_steps=3, client_lr=0.5)
    result = mixfl.train(problem, names["fed_prox"], clip="off", **keys)
    shrink = 1 - 0.5 * names["MU"]
    assert float(result.params["w"]) == pytest.approx(
        -2.0 * (1 - shrink**3) / names["MU"], rel=1e-5
    )


def with_an_unused_column() -> mixfl.Problem:
    p = problems.problem("two terms")
    clients = p.populations[0].clients
    columns = {**clients.examples.all(), "note": np.ones((len(clients.examples), 5), np.float32)}
    owner = np.repeat(np.arange(len(clients)), clients.sizes())
    wider = mixfl.ClientData.from_arrays(columns, client=owner)
    loss = p.populations[0].loss
    return mixfl.Problem(p.init, [mixfl.Federated(loss, wider, weight=0.7), p.terms[1]])


@pytest.mark.parametrize("algorithm", ["fedavg", "2wgt"])
def test_the_form_is_exact_and_reads_less(algorithm, monkeypatch):
    problem, recipe = with_an_unused_column(), ALGORITHMS[algorithm]
    _, expected = trained(problem, recipe)
    monkeypatch.setattr(auto, "CHOOSE", (*auto.CHOOSE, extension("form")["choose"]))
    simulator, x = trained(problem, recipe)
    np.testing.assert_array_equal(x, expected)
    piece = next(simulator.feeder.pieces(simulator.at(0), 0))
    assert "note" in problem.populations[0].examples.columns
    assert set(piece.clients[0][0].batches.data) == {"x", "y"}


def test_the_step_rounds_in_the_simulator(monkeypatch):
    problem, recipe = problems.problem("two terms"), ALGORITHMS["fedavg"]
    one_round = dict(rounds=1, clip="off", weighting="uniform")
    s = problems.settings(cohort_size=1, **one_round)
    simulator = Simulator(problem, recipe.build(problem, s), s)
    state = simulator.init()
    before = flat(state.x).copy()
    (exact,) = simulator.rounds(state, 0, 1)
    monkeypatch.setattr(aggregation, "CHOOSE", (*aggregation.CHOOSE, extension("step")["choose"]))
    rounding = Simulator(problem, recipe.build(problem, s), s)
    (rounded,) = rounding.rounds(rounding.init(), 0, 1)
    change = jnp.asarray(flat(exact.state.x) - before)
    wanted = np.asarray(change.astype(jnp.bfloat16).astype(jnp.float32))
    assert np.abs(wanted - np.asarray(change)).max() > 0
    np.testing.assert_allclose(flat(rounded.state.x) - before, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.system
@pytest.mark.parametrize("algorithm", ["fedavg", "2wgt"])
@pytest.mark.parametrize("problem", ["two terms", "tables"])
def test_the_step_is_the_same_in_a_deployment(problem, algorithm, monkeypatch):
    keys = dict(rounds=2, cohort_size=4)
    exact = simulate(problem, algorithm, **keys)
    monkeypatch.setattr(aggregation, "CHOOSE", (*aggregation.CHOOSE, extension("step")["choose"]))
    rounded = simulate(problem, algorithm, **keys)
    result, _, _ = deploy(problem, algorithm=algorithm, **keys)
    assert_same(result.params, rounded.params, 1e-4)
    pairs = zip(jax.tree.leaves(rounded.params), jax.tree.leaves(exact.params), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) > 1e-5

"""What is chosen for accelerators: the same rounds, and programs that JAX can lower for them.

Lowering is all that can be tested without one. Nothing here runs on an accelerator."""

import jax
import jax.numpy as jnp
import layer_problem
import numpy as np
import pytest
import table_problem
import zoo_models
from problems import flat, problem, reference_models, settings

from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator, auto
from mixfl.engine.auto import clients_at_once
from mixfl.forms.base import Form

LARGE, SMALL = {"w": jnp.zeros(2**16)}, {"w": jnp.zeros(100)}
HOME = {"baseline": "regularizer"}
ROUNDS = 4


class Large(Form):
    large_groups = True


@pytest.mark.parametrize(
    ("platform", "clients", "x", "forms", "expected"),
    [
        ("cpu", 100, LARGE, (), 1),
        ("cpu", 100, SMALL, (), 10),
        ("cpu", 7, SMALL, (), 7),
        ("cpu", 13, SMALL, (), 1),  # a divisor
        ("cpu", 100, {"w": jax.ShapeDtypeStruct((784, 10), jnp.float32)}, (), 1),
        ("cpu", 100, SMALL, (Large(),), 100),
        ("gpu", 100, LARGE, (), 100),
        ("tpu", 100, SMALL, (), 100),
        ("gpu", 2**13, LARGE, (), 2**12),  # 2**28 numbers
        ("gpu", 100, {"w": jax.ShapeDtypeStruct((2**30,), jnp.float32)}, (), 1),
    ],
)
def test_clients_that_train_at_once(platform, clients, x, forms, expected):
    assert clients_at_once(platform, clients, x, forms) == expected


def made_for(platform, p, name, s) -> Simulator:
    return Simulator(p, ALGORITHMS[name].build(p, s), s, platform)


# On a CPU, with the choices for an accelerator


@pytest.mark.parametrize("at_once", [2**28, 8])  # all clients, or two of a model of 4 numbers
@pytest.mark.parametrize(
    "name",
    [n if n in ("fedavg", "2wgt") else pytest.param(n, marks=pytest.mark.numbers)
     for n in ALGORITHMS],
)  # fmt: skip
def test_rounds_equal_the_reference(monkeypatch, name, at_once):
    monkeypatch.setattr(auto, "AT_ONCE", at_once)
    p, s = problem(HOME.get(name, "two terms")), settings(rounds=ROUNDS, cohort_size=6, clip="off")
    simulator = made_for("gpu", p, name, s)
    expected, x0 = reference_models(name, simulator, ROUNDS)
    models = [flat(r.state.x) for r in simulator.rounds(simulator.init(), 0, ROUNDS)]
    assert np.abs(expected[-1] - x0).max() > 0.01
    np.testing.assert_allclose(models, expected, rtol=2e-4, atol=2e-5)


FORMS = {
    "rows": (lambda: table_problem.simulator("2wgt").problem, table_problem.SETTINGS),
    "low-rank": (layer_problem.problem, {}),
    "median": (problem, dict(aggregation="median", cohort_size=5)),
    "plain": (layer_problem.problem, dict(first_layer="plain", devices=2, cohort_size=6)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.numbers
def test_rounds_are_those_of_a_cpu(form):
    make, changes = FORMS[form]
    results = []
    for platform in ("cpu", "gpu"):
        simulator = made_for(platform, make(), "2wgt", settings(**{**changes, "rounds": ROUNDS}))
        *_, last = simulator.rounds(simulator.init(), 0, ROUNDS)
        results.append(jax.tree.map(np.array, (last.state, last.info)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), *results)


# Lowered


def lower(simulator, t=0):
    """The whole round, for both kinds of accelerators."""
    algorithm = simulator.at(t)
    piece = next(iter(simulator.feeder.pieces(algorithm, t)))
    export = jax.export.export(simulator.program(algorithm, t).whole, platforms=["cuda", "tpu"])
    return export(
        simulator.shapes(),
        piece.drawn,
        piece.clients,
        simulator.given(simulator.program(algorithm, t)),
    )


@pytest.mark.numbers
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_lowers(name):
    p, s = problem(HOME.get(name, "two terms")), settings(pretrain_rounds=1)
    simulator = made_for("gpu", p, name, s)
    for t in (0, 1) if name == "pretrain" else (0,):
        assert lower(simulator, t).platforms == ("cuda", "tpu")


@pytest.mark.numbers
@pytest.mark.parametrize("kind", zoo_models.KINDS)
def test_every_kind_of_model_lowers(kind):
    s = settings(cohort_size=4, client_batch=2, local_steps=2)
    simulator = made_for("gpu", zoo_models.problem(kind), "2wgt", s)
    assert lower(simulator).platforms == ("cuda", "tpu")
    used = {form.name for form in simulator.forms.of["federated"]}
    assert used == {"matrix factorization": {"rows", "lookups"}, "mlp": {"low_rank"},
                    "logistic regression": {"low_rank"}}.get(kind, set())  # fmt: skip


@pytest.mark.numbers
def test_chunks_and_several_sizes_lower():
    p, s = zoo_models.problem("mlp"), settings(cohort_size=4, client_batch=1, cohort_chunk=2)
    simulator = made_for("tpu", p, "2wgt", s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mixfl.engine.sizes.SAVED", 0.1)
        simulator = made_for("tpu", p, "2wgt", s)
    assert len(simulator.feeder.shapes[0]) > 1
    program = simulator.program(simulator.algorithm)
    piece = next(iter(simulator.feeder.pieces(simulator.algorithm, 0)))
    state, export = simulator.shapes(), jax.export.export
    both = ["cuda", "tpu"]
    export(program.begin, platforms=both)(state, piece.drawn)
    messages, errors = jax.eval_shape(program.begin, state, piece.drawn)
    empty = program.empty(messages, piece.clients, state.aggregation)
    arguments = (empty, messages, piece.clients, state.aggregation)
    export(program.accumulate, platforms=both)(*arguments)
    _, reports, _ = jax.eval_shape(program.accumulate, *arguments)
    export(program.finish, platforms=both)(state, piece.drawn, messages, errors, empty, [reports])

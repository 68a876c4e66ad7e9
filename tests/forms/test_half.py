"""compute = bfloat16: losses in bfloat16, everything else in float32."""

import jax
import jax.numpy as jnp
import layer_problem
import numpy as np
import pytest
import table_problem
from problems import clients, examples, flat, init, logistic, penalty, problem, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.errors import MixflError

KEYS = dict(rounds=4, cohort_size=5, client_batch=3, local_steps=3, client_lr=0.2, devices=1)
HALF = dict(compute="bfloat16")


@pytest.mark.parametrize("algorithm", ["2wgt", "1wgt", "oracle"])
def test_near_float32(algorithm):
    keys = {k: v for k, v in KEYS.items() if k in ALGORITHMS[algorithm].uses}
    start = flat(init(jax.random.key(0)))
    single = flat(mixfl.train(problem(), algorithm, **keys).params)
    found = flat(mixfl.train(problem(), algorithm, **keys, **HALF).params)
    assert found.dtype == np.float32
    assert 0 < np.abs(found - single).max() < 0.02 * np.abs(single - start).max()


def test_only_losses_see_bfloat16():
    seen = []

    def loss(params, batch, frozen):
        seen.append({a.dtype for a in jax.tree.leaves((params, batch["x"], frozen))})
        assert batch["i"].dtype == jnp.int32
        return logistic(params, batch) * frozen["one"]

    data = clients(1)
    columns = {**data.examples.all(), "i": np.arange(len(data.examples), dtype=np.int32)}
    owner = np.repeat(np.arange(len(data)), data.sizes())
    terms = [mixfl.Federated(loss, mixfl.ClientData.from_arrays(columns, client=owner)), penalty()]
    p, s = mixfl.Problem(init, terms, frozen={"one": jnp.ones(())}), settings(**HALF)
    simulator = Simulator(p, ALGORITHMS["2wgt"].build(p, s), s)
    del seen[:]
    *_, last = simulator.rounds(simulator.init(), 0, 2)
    assert seen
    assert all(kinds == {jnp.dtype(jnp.bfloat16)} for kinds in seen)
    assert {a.dtype for a in jax.tree.leaves(last.state.algorithm)} == {jnp.dtype(jnp.float32)}
    program = simulator.program(simulator.at(0))
    piece = next(iter(simulator.feeder.pieces(simulator.at(0), 0)))
    text = str(program.jaxpr(simulator.shapes(), piece, simulator.given(program)))
    assert "bf16" in text
    sums = [info for name, info in last.info.items() if name.startswith("train/")]
    assert all(a.dtype == jnp.float32 for a in sums)


def test_programs_are_shared_and_not_confused():
    p = problem()
    models = [flat(mixfl.train(p, "fedavg", **KEYS, compute=c).params)
              for c in ("float32", "bfloat16", "float32")]  # fmt: skip
    np.testing.assert_array_equal(models[0], models[2])
    assert (models[0] != models[1]).any()


def test_rows_are_dense():
    sparse, found, _ = table_problem.trained("2wgt", **HALF)
    assert sparse.forms.tables
    expected = table_problem.trained("2wgt", tables="dense", **HALF)[1]
    table_problem.assert_equal(found.x, expected.x, rtol=1e-2)


def test_low_rank_layers_are_refused():
    p, s = layer_problem.problem(), settings(first_layer="low-rank", **HALF)
    with pytest.raises(MixflError, match="compute = bfloat16 need"):
        Simulator(p, ALGORITHMS["2wgt"].build(p, s), s)


def test_a_loss_that_can_not_is_told_before_the_run(tmp_path):
    def loss(params, batch):
        w = jnp.concatenate([params["w"], params["b"][None]])
        return jax.lax.dot(batch["x"], w[:3]) + jax.lax.add(w[3], np.float32(1.0))

    p = mixfl.Problem(
        init, [mixfl.Federated(loss, clients(1)), mixfl.Central(loss, examples(2, 9, 0))]
    )
    with pytest.raises(MixflError, match="the loss of term 'federated' in bfloat16 failed"):
        mixfl.train(p, "fedavg", out=tmp_path / "run", **KEYS, **HALF)
    assert not (tmp_path / "run").exists()


def test_replaced_functions_are_refused():
    p, s = problem(), settings(**HALF)
    replaced = ALGORITHMS["fedavg"].build(p, s)._replace(central=lambda *_: ())
    with pytest.raises(MixflError, match="compute = bfloat16, but the algorithm's functions were"):
        Simulator(p, replaced, s)


@pytest.mark.system
def test_deployment_is_the_simulator():
    from deployed import assert_same, deploy, simulate

    found, _, _ = deploy("two terms", algorithm="2wgt", **HALF)
    assert_same(found.params, simulate("two terms", "2wgt", **HALF).params, 1e-2)

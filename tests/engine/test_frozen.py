"""Frozen arrays are arguments of the programs, and give what constants in a closure give."""

import dataclasses

import jax
import jax.numpy as jnp
import layer_problem
import numpy as np
import problems
import pytest
import table_problem
from problems import flat, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.measure.check import check
from mixfl.randomness import users_loss
from mixfl.runs.reading import load

SCALE = np.array([0.5, 2.0, -1.0], np.float32)


def scaled(params, batch, frozen):
    return problems.logistic(params, {**batch, "x": batch["x"] * frozen["scale"]})


def penalty(params, frozen):
    return problems.regularizer(params) * frozen["scale"][1]


def pair(terms="two terms", frozen=None):
    """A problem with frozen arrays, and the same with constants."""

    def of(term, constant):
        data = getattr(term, "examples", None) is not None
        loss = scaled if data else penalty
        if not constant:
            return dataclasses.replace(term, loss=loss)
        fixed = {"scale": jnp.asarray(SCALE)}
        own = (lambda p, b: loss(p, b, fixed)) if data else (lambda p: loss(p, fixed))
        return dataclasses.replace(term, loss=own)

    given = {"scale": SCALE} if frozen is None else frozen
    evaluate = lambda params: {"loss": jnp.sum(params["w"] ** 2)}  # noqa: E731
    return [
        mixfl.Problem(problems.init, [of(t, c) for t in problems.PROBLEMS[terms]()], evaluate,
                      frozen=None if c else given)
        for c in (False, True)
    ]  # fmt: skip


def rounds(problem, algorithm, **more):
    s = settings(rounds=2, **more)
    simulator = Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)
    *_, last = simulator.rounds(simulator.init(), 0, 2)
    return flat(last.state.x), simulator


FEW = [
    ("pt", "two terms", {}), ("2wgt", "population and two central terms", {}),
    ("1wgt", "two terms", {"cohort_chunk": 2}), ("baseline", "regularizer", {}),
    ("oracle", "two terms", {}), ("fedavg", "two terms", {"loops": "host"}),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "terms", "more"), FEW)
def test_same_as_constants(algorithm, terms, more):
    own, constant = (rounds(p, algorithm, **more)[0] for p in pair(terms))
    np.testing.assert_allclose(own, constant, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["low-rank", "rows"])
def test_forms(form):
    """Frozen arrays in the loss do not keep a form from being used, and it stays exact."""
    if form == "rows":
        base = mixfl.Problem(table_problem.init, table_problem.PROBLEMS["regularizer"]())
    else:
        base = layer_problem.problem()

    def with_factor(term):
        loss = term.loss
        if term.examples is None:
            return dataclasses.replace(term, loss=lambda p, frozen: loss(p) * frozen[0])
        return dataclasses.replace(term, loss=lambda p, b, frozen: loss(p, b) * frozen[0])

    terms = [with_factor(t) for t in base.terms]
    p = dataclasses.replace(base, terms=terms, frozen=[np.float32(0.7)])
    more = {"first_layer": "low-rank"} if form == "low-rank" else {"tables": "rows"}
    plain = {"first_layer": "plain", "tables": "dense"}
    found, simulator = rounds(p, "2wgt", **more)
    assert simulator.forms.low_rank if form == "low-rank" else simulator.forms.tables
    np.testing.assert_allclose(found, rounds(p, "2wgt", **plain)[0], rtol=1e-5, atol=1e-6)
    assert (rounds(base, "2wgt", **plain)[0] != found).any()


def test_they_are_arguments_of_one_program():
    """Other values, or rates, are no other program; and no constant is in it."""
    wide = np.arange(5000, dtype=np.float32)

    def loss(params, batch, frozen):
        return problems.logistic(params, batch) * frozen.sum() / 12497500

    terms = [dataclasses.replace(t, loss=loss) for t in problems.PROBLEMS["two terms"]()]
    p, s = mixfl.Problem(problems.init, terms, frozen=wide), settings()
    simulator = Simulator(p, ALGORITHMS["2wgt"].build(p, s), s)
    program = simulator.program(simulator.at(0))
    piece = next(simulator.feeder.pieces(simulator.at(0), 0))
    closed = program.jaxpr(simulator.shapes(), piece, simulator.given(program))
    assert not any(np.size(c) == 5000 for c in closed.consts)
    assert "5000" in str(closed.jaxpr.invars[-1].aval)
    for value in (wide, 2 * wide):
        given = simulator.given(program)._replace(frozen=[jnp.asarray(value)])
        program.run(program.whole, simulator.init(), piece.drawn, piece.clients, given=given)
    assert program.traces == 1
    again = Simulator(p, ALGORITHMS["2wgt"].build(p, s), s)
    assert again.program(again.at(0)) is program


def test_a_large_closure_is_noted(monkeypatch):
    own, constant = pair()
    monkeypatch.setattr("mixfl.engine.simulator.LARGE_CONSTANTS", SCALE.nbytes)
    said = [any("frozen" in n for n in rounds(p, "pt")[1].notes()) for p in (own, constant)]
    assert said == [False, True]


def test_two_devices():
    own, constant = pair()
    np.testing.assert_allclose(
        rounds(own, "2wgt", devices=2)[0], rounds(constant, "2wgt", devices=2)[0], rtol=1e-6
    )


def test_loaded_once_by_a_function():
    calls = []

    def read():
        calls.append(1)
        return {"scale": SCALE}

    own, constant = pair(frozen=read)
    assert not calls
    np.testing.assert_allclose(rounds(own, "pt")[0], rounds(constant, "pt")[0], rtol=1e-6)
    assert len(calls) == 1


def test_check_and_diagnose():
    own, constant = pair()
    lines, good = check(own, settings())
    assert good, lines
    from mixfl.measure.gradients import Gradients

    x = problems.init(jax.random.key(0))
    found, expected = (Gradients(p, settings()).dissimilarity(x, 0) for p in (own, constant))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_run_keeps_their_digest(tmp_path):
    own, _ = pair()
    s = dict(rounds=4, cohort_size=3, client_batch=2, checkpoint_every=2, eval_every=4)
    out = tmp_path / "run"
    whole = mixfl.train(own, "2wgt", out=out, **s)
    assert load(out).frozen == own.frozen_digest()
    arrays = (out / "model.safetensors").read_bytes()
    assert own.frozen_digest().encode() in arrays
    assert sorted(load(out).params) == ["b", "w"]
    (out / "model.safetensors").unlink()
    (out / "checkpoints" / "4").rename(tmp_path / "last")
    other = dataclasses.replace(own, frozen={"scale": 2 * SCALE})
    assert users_loss(other.terms[0].loss) is scaled
    with pytest.raises(MixflError, match="frozen arrays are not those"):
        mixfl.train(other, "2wgt", out=out, resume=True, **s)
    resumed = mixfl.train(own, "2wgt", out=out, resume=True, **s)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def test_evaluate_takes_them():
    own, _ = pair()
    p = dataclasses.replace(own, evaluate=lambda x, frozen: {"loss": frozen["scale"][1]})
    result = mixfl.train(p, "pt", rounds=1, cohort_size=2)
    assert result.metrics[-1]["eval/loss"] == 2.0


@pytest.mark.parametrize(
    ("frozen", "loss", "told"),
    [
        (None, scaled, "give Problem"),
        ({"scale": SCALE}, problems.logistic, "no loss has a parameter of this name"),
        ({"scale": "abc"}, scaled, "pytree of arrays"),
        ({}, scaled, "no arrays"),
    ],
)
def test_refused(frozen, loss, told):
    term = dataclasses.replace(problems.population(), loss=loss)

    def train():
        p = mixfl.Problem(problems.init, [term], frozen=frozen)
        mixfl.train(p, "fedavg", rounds=1, cohort_size=2)

    with pytest.raises(MixflError, match=told):
        train()

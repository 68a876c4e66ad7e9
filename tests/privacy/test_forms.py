"""Row-sparse tables and low-rank layers under privacy, for every algorithm that has them."""

import dataclasses

import jax
import layer_problem
import numpy as np
import problems
import pytest
import table_problem

import mixfl
from mixfl.aggregation import private
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.privacy.rules import applied

NUMBERS = pytest.mark.numbers
ALL = ["fedavg", "pt", "1wgt", "2wgt", "pretrain"]
# The form, and the plain way: keys, and what the simulator then has.
FORMS = {"rows": ("tables", "rows", "dense"), "low-rank": ("first_layer", "low-rank", "plain")}
CASES = [
    *(("rows", a) for a in ("2wgt",)), *(("low-rank", a) for a in ("2wgt",)),
    *(pytest.param(f, a, marks=NUMBERS) for f in FORMS for a in ALL if a != "2wgt"),
]  # fmt: skip


def problem(form):
    """Six clients that all take the same number of steps: only then are S and K what a run without
    privacy divides by."""
    client = np.repeat(np.arange(6), 9)
    if form == "rows":
        people = mixfl.ClientData.from_arrays(table_problem.data(0, 54), client=client)
        term = mixfl.Federated(table_problem.loss, people, 0.6, rows=table_problem.ROWS)
        other = mixfl.Central(table_problem.loss, table_problem.data(7, 30), 0.4)
        return mixfl.Problem(table_problem.init, [term, other])
    people = mixfl.ClientData.from_arrays(problems.examples(1, 54, 0.3), client=client)
    other = mixfl.Central(layer_problem.network, problems.examples(2, 40, -0.5), 0.4)
    return mixfl.Problem(
        layer_problem.init, [mixfl.Federated(layer_problem.network, people, 0.7), other]
    )


def settings(algorithm, form, plain=False, **changes):
    key, formed, without = FORMS[form]
    defaults = dict(
        rounds=4, cohort_size=6, dp_noise_multiplier=0.0, dp_clip=1e20, dp_delta=1e-6, dp_seed=1,
        devices=1, **{key: without if plain else formed},
    )  # fmt: skip
    return applied(algorithm, problems.settings(**(defaults | changes)))


def simulator_of(p, algorithm, s):
    return Simulator(p, ALGORITHMS[algorithm].build(p, s), s)


def used(simulator, form):
    return bool(simulator.forms.tables if form == "rows" else simulator.forms.low_rank)


@pytest.mark.parametrize(("form", "algorithm"), CASES)
def test_without_noise_and_limit_a_form_is_the_plain_algorithm(form, algorithm, monkeypatch):
    monkeypatch.setattr(private.Private, "cohort_seed", lambda self, state: 0)  # in the same order
    p, s = problem(form), settings(algorithm, form)
    bare = dataclasses.replace(
        settings(algorithm, form, plain=True), dp_noise_multiplier=None, dp_delta=None, dp_seed=None
    )
    ends = []
    for one, formed in ((s, True), (bare, False)):
        simulator = simulator_of(p, algorithm, one)
        assert used(simulator, form) == formed
        *_, last = simulator.rounds(simulator.init(), 0, 4)
        ends.append(jax.tree.leaves(last.state.algorithm))
    for a, b in zip(*ends, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize(("form", "algorithm"), CASES)
def test_no_client_moves_a_forms_release_further_than_the_clip_norm(form, algorithm):
    clip, t = 0.01, 3  # the model is in float32: 1e-7 of it must be far below C
    p, s = problem(form), settings(algorithm, form, dp_clip=clip)
    simulator = simulator_of(p, algorithm, s)
    step = simulator.at(t)
    program = simulator.program(step, t)

    def after(who=None):
        (piece,) = simulator.feeder.pieces(step, t)
        if who is not None:
            piece.clients[0][0].batches.mask[who] = 0
        given = simulator.given(program, t)
        start = simulator.init()
        state, *_ = program.run(program.whole, start, piece.drawn, piece.clients, given=given)
        return state

    def flat(tree):
        return np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)]).astype(float)

    whole = after()
    for who in (0, 4):
        less = after(who)
        merge = 0.5 if algorithm == "2wgt" else 1.0
        moved = np.linalg.norm(flat(whole.x) - flat(less.x)) * s.cohort_size / merge / clip
        assert 0.5 < moved <= 1.001  # every client is longer than C
        if algorithm == "2wgt":
            by_gt = np.linalg.norm(flat(whole.algorithm.gt[0]) - flat(less.algorithm.gt[0]))
            assert by_gt * s.client_lr * s.cohort_size * s.local_steps / clip <= 1.001

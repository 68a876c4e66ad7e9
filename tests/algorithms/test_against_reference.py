"""The simulator against the NumPy reference, which was written from the paper."""

import dataclasses

import numpy as np
import pytest
import reference
from problems import (
    OPTIMIZERS,
    PROBLEMS,
    REFERENCE_KEYS,
    flat,
    problem,
    reference_round,
    reference_terms,
    refuses,
    settings,
)

from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.settings import Own

CASES = {
    "plain": {},
    "steps": dict(weighting="steps", server_lr=0.7, central_lr=0.1),
    "uniform": dict(weighting="uniform", merge_lr=0.8, central_steps=2, central_batch=7),
    "server adam": dict(server_opt="adam", server_lr=0.05),
    "client momentum": dict(client_opt="momentum", server_lr=0.5),
    "client adam": dict(client_opt="adam", client_lr=0.02, weighting="steps"),
    "central momentum": dict(central_opt="momentum", central_lr=0.05),
    "all adaptive": dict(
        client_opt="momentum", server_opt="momentum", central_opt="adam", merge_opt="adam",
        merge_lr=0.05, central_lr=0.02,
    ),
    "client settings": dict(grad_clip=0.25, weight_decay=0.3, proximal=0.7, clip="off"),
    "clipped gradients": dict(grad_clip=0.25),
    "proximal momentum": dict(client_opt="momentum", proximal=0.7, weighting="steps"),
    "decay and adam": dict(client_opt="adam", client_lr=0.05, weight_decay=0.5, grad_clip=0.3),
}  # fmt: skip
ROUNDS = 6


def run_both(algorithm_id, terms, own=None, **changes):
    """The models after each round: the simulator's and the reference's. `own`: settings that only
    the algorithm has."""
    if algorithm_id == "fedclg":  # own parts of clients with one step are 0, up to rounding
        changes |= {"clip": "off"}
    names = {k: v for k, v in changes.items() if k.endswith("_opt")}
    s = settings(rounds=ROUNDS, **(changes | {k: OPTIMIZERS[v] for k, v in names.items()}))
    s = dataclasses.replace(s, own=Own(own or {}))
    p = problem(terms)
    algorithm = ALGORITHMS[algorithm_id].build(p, s)
    simulator = Simulator(p, algorithm, s)
    state = simulator.init()
    x0 = flat(state.x).astype(float)
    rounds = [reference_round(simulator.feeder, simulator.at(t), t, s) for t in range(ROUNDS)]
    given = {k: getattr(s, k) for k in REFERENCE_KEYS if getattr(s, k) != "auto"}
    given |= names | (own or {})
    expected = reference.train(
        algorithm_id, reference_terms(p), x0,
        reference.Settings(**given, pretrain_rounds=ROUNDS // 2), rounds,
    )  # fmt: skip
    models = [flat(r.state.x) for r in simulator.rounds(state, 0, ROUNDS)]
    return np.array(models), np.array(expected), x0


NUMBERS = pytest.mark.numbers
HOME = {"baseline": "regularizer"}  # every case; elsewhere those that mix most at once


def more(terms, home, case):
    """Is it in the stage `numbers`?"""
    return (terms != home and case == "steps") or case in ("proximal momentum", "decay and adam")


COMBINATIONS = [
    pytest.param(algorithm, terms, case, marks=NUMBERS if more(terms, home, case) else [])
    for algorithm in ALGORITHMS
    for home in [HOME.get(algorithm, "two terms")]
    for terms in PROBLEMS
    for case in CASES
    if terms == home or case in ("steps", "all adaptive")
]


@pytest.mark.parametrize(("algorithm", "terms", "case"), COMBINATIONS)
def test_simulator_equals_reference(algorithm, terms, case):
    try:
        models, expected, x0 = run_both(algorithm, terms, **CASES[case])
    except MixflError as error:
        # Exactly the combinations that the design rules out may refuse.
        assert refuses(algorithm, terms), error
        return
    assert not refuses(algorithm, terms)
    assert np.abs(expected[-1] - x0).max() > 0.01  # it trained at all
    np.testing.assert_allclose(models, expected, rtol=2e-4, atol=2e-5)


OWN = [
    ("fedclg", dict(correction="server")),
    ("mimelite", dict(momentum=0.5)),
    ("mimelite", dict(momentum=0.0)),
]


@pytest.mark.parametrize("terms", ["two terms", "two populations and a central term"])
@pytest.mark.parametrize("case", ["plain", "steps"])
@pytest.mark.parametrize(("algorithm", "own"), OWN)
def test_other_settings_equal_the_reference(algorithm, own, case, terms):
    models, expected, x0 = run_both(algorithm, terms, own, **CASES[case])
    assert np.abs(expected[-1] - x0).max() > 0.01
    np.testing.assert_allclose(models, expected, rtol=2e-4, atol=2e-5)


def test_mimelite_without_momentum_is_fedavg():
    models, _, _ = run_both("mimelite", "two terms", dict(momentum=0.0))
    fedavg, _, _ = run_both("fedavg", "two terms")
    np.testing.assert_allclose(models, fedavg, rtol=1e-5, atol=1e-6)

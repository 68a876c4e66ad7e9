"""Learning rates that are schedules of the round: against the reference, and what may go wrong."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from problems import (
    OPTIMIZERS,
    flat,
    init,
    problem,
    reference_round,
    reference_terms,
    settings,
)

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.measure.check import check_problem
from mixfl.optimizers import has_schedule, make
from mixfl.runs.user_input import parse_over
from mixfl.schedules import rates

ROUNDS = 6
HOME = {"baseline": "regularizer"}
PHASES = {"pretrain": 2}

SCHEDULES = dict(
    client_lr="cosine(0.4, 8)", server_lr="linear(1.0, 0.4, 5)", merge_lr="piecewise(0.9, {2: 0.5})"
)
EXPECTED = dict(
    client_lr=lambda t: 0.4 * (1 + math.cos(math.pi * t / 8)) / 2,
    server_lr=lambda t: 1.0 - 0.6 * min(t, 5) / 5,
    merge_lr=lambda t: 0.9 if t < 2 else 0.5,
)
OWN_CENTRAL = dict(central_lr=lambda t: 0.3 * 0.7**t)


@functools.cache
def run_both(name, client_opt="sgd", own_central=False):
    """The simulator after its rounds, its models and the reference's."""
    more = dict(client_opt=OPTIMIZERS[client_opt])
    more |= OWN_CENTRAL if own_central else {}
    if name in ("fedavg", "1wgt", "baseline", "example-transfer"):
        more.pop("central_lr", None)
    s = settings(rounds=ROUNDS, **SCHEDULES, **more)
    p = problem(HOME.get(name, "two terms"))
    simulator = Simulator(p, ALGORITHMS[name].build(p, s), s)
    state = simulator.init()
    x0 = flat(state.x).astype(float)
    fed = [reference_round(simulator.feeder, simulator.at(t), t, s) for t in range(ROUNDS)]
    given = reference.Settings(
        **EXPECTED, client_opt=client_opt, central_lr=more.get("central_lr"),
        pretrain_rounds=ROUNDS // 2,
    )  # fmt: skip
    expected = reference.train(name, reference_terms(p), x0, given, fed)
    states = [jax.tree.map(np.array, r.state) for r in simulator.rounds(state, 0, ROUNDS)]
    return simulator, states, np.array(expected)


CASES = [(name, "sgd", False) for name in ALGORITHMS] + [
    ("1wgt", "momentum", False), ("2wgt", "momentum", True), ("pt", "sgd", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "client_opt", "own_central"), CASES)
def test_simulator_equals_reference(name, client_opt, own_central):
    simulator, states, expected = run_both(name, client_opt, own_central)
    np.testing.assert_allclose([flat(s.x) for s in states], expected, rtol=2e-4, atol=2e-5)
    assert simulator.traces == PHASES.get(name, 1)  # no program per rate


@pytest.mark.parametrize("name", ["2wgt", "pretrain"])
def test_resumed_is_uninterrupted_bit_for_bit(name):
    first, states, _ = run_both(name)
    again = Simulator(problem(), ALGORITHMS[name].build(first.problem, first.s), first.s)
    start = jax.tree.map(jnp.array, states[1])
    resumed = [jax.tree.map(np.array, r.state) for r in again.rounds(start, 2, ROUNDS)]
    jax.tree.map(np.testing.assert_array_equal, resumed, states[2:])


KEYS = dict(rounds=4, cohort_size=5, client_batch=3, local_steps=3, devices=1, eval_every=1)


def test_a_schedule_shares_the_program_of_a_constant_rate():
    p, s = problem(), settings(client_lr=0.2)
    traced = []
    for lr in (0.2, "cosine(0.2, 9)", lambda t: 0.1 / (t + 1)):
        given = dataclasses.replace(s, client_lr=lr)
        simulator = Simulator(p, ALGORITHMS["2wgt"].build(p, given), given)
        list(simulator.rounds(simulator.init(), 0, 3))
        traced.append(simulator.traces)
    assert traced == [1, 0, 0]


def test_a_constant_schedule_is_the_constant():
    p = problem()
    models = [
        flat(mixfl.train(p, "2wgt", client_lr=lr, server_lr=lr, **KEYS).params)
        for lr in (0.25, "constant_schedule(0.25)", lambda t: 0.25)
    ]
    np.testing.assert_array_equal(models[1], models[0])
    np.testing.assert_array_equal(models[2], models[0])


def test_rows_and_the_configuration_say_the_rates(tmp_path):
    out = tmp_path / "run"
    keys = KEYS | dict(client_lr="exponential(0.2, 0.5, every=2)", server_lr=lambda t: 1 / (t + 1))
    result = mixfl.train(problem(), "pt", out=out, **keys)
    for t, row in enumerate(result.metrics):
        expected = {"client_lr": 0.2 * 0.5 ** (t / 2), "server_lr": 1 / (t + 1)}
        expected["central_lr"] = math.prod(expected.values())
        assert {k: v for k, v in row.items() if k.startswith("rate/")} == pytest.approx(
            {f"rate/{k}": v for k, v in expected.items()}, rel=1e-5
        )
    config = mixfl.load(out).config
    assert config["client_lr"] == "exponential(0.2, 0.5, every=2)"
    assert config["central_lr"] == "auto"
    assert config["server_lr"].startswith("python:test_schedules.test_rows")
    # Another function of the same name is another run.
    keys["server_lr"] = [lambda t: 1 / (t + 1), lambda t: 2 / (t + 1)][1]
    with pytest.raises(MixflError, match=r"another run .server_lr was python"):
        mixfl.train(problem(), "pt", out=out, resume=True, **keys)
    assert "rate/client_lr" not in mixfl.train(problem(), "pt", **KEYS).metrics[-1]


SHORT = {
    "cosine(0.3)": [0.3, 0.15],  # over the run's 4 rounds
    "cosine(0.3, 8, end=0.1)": [0.3, 0.1 + 0.2 * (1 + math.cos(math.pi / 4)) / 2],
    "linear(0.4, 0.2)": [0.4, 0.3],
    "linear(0.4, end=0.2, rounds=2)": [0.4, 0.2],
    "exponential(0.4, 0.25)": [0.4, 0.025],
    "warmup_cosine(0.3, 2)": [0.1, 0.3],
    "piecewise(0.1, {2: 0.05, 1: 0.3})": [0.1, 0.05],
    "cosine_decay_schedule(0.3, decay_steps=4)": [0.3, 0.15],
    "piecewise_constant_schedule(0.2, {1: 0.5, 2: 0.5})": [0.2, 0.05],
}


@pytest.mark.parametrize("text", SHORT)
def test_schedules_by_name(text):
    found = rates("client_lr", text, 4)
    assert [found[0], found[2]] == pytest.approx(SHORT[text], rel=1e-5)


BAD = {
    "cosin(0.1, 5)": "Did you mean 'cosine'",
    "fast": "a finite number above 0, or a schedule",
    "auto": "a finite number above 0, or a schedule",
    "cosine(0.1, 2)": "is 0 in round 3 of 4",
    "linear(0.1, -0.1)": "in round 3 of 4",
    "warmup_constant_schedule(0.0, 0.1, 2)": "is 0 in round 1 of 4",
    "cosine(0.1, 0)": "no number of rounds",
    "cosine()": r"Expected cosine\(start, rounds, end\)",
    "constant_schedule('a')": "can't be computed",
    "exponential(1e300, 1e300)": "is (inf|nan) in round",
    "__import__('os')": "unknown schedule",
    "cosine(open('x'))": "a finite number above 0, or a schedule",
}


@pytest.mark.parametrize("given", BAD)
def test_a_bad_schedule_is_refused_before_anything_is_written(given, tmp_path):
    with pytest.raises(MixflError, match=BAD[given]):
        mixfl.train(problem(), "fedavg", out=tmp_path / "run", **KEYS | {"client_lr": given})
    assert not (tmp_path / "run").exists()


FUNCTIONS = [
    (lambda t: 0.1 - 0.05 * t, "is -?0|is 0"),
    (lambda t: math.nan, "is nan in round 1 of 4"),
    (lambda: 0.1, "it failed: TypeError"),
    (optax.cosine_decay_schedule, "it failed: TypeError"),
]


@pytest.mark.parametrize(("function", "why"), FUNCTIONS)
def test_a_bad_function_is_refused(function, why, tmp_path):
    with pytest.raises(MixflError, match=why):
        mixfl.train(problem(), "fedavg", out=tmp_path / "run", **KEYS | {"client_lr": function})
    assert not (tmp_path / "run").exists()


def test_what_needs_the_value_of_a_rate_is_refused():
    def opt(lr):
        return optax.sgd(float(lr))

    with pytest.raises(MixflError, match=r"a learning rate is a schedule.*without float"):
        mixfl.train(problem(), "fedavg", client_opt=opt, client_lr="cosine(0.1)", **KEYS)
    # So are functions that were replaced after building: they keep the first round's rates.
    p, s = problem(), settings(client_lr="cosine(0.1)")
    replaced = fed_avg.build(p, s)._replace(central=lambda *_: ())
    simulator = Simulator(p, replaced, s)
    with pytest.raises(MixflError, match="functions were replaced"):
        list(simulator.rounds(simulator.init(), 0, 1))


def test_in_a_sweep_the_commas_of_a_schedule_do_not_separate():
    over = parse_over(["client_lr=cosine(0.1, 500),0.1,piecewise(0.1, {2: 0.3, 4: 0.1})"])
    assert over == {"client_lr": ["cosine(0.1, 500)", 0.1, "piecewise(0.1, {2: 0.3, 4: 0.1})"]}


def test_checks_of_a_problem_take_the_first_rate():
    s = settings(client_lr="cosine(0.2)", cohort_size=3)
    assert all(finding.good for finding in check_problem(problem(), s))


# Inside an optimizer


def by_hand(lr):
    """SGD whose rate falls from the tenth step on."""

    def update(g, count, params=None):
        rate = jnp.where(count < 9, lr, 0.5 * lr)
        return jax.tree.map(lambda a: -rate * a, g), count + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


def counting(lr):
    """Counts, and does nothing with it."""
    return optax.GradientTransformation(
        lambda _: jnp.zeros((), jnp.int32),
        lambda g, count, params=None: (jax.tree.map(lambda a: -lr * a, g), count + 1),
    )


INSIDE = {
    "sgd": lambda lr: optax.sgd(optax.cosine_decay_schedule(lr, 50)),
    "adam": lambda lr: optax.adam(optax.linear_schedule(lr, lr / 10, 100)),
    "chain": lambda lr: optax.chain(optax.clip(1.0), optax.masked(optax.scale_by_schedule(
        lambda count: -lr / (count + 1)), {"b": True, "w": True})),
    "injected": lambda lr: optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(lr, 0.0, 9)),
    "by hand": by_hand,
}  # fmt: skip
FINE = {
    "adam": optax.adam,
    "rate injected": lambda lr: optax.inject_hyperparams(optax.sgd)(lr),
    "adagrad": optax.adagrad,
    "chain": lambda lr: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(lr)),
    "counting": counting,
    "yogi": "yogi",
}


@pytest.mark.parametrize("kind", INSIDE)
def test_a_schedule_inside_a_client_optimizer_is_refused(kind):
    with pytest.raises(MixflError, match=r"has a schedule inside.*Give the schedule to client_lr"):
        mixfl.train(problem(), "fedavg", client_opt=INSIDE[kind], client_lr=0.1, **KEYS)


@pytest.mark.parametrize("kind", FINE)
def test_other_optimizers_have_no_schedule(kind):
    assert not has_schedule(make(FINE[kind], 0.1), init(jax.random.key(0)))


def test_a_schedule_inside_the_servers_optimizer_counts_rounds():
    given = dict(KEYS, client_lr=0.3)
    inside = mixfl.train(problem(), "fedavg", server_opt=lambda lr: optax.sgd(
        optax.piecewise_constant_schedule(lr, {2: 0.25})), server_lr=0.8, **given)  # fmt: skip
    outside = mixfl.train(problem(), "fedavg", server_lr="piecewise(0.8, {2: 0.2})", **given)
    np.testing.assert_allclose(flat(inside.params), flat(outside.params), rtol=1e-5)

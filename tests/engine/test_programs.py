"""What is compiled, and when: runs of one problem share their programs."""

import gc
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from problems import flat, problem, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import CLIENT_KEYS, algorithm
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.engine import Simulator
from mixfl.engine.ahead import Ahead

COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: COMPILED.append(name) if "backend_compile" in name else None
)
KEYS = dict(rounds=2, cohort_size=5, client_batch=3, local_steps=3, client_lr=0.2, devices=1)


def trained(p, name, **changes):
    return flat(mixfl.train(p, name, **KEYS | changes).params)


@pytest.mark.parametrize("name", ["2wgt", "fedavg", "1wgt", "oracle", "pretrain"])
def test_other_rates_and_seeds_compile_nothing_and_count(name):
    p = problem()
    trained(p, name)
    del COMPILED[:]
    other = trained(p, name, client_lr=0.05, seed=1)
    assert COMPILED == []
    # The same as with a program of its own.
    np.testing.assert_allclose(other, trained(problem(), name, client_lr=0.05, seed=1), rtol=1e-6)
    assert (other != trained(p, name, client_lr=0.1, seed=1)).any()


def test_a_model_of_weak_types_is_compiled_once():
    """jnp.full(3, 0.1) has one; what a round returns has none."""
    clients = mixfl.ClientData.from_arrays({"x": np.ones((8, 3), np.float32)}, client=np.arange(8))
    p = mixfl.Problem(
        lambda key: {"w": jax.numpy.full(3, 0.1)},
        [mixfl.Federated(lambda params, batch: batch["x"] @ params["w"], clients)],
    )
    s = settings(cohort_size=2, client_batch=1, local_steps=1)
    assert jax.tree.leaves(p.init(jax.random.key(0)))[0].weak_type
    simulator = Simulator(p, fed_avg.build(p, s), s)
    list(simulator.rounds(simulator.init(), 0, 3))
    assert simulator.traces == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_the_round_is_compiled_while_the_model_is_drawn(devices, monkeypatch):
    """In another thread, and only once. Another simulator of the problem needs no compiler."""
    p, s = problem(), settings(cohort_size=4, client_batch=3, local_steps=2, devices=devices)
    started = []
    start = Ahead.start
    monkeypatch.setattr(Ahead, "start", lambda *args: (started.append(1), start(*args)))
    simulator = Simulator(p, fed_avg.build(p, s), s)
    state = simulator.init()
    simulator.program(simulator.at(0)).ahead.wait()
    assert started == [1]
    state = simulator.program(simulator.at(0)).place(state)
    del COMPILED[:]
    (result,) = simulator.rounds(state, 0, 1)
    assert COMPILED == []
    assert simulator.traces == 1
    other = Simulator(p, fed_avg.build(p, s), s)
    (again,) = other.rounds(other.init(), 0, 1)
    assert started == [1]
    np.testing.assert_array_equal(flat(again.state.x), flat(result.state.x))


def test_what_could_not_be_compiled_ahead_is_compiled_then(monkeypatch):
    def fails():
        raise RuntimeError("no compiler")

    p, s = problem(), settings(cohort_size=4, client_batch=3, local_steps=2, devices=1)
    (want,) = rounds_of(p, s)
    traced = SimpleNamespace(lower=lambda: SimpleNamespace(compile=fails))
    monkeypatch.setattr(Ahead, "start", lambda self, _, start=Ahead.start: start(self, traced))
    (got,) = rounds_of(problem(), s)
    np.testing.assert_array_equal(flat(got.state.x), flat(want.state.x))


def rounds_of(p, s):
    simulator = Simulator(p, fed_avg.build(p, s), s)
    return list(simulator.rounds(simulator.init(), 0, 1))


def test_weights_are_not_shared():
    p = problem()
    assert (trained(p, "fedavg", w_f=0.1) != trained(p, "fedavg", w_f=0.9)).any()


@pytest.mark.parametrize("key", ["seed", "rounds"])
def test_an_algorithm_that_reads_a_key_of_the_run_is_compiled_again(key):
    @algorithm("reads", CLIENT_KEYS)
    def reads(problem, s):
        inner = fed_avg.build(problem, s)

        def update(state, *rest):
            new, info = inner.update(state, *rest)
            return new._replace(x=jax.tree.map(lambda a: a + getattr(s, key), new.x)), info

        return inner._replace(update=update)

    p = problem()
    for value in (2, 3):
        s = settings(**{key: value})
        simulator = Simulator(p, reads.build(p, s), s)
        state = simulator.init()
        plain = Simulator(p, fed_avg.build(p, s), s)
        (expected,) = plain.rounds(plain.init(), 0, 1)
        (result,) = simulator.rounds(state, 0, 1)
        np.testing.assert_allclose(flat(result.state.x), flat(expected.state.x) + value, rtol=1e-5)


def test_an_optimizer_that_needs_a_number_gets_one():
    def opt(lr):
        return optax.sgd(float(lr))

    p = problem()
    for lr in (0.2, 0.05):
        given = trained(p, "2wgt", client_opt=opt, client_lr=lr)
        usual = trained(problem(), "2wgt", client_opt=lambda r: optax.sgd(r), client_lr=lr)
        np.testing.assert_allclose(given, usual, rtol=1e-5)


FACTOR = 1.0


def test_a_constant_that_was_replaced_counts(monkeypatch):
    p = problem()
    term = p.populations[0]
    loss = term.loss
    own = mixfl.Federated(lambda x, batch: FACTOR * loss(x, batch), term.clients, term.weight)
    p = mixfl.Problem(p.init, [own, p.central[0]])
    before = trained(p, "fedavg")
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert (trained(p, "fedavg") != before).any()


def test_a_replaced_function_is_not_built_away():
    p, s = problem(), settings()
    built = fed_avg.build(p, s)
    frozen = built._replace(update=lambda state, *rest: (state, built.update(state, *rest)[1]))
    simulator = Simulator(p, frozen, s)
    state = simulator.init()
    before = flat(state.x).copy()
    (result,) = simulator.rounds(state, 0, 1)
    np.testing.assert_array_equal(flat(result.state.x), before)


def test_programs_go_with_their_problem():
    p = problem()
    trained(p, "fedavg")
    data = weakref.ref(p.populations[0].clients)
    del p
    gc.collect()
    assert data() is None


def test_the_clients_steps_are_in_the_program_once():
    p, s = problem(), settings(local_steps=1)
    term = p.populations[0]

    def loss(x, batch):
        return jax.numpy.tan(term.loss(x, batch))  # an operation that nothing else uses

    p = mixfl.Problem(p.init, [mixfl.Federated(loss, term.clients)])
    simulator = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
    piece = next(iter(simulator.feeder.pieces(simulator.algorithm, 0)))
    program = simulator.program(simulator.algorithm)
    arguments = (simulator.init(), piece.drawn, piece.clients, simulator.given(program))
    text = program.whole.lower(*arguments).as_text()
    assert text.count("tan ") + text.count("tan(") == 1

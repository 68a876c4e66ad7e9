"""One table: all algorithms x the properties that every algorithm has. And rounds by hand.

Most tests compare runs with the run of `run(algorithm)`, which is made once. Client batches of 2
and 6 local steps are just enough for the largest client, whose 12 examples make 6 batches.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import (
    PROBLEMS,
    clients,
    datacenter,
    flat,
    init,
    logistic,
    penalty,
    population,
    problem,
    reference_round,
    reference_terms,
    settings,
)

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import Draw, Sums, Upload
from mixfl.algorithms.steps import add
from mixfl.engine import Simulator
from mixfl.engine.cohort import cohort, cohort_rows
from mixfl.settings import WEIGHTINGS

ROUNDS = 6
SETTINGS = dict(
    rounds=ROUNDS, cohort_size=5, client_batch=2, local_steps=6, client_lr=0.2,
    central_steps=5, central_batch=8, devices=1,
)  # fmt: skip
HOME = {"baseline": "regularizer"}
AT_CLIENTS = [a for a in ALGORITHMS if a not in ("oracle", "central")]
PHASE = {"pretrain": ROUNDS // 2}  # the round that starts another phase

BAD = 4  # a client whose loss is not a number, see `fragile`


def fragile(params, batch):
    return logistic(params, batch) * jnp.sqrt(batch["ok"])


def bad_population():
    good = clients(1)
    ok = np.ones(len(good.examples))
    ok[good.rows(BAD)] = -1
    who = np.repeat(np.arange(len(good)), good.sizes())
    data = mixfl.ClientData.from_arrays(good.examples.all() | {"ok": ok}, client=who)
    return mixfl.Federated(fragile, data, weight=0.7)


TERMS = PROBLEMS | {
    "two terms, a bad client": lambda: [bad_population(), datacenter()],
    "regularizer, a bad client": lambda: [bad_population(), penalty()],
    "one central example": lambda: [population(), datacenter(n=1)],
}


class Run(NamedTuple):
    simulator: Simulator
    states: list[Any]  # in NumPy: before the first round, and after each
    infos: list[dict]
    compilations: list[int]  # in each round


# The own part of a client that takes one step of FedCLG is 0 up to rounding, which decides how it
# ranks among the clients' norms.
KEYS = {"fedclg": dict(clip="off")}


def build(algorithm, terms=None, **changes) -> Simulator:
    s = mixfl.Settings(**(SETTINGS | KEYS.get(algorithm, {}) | changes))
    p = mixfl.Problem(init, TERMS[terms or HOME.get(algorithm, "two terms")]())
    return Simulator(p, ALGORITHMS[algorithm].build(p, s), s)


@functools.cache
def run(algorithm, **changes) -> Run:
    simulator, before = build(algorithm, **changes), len(COMPILED)
    return go_on(simulator, simulator.init(), 0, before=before)


def go_on(simulator, state, start, stop=ROUNDS, before=None) -> Run:
    """`before`: what was compiled before `init`, whose thread may have compiled the first round."""
    states, infos, compilations = [numpy(state)], [], []
    before = len(COMPILED) if before is None else before
    for result in simulator.rounds(state, start, stop):
        compilations.append(len(COMPILED) - before)
        before = len(COMPILED)
        states.append(numpy(result.state))
        infos.append(numpy(result.info))
    return Run(simulator, states, infos, compilations)


def numpy(tree):
    return jax.tree.map(np.array, tree)


COMPILED: list[str] = []  # what JAX traced or compiled so far
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if "/compile/" in event else None
)


def assert_same_bits(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_close(found, expected, rtol=1e-5, atol=1e-6):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, found, expected)


# The contract -------------------------------------------------------------------------------------


def twice(function, *args):
    """What the function returns; called again, it returns the same bits."""
    found = function(*args)
    assert_same_bits(function(*args), found)
    return found


def by_hand(simulator, t):
    """Round t through the functions of the contract, without compiling."""
    algorithm, state = simulator.at(t), simulator.init().algorithm
    (piece,) = simulator.feeder.pieces(algorithm, t)
    with jax.disable_jit():
        messages = twice(algorithm.broadcast, state, piece.drawn)
        sums = []
        populations = simulator.problem.populations if algorithm.feed.clients else ()
        for term, message, feeds in zip(populations, messages, piece.clients, strict=True):
            each = [
                jax.tree.map(lambda a, i=i: a[i], feed)
                for feed in feeds
                for i in range(len(feed.batches.mask))
            ]
            uploads = [twice(algorithm.client, term, message, one) for one in each]
            sums.append(add(*(twice(algorithm.summand, upload) for upload in uploads)))
        central = twice(algorithm.central, state, piece.drawn)
        new_state, _ = twice(algorithm.update, state, messages, sums, central)
    return new_state


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_its_functions_are_pure_and_make_up_the_round_of_the_simulator(algorithm):
    t = PHASE.get(algorithm, 0)
    simulator = build(algorithm, cohort_size=2, local_steps=2, central_steps=2)
    state = by_hand(simulator, t)
    (result,) = simulator.rounds(simulator.init(), t, t + 1)
    assert_close(state, result.state.algorithm)


@pytest.mark.parametrize("t", [0, ROUNDS - 1])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_there_is_a_message_per_population_and_sums_have_the_shape_of_the_model(algorithm, t):
    several = algorithm in ("fedavg", "pt", "1wgt", "2wgt", "example-transfer")
    simulator = build(algorithm, "two populations and a central term" if several else None)
    algorithm, state = simulator.at(t), simulator.init().algorithm
    piece = next(iter(simulator.feeder.pieces(algorithm, t)))
    messages = jax.eval_shape(algorithm.broadcast, state, piece.drawn)
    populations = simulator.problem.populations if algorithm.feed.clients else ()
    assert len(messages) == len(piece.clients) == len(populations)
    for term, message, (feed, *_) in zip(populations, messages, piece.clients, strict=True):
        one = jax.tree.map(lambda a: a[0], feed)
        client = functools.partial(algorithm.client, term)
        upload = jax.eval_shape(client, message, one)
        assert isinstance(upload, Upload)
        sums = jax.eval_shape(algorithm.summand, upload)
        assert isinstance(sums, Sums)
        assert shapes(sums.weighted) == shapes(upload.own) == shapes(message.x) == shapes(state.x)
        for number in (sums.weight, sums.steps, sums.loss, sums.clients):
            assert number.shape == ()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_state_keeps_its_structure_shapes_and_dtypes(algorithm):
    first, *others = run(algorithm).states
    assert all(shapes(state) == shapes(first) for state in others)
    assert flat(first.x).shape == (4,)
    assert np.abs(flat(others[-1].x) - flat(first.x)).max() > 0.01  # and it trained


def shapes(tree):
    return jax.tree.map(lambda a: (a.shape, a.dtype), tree)


# One compilation ----------------------------------------------------------------------------------

WAYS = {
    "whole": {},
    "a client at a time": dict(cohort_chunk=1),
    "chunks": dict(cohort_chunk=2, central_chunk=3),  # the last of 2 + 2 + 1 clients is padded
    "two devices": dict(devices=2),  # of 3 + 2 clients
}
TABLE = [
    (algorithm, way)
    for algorithm in ALGORITHMS
    for way in WAYS
    if algorithm in AT_CLIENTS or way != "a client at a time"
]


@pytest.mark.parametrize(("algorithm", "way"), TABLE)
def test_a_run_traces_one_program_per_phase(algorithm, way):
    assert run(algorithm, **WAYS[way]).simulator.traces == (2 if algorithm in PHASE else 1)


@pytest.mark.parametrize(("algorithm", "way"), TABLE)
def test_nothing_is_traced_or_compiled_after_the_first_round_of_a_phase(algorithm, way):
    compilations = run(algorithm, **WAYS[way]).compilations
    first = {0, PHASE.get(algorithm, 0)}
    assert {t for t, n in enumerate(compilations) if n} == first


# Padding, chunks, devices -------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", AT_CLIENTS)
def test_padded_steps_change_nothing(algorithm):
    # How central examples are dealt out depends on K: let all be the same.
    terms = "one central example" if algorithm == "example-transfer" else None
    tight = run(algorithm, terms=terms)
    padded = run(algorithm, terms=terms, local_steps=20)
    assert_close(padded.states, tight.states, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("client_opt", ["sgd(momentum=0.9)", "adam"])
@pytest.mark.parametrize("algorithm", ["1wgt", "2wgt"])
def test_padding_leaves_an_optimizer_alone_beside_an_augmenting_gradient(algorithm, client_opt):
    given = dict(client_opt=client_opt, client_lr=0.05)
    tight = run(algorithm, **given)
    padded = run(algorithm, **given, local_steps=20, cohort_chunk=2)
    assert_close(padded.states, tight.states)


@pytest.mark.parametrize(
    ("t", "batch", "expected"), [([0], 1, 0.0), ([0, 0, 5], 2, 1.0)], ids=["step", "example"]
)
def test_padding_may_even_have_no_finite_gradient(t, batch, expected):
    # From x = 1, a step of length 1 reaches t = 0, where |x - t| in this form has no derivative;
    # the next step goes from there to 1 (towards 5), or is padding.
    loss = lambda x, batch: jnp.sqrt((x - batch["t"]) ** 2)  # noqa: E731
    data = mixfl.ClientData.from_arrays({"t": np.array(t, float)}, client=[0] * len(t))
    p = mixfl.Problem(lambda key: jnp.ones(()), [mixfl.Federated(loss, data)])
    last = len(t) - 1
    order = lambda seed: cohort_rows(seed, 0, 0, [0], [0], [len(t)], 2, batch)[0].ravel()  # noqa: E731
    seed = next(seed for seed in range(100) if order(seed)[last] == last)  # 5 comes last
    s = settings(cohort_size=1, client_batch=batch, local_steps=2, client_lr=1.0, seed=seed)
    simulator = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
    (result,) = simulator.rounds(simulator.init(), 0, 1)
    assert int(result.info["clients/rejected"]) == 0
    assert float(result.state.x) == expected


@pytest.mark.parametrize(("algorithm", "way"), [row for row in TABLE if row[1] != "whole"])
def test_chunks_and_devices_change_nothing_but_rounding(algorithm, way):
    whole, parts = run(algorithm), run(algorithm, **WAYS[way])
    assert_close(parts.states, whole.states)
    assert_close(parts.infos, whole.infos)


def test_chunks_on_two_devices_change_nothing_but_rounding():
    parts = run("2wgt", devices=2, cohort_chunk=2, central_chunk=3)
    assert_close(parts.states, run("2wgt").states)


# Chance, and going on -----------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_seed_decides_every_bit(algorithm):
    first = run(algorithm)
    again = build(algorithm)
    assert_same_bits(go_on(again, again.init(), 0).states, first.states)
    # Another seed, from the same model and with the same compiled round: other data.
    other = Simulator(again.problem, again.algorithm, dataclasses.replace(again.s, seed=1))
    other.programs = again.programs
    x = go_on(other, again.init(), 0).states[1].x
    assert (flat(x) != flat(first.states[1].x)).any()


# What clients keep is not in a state: for scaffold, see tests/engine/test_client_states.py.
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a != "scaffold"])
def test_resumed_is_uninterrupted_bit_for_bit(algorithm):
    whole = run(algorithm)
    saved = jax.tree.map(jnp.array, whole.states[3])
    resumed = go_on(build(algorithm), saved, 3)
    assert_same_bits(resumed.states, whole.states[3:])
    assert_same_bits(resumed.infos, whole.infos[3:])


@pytest.mark.parametrize("algorithm", AT_CLIENTS)
def test_all_algorithms_see_the_same_clients_and_batches(algorithm):
    fedavg, other = run("fedavg").simulator, run(algorithm).simulator
    for t in range(PHASE.get(algorithm, 0), ROUNDS):
        (expected,) = fedavg.feeder.pieces(fedavg.at(t), t)
        (found,) = other.feeder.pieces(other.at(t), t)
        batches = [[f.batches for feeds in p.clients for f in feeds] for p in (found, expected)]
        assert_same_bits(*batches)


@pytest.mark.parametrize(("algorithm", "steps"), [("1wgt", 1), ("2wgt", 5), ("central", 5)])
def test_all_algorithms_see_the_same_central_batches(algorithm, steps):
    pt, other = run("pt").simulator, run(algorithm).simulator
    for t in range(ROUNDS):
        (expected,), (found,) = (list(s.feeder.pieces(s.at(t), t)) for s in (pt, other))
        assert len(found.drawn[1].mask) == steps
        first = jax.tree.map(lambda a: a[:steps], expected.drawn[1])
        assert_same_bits(found.drawn[1], first)


def test_clients_go_through_a_fresh_permutation_each_round():
    sizes, K, batch = [1, 4, 5, 6, 9], 3, 2
    owner = np.repeat(np.arange(len(sizes)), sizes)
    data = mixfl.ClientData.from_arrays({"row": np.arange(len(owner))}, client=owner)
    p = mixfl.Problem(init, [mixfl.Federated(logistic, data)])
    s = settings(cohort_size=4, client_batch=batch, local_steps=K)
    feeder = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s).feeder
    cohorts, orders = set(), [[] for _ in sizes]
    for t in range(8):
        (piece,) = feeder.pieces(ALGORITHMS["fedavg"].build(p, s), t)
        found, mask, _ = piece.clients[0][0].batches
        chosen = [owner[row] for row in found["row"][:, 0, 0]]
        assert len(set(chosen)) == 4  # nobody twice
        cohorts.add(tuple(sorted(chosen)))
        for client, rows, real in zip(chosen, found["row"], mask > 0, strict=True):
            seen = min(sizes[client], K * batch)
            assert real.sum() == seen
            assert real.any(axis=1).sum() == -(-seen // batch)  # K_i
            assert (np.flatnonzero(real) == np.arange(seen)).all()  # only the last is short
            assert len(set(rows[real])) == seen  # no repeats
            assert (owner[rows] == client).all()  # padding, too, is its own
            orders[client].append(tuple(rows[real]))
    assert len(cohorts) > 1
    largest = orders[-1]  # takes 6 of its 9 rows
    assert len(set(largest)) == len(largest) > 3
    assert set().union(*largest) == set(np.flatnonzero(owner == 4))


# Clients: broken ones, and their weights ----------------------------------------------------------


@pytest.mark.parametrize("algorithm", AT_CLIENTS)
def test_a_client_whose_loss_is_not_finite_is_left_out(algorithm):
    terms = HOME.get(algorithm, "two terms")
    simulator, states, infos, _ = run(algorithm, terms=f"{terms}, a bad client")
    rounds, rejected = [], []
    for t in range(ROUNDS):
        r = reference_round(simulator.feeder, simulator.at(t), t, simulator.s)
        bad = [i for i, batches in enumerate(r.clients[0]) if (batches[0]["ok"] < 0).any()]
        without = lambda of, bad=bad: [[c for i, c in enumerate(of[0]) if i not in bad]]  # noqa: E731
        rest = {name: without(getattr(r, name)) for name in ("clients", "shares", "who")}
        rounds.append(dataclasses.replace(r, **rest))
        rejected.append(len(bad))
    assert sorted(set(rejected)) == [0, 1]  # with and without it
    assert [info["clients/rejected"] for info in infos] == rejected
    first = PHASE.get(algorithm, 0)
    assert [i["clients/federated"] for i in infos[first:]] == [5 - n for n in rejected[first:]]
    s = reference.Settings(client_lr=simulator.s.client_lr, pretrain_rounds=first)
    x0 = flat(states[0].x)
    expected = reference.train(algorithm, reference_terms(problem(terms)), x0, s, rounds)
    np.testing.assert_allclose([flat(s.x) for s in states[1:]], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("way", ["chunks", "two devices"])
def test_padding_is_not_counted_as_a_rejected_client(way):
    # The padding of a piece is made from its first client. Let that one be the bad one.
    first = {"chunks": 4, "two devices": 0}[way]
    seed = next(n for n in range(100) if cohort(n, 0, 0, 8, 5)[first] == BAD)
    simulator = build("fedavg", "two terms, a bad client", seed=seed, **WAYS[way])
    (result,) = simulator.rounds(simulator.init(), 0, 1)
    assert (result.info["clients/rejected"], result.info["clients/federated"]) == (1, 4)


def test_a_client_whose_part_of_the_sum_overflows_is_left_out():
    # The slope is finite, and so is the change; ten times the change is not.
    loss = lambda x, batch: batch["slope"] * x  # noqa: E731
    data = {"slope": np.append(np.full(10, 1e38), 1.0)}
    data = mixfl.ClientData.from_arrays(data, client=[0] * 10 + [1])
    p = mixfl.Problem(lambda key: jnp.zeros(()), [mixfl.Federated(loss, data)])
    s = settings(cohort_size=2, client_batch=10, local_steps=1, client_lr=1.0)
    simulator = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
    (result,) = simulator.rounds(simulator.init(), 0, 1)
    assert (result.info["clients/rejected"], result.info["clients/federated"]) == (1, 1)
    assert float(result.state.x) == -1.0


@pytest.mark.parametrize("algorithm", AT_CLIENTS)
def test_weighting_by_examples_steps_and_uniform_differ(algorithm):
    models = [flat(run(algorithm, weighting=w).states[-1].x) for w in WEIGHTINGS]
    for one, other in itertools.combinations(models, 2):
        assert np.abs(one - other).max() > 1e-3


# Rounds by hand -----------------------------------------------------------------------------------


def square(x, batch):
    return 0.5 * jnp.sum((x - batch["t"]) ** 2, axis=1)


X_0 = np.array([4.0, 2.0, 0.0])
T_A = [0.0, 2.0, 4.0]  # a client with one example: K_A = p_A = 1
T_B = [8.0, -2.0, 0.0]  # a client with three: K_B = p_B = 3
T_C = [0.0, 4.0, 4.0]  # the server's, with weight 1/2 and J = 2


def three_elements(algorithm, rounds):
    """States after each round: eta = eta_c = 1/2. All numbers are short binary fractions."""
    data = mixfl.ClientData.from_arrays({"t": np.array([T_A, T_B, T_B, T_B])}, client=[0, 1, 1, 1])
    terms = [mixfl.Federated(square, data), mixfl.Central(square, {"t": np.array([T_C])}, 0.5)]
    p = mixfl.Problem(lambda key: jnp.array(X_0, jnp.float32), terms)
    s = settings(cohort_size=2, client_batch=1, local_steps=3, central_steps=2, client_lr=0.5)
    simulator = Simulator(p, ALGORITHMS[algorithm].build(p, s), s)
    return go_on(simulator, simulator.init(), 0, rounds).states[1:]


# A client's step halves the way to its t; without augmentation, from X_0:
DELTA_A = np.array([2.0, 2.0, 2.0]) - X_0
DELTA_B = np.array([7.5, -1.5, 0.0]) - X_0  # over [6, 0, 0] and [7, -1, 0]
DELTA_F = (1 * DELTA_A + 3 * DELTA_B) / 4
# A central step goes a quarter of the way to T_C:
DELTA_C = np.array([2.25, 2.875, 1.75]) - X_0  # over [3, 2.5, 1]


def test_fedavg_by_hand():
    (state,) = three_elements("fedavg", 1)
    np.testing.assert_array_equal(X_0 + DELTA_F, [6.125, -0.625, 0.5])
    np.testing.assert_array_equal(state.x, X_0 + DELTA_F)


def test_pt_by_hand():
    (state,) = three_elements("pt", 1)
    np.testing.assert_array_equal(X_0 + DELTA_F + DELTA_C, [4.375, 0.25, 2.25])
    np.testing.assert_array_equal(state.x, X_0 + DELTA_F + DELTA_C)


def test_1wgt_by_hand():
    (state,) = three_elements("1wgt", 1)
    # g_c = (X_0 - T_C) / 2 = [2, -1, -2]; a step halves the way to t - g_c,
    # for A to [-2, 3, 6]:
    delta_a = np.array([1.0, 2.5, 3.0]) - X_0
    # for B to [6, -1, 2], over [5, 0.5, 1] and [5.5, -0.25, 1.5]:
    delta_b = np.array([5.75, -0.625, 1.75]) - X_0
    np.testing.assert_array_equal(state.x, X_0 + (1 * delta_a + 3 * delta_b) / 4)


def test_2wgt_by_hand():
    first, second = three_elements("2wgt", 2)
    x_1 = X_0 + (DELTA_F + DELTA_C) / 2
    np.testing.assert_array_equal(x_1, [4.1875, 1.125, 1.125])
    np.testing.assert_array_equal(first.x, x_1)
    gt_f = -(DELTA_A + DELTA_B) / (0.5 * (1 + 3))
    gt_c = -DELTA_C / (0.5 * 2)
    np.testing.assert_array_equal([gt_f, gt_c], [[-0.75, 1.75, -1.0], [1.75, -0.875, -1.75]])
    np.testing.assert_array_equal(first.algorithm.gt, [gt_f, gt_c])
    # In the second round a client's step halves the way to t - gt_c,
    # for A to [-1.75, 2.875, 5.75]:
    delta_a = np.array([1.21875, 2.0, 3.4375]) - x_1
    # for B to [6.25, -1.125, 1.75], over [5.21875, 0, 1.4375] and [5.734375, -0.5625, 1.59375]:
    delta_b = np.array([5.9921875, -0.84375, 1.671875]) - x_1
    # and a central step goes to 3/4 x + [0.375, 0.125, 1.5], over [3.515625, 0.96875, 2.34375]:
    delta_c = np.array([3.01171875, 0.8515625, 3.2578125]) - x_1
    x_2 = x_1 + ((1 * delta_a + 3 * delta_b) / 4 + delta_c) / 2
    np.testing.assert_array_equal(second.x, x_2)
    np.testing.assert_array_equal(
        second.algorithm.gt, [-(delta_a + delta_b) / (0.5 * 4) - gt_c, -delta_c / (0.5 * 2) - gt_f]
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_half_precision_stays_half_precision(algorithm):
    s = mixfl.Settings(**SETTINGS)
    terms = TERMS[HOME.get(algorithm, "two terms")]()
    half = lambda key: jax.tree.map(lambda a: a.astype(jnp.bfloat16), init(key))  # noqa: E731
    p = mixfl.Problem(half, terms)
    simulator = Simulator(p, ALGORITHMS[algorithm].build(p, s), s)
    start = simulator.init()
    results = [numpy(r.state) for r in simulator.rounds(simulator.init(), 0, ROUNDS)]
    for state in results:
        assert jax.tree.map(lambda a: a.dtype, state) == jax.tree.map(lambda a: a.dtype, start)
    assert simulator.traces == (2 if algorithm in PHASE else 1)


def test_the_server_draws_what_the_design_says():
    """S |B_i| for pt, 2wgt and the oracle, K S |B_i| for 1wgt; no more than there is."""
    p = mixfl.Problem(init, [population(), datacenter(n=10_000)])
    s = settings(cohort_size=5, client_batch=4, local_steps=3, central_steps=2)
    draw = {a: ALGORITHMS[a].build(p, s).feed.draw for a in ("pt", "1wgt", "2wgt", "oracle")}
    assert draw["pt"] == draw["2wgt"] == (None, Draw(2, 20))
    assert draw["1wgt"] == (None, Draw(1, 60))
    assert draw["oracle"] == (Draw(3, 20), Draw(3, 20))
    few = mixfl.Problem(init, [population(), datacenter(n=7)])
    assert ALGORITHMS["1wgt"].build(few, s).feed.draw == (None, Draw(1, 7))

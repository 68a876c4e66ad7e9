"""Clients of very unequal size are padded to one of a few sizes: the same rounds, far less work."""

import contextlib
import dataclasses
import itertools

import jax
import layer_problem
import numpy as np
import pytest
import table_problem
from problems import (
    clients,
    datacenter,
    flat,
    init,
    logistic,
    population,
    reference_models,
    reference_round,
    settings,
)

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator, cohort, sizes
from mixfl.engine.feeding import Feeder
from mixfl.engine.sizes import Places, Shape, client_shapes, counted, places, seat

ONE_LARGE = [20] * 100 + [4000]
UNEQUAL = (1, 2, 40, 3, 2, 1, 4, 17, 2, 3, 1, 2)  # with K = 8 and |B_i| = 3: 1 to 8 steps
ROUNDS = 4


def federated(sizes, **options):
    return mixfl.Federated(logistic, clients(1, sizes), **options)


def lognormal(n=300):
    return np.random.default_rng(0).lognormal(3, 1.3, n).astype(int) + 1


def unequal(terms=None, **changes):
    """A problem with several sizes, and its settings."""
    p = mixfl.Problem(init, terms or [population(sizes=UNEQUAL), datacenter()])
    return p, settings(**(dict(rounds=ROUNDS, cohort_size=6, local_steps=8) | changes))


def simulate(name, p, s, rounds=ROUNDS):
    simulator = Simulator(p, ALGORITHMS[name].build(p, s), s)
    results = simulator.rounds(simulator.init(), 0, rounds)
    return simulator, [r._replace(state=jax.tree.map(np.array, r.state)) for r in results]


@contextlib.contextmanager
def one_size():
    """All clients are padded to the largest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "MOST", 1)
        yield


# Which sizes


@pytest.mark.parametrize(
    ("examples", "K", "expected"),
    [
        (ONE_LARGE, 50, [(2, 10), (50, 10)]),
        (ONE_LARGE, 10**6, [(2, 10), (400, 10)]),
        ([20] * 100, 50, [(2, 10)]),
        ([20] * 100 + [30] * 50, 50, [(3, 10)]),  # it would save little
        ([1] * 50 + [160] * 50, 1, [(1, 10)]),  # starting a step costs more than its examples
    ],
)
def test_a_size_must_pay(examples, K, expected):
    s = settings(client_batch=10, local_steps=K)
    found = client_shapes(federated(examples), s)
    # Halvings of 400 are 200, 100, 50, 25, 13, 7, 4, 2; those of 50 end with 4, 2 as well.
    assert found == expected


def test_there_are_few_sizes_and_every_client_fits():
    term, s = federated(lognormal()), settings(client_batch=4, local_steps=100)
    shapes = client_shapes(term, s)
    assert 2 <= len(shapes) <= sizes.MOST
    fit = sizes.smallest_fit(term.clients.sizes(), shapes)
    for n, shape in zip(term.clients.sizes(), np.array(shapes)[fit], strict=True):
        held = min(n, 400)
        assert -(-held // 4) <= shape[0]
        assert min(held, 4) <= shape[1]


def test_robust_aggregations_compare_clients_of_one_size():
    s = settings(client_batch=10, local_steps=50, aggregation="median")
    assert client_shapes(federated(ONE_LARGE), s) == [(50, 10)]


def test_most_cohorts_fit_into_the_places_of_one_piece():
    term, s = federated(lognormal()), settings(client_batch=4, local_steps=100)
    shapes, n = client_shapes(term, s), term.clients.sizes()
    for chunk, devices in ((20, 1), (20, 2), (300, 2)):
        found = places(counted(n, shapes), shapes, chunk, devices, 10)
        assert all(size.number % devices == 0 for size in found)
        left = [
            len(seat(n[cohort.cohort(0, t, 0, len(n), chunk)], found, devices)[1])
            for t in range(100)
        ]
        assert np.mean(np.array(left) > 0) <= 0.05
        if chunk == len(n):
            assert sum(size.number for size in found) < len(n) + len(found) * 10 * devices


def test_seats_are_the_smallest_that_fit_then_larger_ones_then_none():
    sizes = [Places(Shape(1, 3), 2), Places(Shape(4, 3), 2)]
    (small, large), left = seat(np.array([3, 12, 2, 1, 7, 5]), sizes, 1)
    assert small.tolist() == [0, 2]
    assert large.tolist() == [1, 4]
    assert left.tolist() == [3, 5]
    (small, large), left = seat(np.array([3, 1, 2]), sizes, 2)
    assert (small.tolist(), large.tolist(), left.tolist()) == ([0, 1], [2, -1], [])
    rare = [sizes[0], sizes[1]._replace(rare=True)]
    assert len(seat(np.array([3, 1]), rare, 1)[0]) == 1
    assert len(seat(np.array([3, 1, 2]), rare, 1)[0]) == 2


# What is fed


def examples_fed(p, s, rounds=50):
    """Examples in rounds: real ones, with the padding of real clients, with empty places."""
    feeder, algorithm = Feeder(p, s), ALGORITHMS["fedavg"].build(p, s)
    real = padded = all_ = 0
    for t in range(rounds):
        for piece in feeder.pieces(algorithm, t):
            for feed in piece.clients[0]:
                mask = feed.batches.mask
                real += mask.sum()
                padded += mask[mask.any((1, 2))].size
                all_ += mask.size
    return real, padded, all_


def test_one_large_client_does_not_pad_the_others():
    p = mixfl.Problem(init, [federated(ONE_LARGE)])
    s = settings(cohort_size=20, client_batch=10, local_steps=400)
    real, padded, all_ = examples_fed(p, s)
    assert real == padded
    assert all_ < 1.1 * real  # empty places of the large size are left out


def test_padding_is_bounded_for_clients_of_many_sizes():
    p = mixfl.Problem(init, [federated(lognormal())])
    s = settings(cohort_size=20, client_batch=4, local_steps=100)
    real, padded, all_ = examples_fed(p, s)
    assert padded < 2.5 * real
    with one_size():
        alike = examples_fed(p, s)
    assert alike[0] == real
    assert alike[2] > 3 * padded
    assert alike[2] > 1.5 * all_


@pytest.mark.parametrize("chunk", ["auto", 4])
def test_the_same_clients_read_the_same_batches(chunk):
    def read(name):
        p, s = unequal([population(sizes=UNEQUAL), datacenter(n=500)], cohort_chunk=chunk)
        feeder, algorithm = Feeder(p, s), ALGORITHMS[name].build(p, s)
        found = []
        for t in range(ROUNDS):
            r = reference_round(feeder, algorithm, t, s)
            both = zip(r.clients[0], r.shares[0] or r.clients[0], strict=True)
            found.append(sorted(repr(client) for client in both if client[0]))
        return feeder, found

    for name in ("fedavg", "example-transfer"):
        feeder, several = read(name)
        assert len(feeder.places[0]) > 1
        with one_size():
            assert several == read(name)[1]
        assert all(len(clients) == 6 for clients in several)


@pytest.mark.parametrize("chunk", [2, 6])
def test_the_parts_of_processes_are_the_whole(chunk):
    p, s = unequal(cohort_chunk=chunk)
    algorithm = ALGORITHMS["example-transfer"].build(p, s)
    for t in range(ROUNDS):
        whole = list(Feeder(p, s, 4).pieces(algorithm, t))
        parts = [list(Feeder(p, s, 4, own=(i, 2)).pieces(algorithm, t)) for i in range(2)]
        for piece, *some in zip(whole, *parts, strict=True):
            joined = jax.tree.map(lambda *a: np.concatenate(a), *(b.clients for b in some))
            for found, expected in zip(joined[0], piece.clients[0], strict=True):
                real = expected.batches.mask.any((1, 2))
                np.testing.assert_array_equal(found.batches.mask, expected.batches.mask)
                jax.tree.map(
                    lambda a, b, real=real: np.testing.assert_array_equal(a[real], b[real]),
                    (found.batches.data, found.share), (expected.batches.data, expected.share),
                )  # fmt: skip


# What is computed


NAMES = ("fedavg", "pt", "1wgt", "2wgt", "example-transfer", "pretrain")
QUICK = [("fedavg", "auto", 1), ("2wgt", 4, 2), ("example-transfer", "auto", 2)]


@pytest.mark.parametrize(
    ("name", "chunk", "devices"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.numbers)
        for case in itertools.product(NAMES, ("auto", 4), (1, 2))
    ],
)
def test_rounds_equal_the_reference(name, chunk, devices):
    p, s = unequal(cohort_chunk=chunk, devices=devices, clip="off")
    simulator, results = simulate(name, p, s)
    assert len(simulator.feeder.places[0]) > 1
    expected, x0 = reference_models(name, simulator, ROUNDS)
    assert np.abs(expected[-1] - x0).max() > 0.01
    models = [flat(r.state.x) for r in results]
    np.testing.assert_allclose(models, expected, rtol=2e-4, atol=2e-5)
    assert results[-1].info["clients/federated"] == 6


@pytest.mark.parametrize(
    ("clip", "opt"), [(0.02, "sgd"), pytest.param("quantile", "adam", marks=pytest.mark.numbers)]
)
def test_clipping_sees_the_same_clients(clip, opt):
    changes = dict(clip=clip, client_opt=opt, client_lr=0.05)
    simulator, several = simulate("2wgt", *unequal(**changes))
    assert len(simulator.feeder.places[0]) > 1
    with one_size():
        _, alike = simulate("2wgt", *unequal(**changes))
    clipped = [r.info["clients/clipped"].item() for r in several]
    assert clipped == [r.info["clients/clipped"].item() for r in alike]
    assert sum(clipped) > 0 or clip == "quantile"
    for a, b in zip(several, alike, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
                     a.state, b.state)  # fmt: skip


def test_a_client_that_is_not_finite_is_left_out_wherever_it_sits():
    def poisoned(params, batch):
        return logistic(params, batch) + np.float32(np.inf) * (batch["x"][:, 0] > 2.5)

    def infos():
        p = mixfl.Problem(init, [mixfl.Federated(poisoned, clients(1, UNEQUAL))])
        _, results = simulate("fedavg", *unequal(p.terms))
        return [(r.info["clients/rejected"].item(), flat(r.state.x)) for r in results]

    several = infos()
    with one_size():
        alike = infos()
    assert [n for n, _ in several] == [n for n, _ in alike]
    assert sum(n for n, _ in several) > 0
    np.testing.assert_allclose([x for _, x in several], [x for _, x in alike], rtol=1e-4, atol=1e-5)


def test_programs_are_as_few_as_the_sizes():
    p = mixfl.Problem(init, [federated(ONE_LARGE)])
    s = settings(cohort_size=20, client_batch=10, local_steps=400)
    simulator, _ = simulate("fedavg", p, s, rounds=30)
    cohorts = [cohort.cohort(s.seed, t, 0, 101, 20) for t in range(30)]
    assert {100 in c for c in cohorts} == {True, False}
    assert simulator.traces == 2
    assert any("2 x 10, 400 x 10" in note for note in simulator.notes())


def test_a_resumed_run_has_the_same_bits():
    p, s = unequal()
    _, whole = simulate("2wgt", p, s)
    other = Simulator(p, ALGORITHMS["2wgt"].build(p, s), s)
    resumed = list(other.rounds(jax.tree.map(jax.numpy.asarray, whole[1].state), 2, ROUNDS))
    jax.tree.map(np.testing.assert_array_equal, resumed[-1].state, whole[-1].state)


# In other forms


@contextlib.contextmanager
def any_size(alone: bool):
    """Several sizes, however little they save; with `alone`, clients train one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "SAVED", 0.1)
        if alone:
            patch.setattr("mixfl.engine.auto.SMALL_MODEL", 0)
        yield


@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.numbers)])
@pytest.mark.numbers
def test_row_sparse_tables_of_several_sizes(alone):
    _, expected, info = table_problem.trained("2wgt", tables="dense")
    one = table_problem.simulator("2wgt")
    with any_size(alone):
        simulator, state, other = table_problem.trained.__wrapped__("2wgt")
        assert simulator.forms.tables
        (used,) = simulator.feeder.shapes
        assert len(used) > 1
        most = [simulator.forms.sized("federated", shape)[0].most for shape in used]
        assert [m["towers/items"] for m in most] == sorted({m["towers/items"] for m in most})
    table_problem.assert_equal(state.x, expected.x)
    assert other["clients/federated"] == info["clients/federated"]
    assert [simulator.round_bytes(t) for t in (0, 19)] == [one.round_bytes(t) for t in (0, 19)]


@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.numbers)])
@pytest.mark.numbers
def test_low_rank_layers_of_several_sizes(alone):
    with any_size(alone):
        simulator, _ = layer_problem.agree(
            layer_problem.problem(), "2wgt", settings(rounds=4), tolerance=1e-4
        )
        assert len(simulator.feeder.shapes[0]) > 1


@pytest.mark.numbers
def test_a_form_may_pay_for_small_clients_only():
    people = layer_problem.people(sizes=[6] * 30 + [300])
    p = mixfl.Problem(layer_problem.init, [mixfl.Federated(layer_problem.network, people)])
    s = settings(rounds=8, cohort_size=10, local_steps=100)
    simulator, last = layer_problem.trained(p, "fedavg", s)
    small, large = simulator.feeder.shapes[0]
    assert [len(simulator.forms.sized("federated", shape)) for shape in (small, large)] == [1, 0]
    _, plain = layer_problem.trained(p, "fedavg", dataclasses.replace(s, first_layer="plain"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        last.state.x, plain.state.x,
    )  # fmt: skip

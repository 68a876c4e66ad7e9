"""Who takes part in a round: sampling, availability, lost and slow clients; local epochs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import (
    clients,
    datacenter,
    flat,
    init,
    logistic,
    population,
    reference_models,
    settings,
)

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator, cohort
from mixfl.engine.participation import Participation, drawn_by_weight
from mixfl.errors import MixflError
from mixfl.measure.diagnosis import setup_of
from mixfl.runs.keys import settings_of

UNEQUAL = (1, 2, 40, 3, 2, 1, 4, 17, 2, 3, 1, 2)
N = len(UNEQUAL)


def problem(**numbers):
    return mixfl.Problem(init, [
        mixfl.Federated(logistic, clients(1, UNEQUAL), 0.7, **numbers), datacenter(),
    ])  # fmt: skip


def trained(p, name, s, rounds=3):
    simulator = Simulator(p, ALGORITHMS[name].build(p, s), s)
    results = list(simulator.rounds(simulator.init(), 0, rounds))
    return simulator, [jax.tree.map(np.asarray, r.info) for r in results], results[-1].state


def matches_reference(p, name, s, rounds=3):
    simulator, infos, state = trained(p, name, s, rounds)
    models, _ = reference_models(name, simulator, rounds)
    np.testing.assert_allclose(flat(state.x), models[-1], atol=2e-5)
    return simulator, infos


# Cohorts


def joined(s, term=None, rounds=400):
    who = Participation(term or population(sizes=UNEQUAL), 0, s)
    return who, [who.at(t) for t in range(rounds)]


def test_by_default_it_is_what_it_was():
    s = settings(cohort_size=5)
    who, found = joined(s, rounds=3)
    assert who.always_full
    for t, each in enumerate(found):
        assert (each.clients == cohort.cohort(s.seed, t, 0, N, 5)).all()


def test_a_poisson_cohort_has_independent_members():
    s = settings(cohort_size=6, sampling="poisson", cohort_cap=N)
    who, found = joined(s, rounds=2000)
    sizes = np.array([len(each.clients) for each in found])
    assert all(len(set(each.clients)) == len(each.clients) for each in found)
    assert abs(sizes.mean() - 6) < 4 * np.sqrt(3 / 2000)
    assert abs(sizes.var() - N * 0.25) < 0.4
    joins = np.array([np.isin(np.arange(N), each.clients) for each in found])
    assert np.abs(joins.mean(0) - 0.5).max() < 4 * np.sqrt(0.25 / 2000)
    together = np.corrcoef(joins.T) - np.eye(N)
    assert np.abs(together).max() < 5 / np.sqrt(2000)
    assert not who.always_full


def test_a_poisson_cohort_is_capped():
    s = settings(cohort_size=6, sampling="poisson", cohort_cap=7)
    who, found = joined(s)
    assert who.capacity == max(len(each.clients) for each in found) == 7
    auto = Participation(
        population(sizes=[1] * 10_000), 0, settings(cohort_size=100, sampling="poisson")
    )
    assert auto.capacity == 140  # 100 + 4 x 9.95
    small = Participation(
        population(sizes=UNEQUAL), 0, settings(cohort_size=11, sampling="poisson")
    )
    assert small.capacity == N


def test_chances_follow_the_weights():
    counts = np.zeros(3)
    rng = np.random.default_rng(0)
    first = np.zeros(3)
    for _ in range(4000):
        chosen = drawn_by_weight(rng, np.array([1.0, 0.0, 3.0]), 1)
        counts[chosen] += 1
        order = drawn_by_weight(rng, np.array([1.0, 2.0, 5.0]), 3)
        assert sorted(order) == [0, 1, 2]
        first[order[0]] += 1
    np.testing.assert_allclose(counts / 4000, [0.25, 0, 0.75], atol=0.03)
    np.testing.assert_allclose(first / 4000, [1 / 8, 2 / 8, 5 / 8], atol=0.03)
    assert len(drawn_by_weight(rng, np.array([0.0, 0.0, 2.0]), 2)) == 1


def test_sampling_by_examples_and_by_weights_of_ones_own():
    _, by_examples = joined(settings(cohort_size=2, sampling="examples"))
    count = np.bincount(np.concatenate([e.clients for e in by_examples]), minlength=N)
    sizes = np.array(UNEQUAL, float)
    p = sizes / sizes.sum()
    second = [sum(p[j] * p[i] / (1 - p[j]) for j in range(N) if j != i) for i in range(N)]
    np.testing.assert_allclose(count / 400, p + second, atol=0.08)
    term = mixfl.Federated(logistic, clients(1, UNEQUAL), sampling=sizes)
    _, same = joined(settings(cohort_size=2), term)
    assert all((a.clients == b.clients).all() for a, b in zip(by_examples, same, strict=True))


def test_only_clients_that_are_available_are_drawn():
    day = mixfl.Federated(
        logistic, clients(1, UNEQUAL), available=lambda t: np.arange(N) % 2 == t % 2
    )
    _, found = joined(settings(cohort_size=8), day, rounds=6)
    for t, each in enumerate(found):
        assert sorted(each.clients) == list(range(t % 2, N, 2))
    half = mixfl.Federated(logistic, clients(1, UNEQUAL), available=np.full(N, 0.5))
    _, found = joined(settings(cohort_size=N), half, rounds=1000)
    sizes = np.array([len(each.clients) for each in found])
    assert abs(sizes.mean() - N / 2) < 0.3


def test_clients_are_lost_at_the_given_rates():
    s = settings(cohort_size=N, drop_rate=0.25, late_rate=0.4)
    _, found = joined(s, rounds=2000)
    dropped, late = sum(e.dropped for e in found), sum(e.late for e in found)
    total = 2000 * N
    assert abs(dropped / total - 0.25) < 0.012
    assert abs(late / total - 0.75 * 0.4) < 0.012
    assert all(len(e.clients) + e.dropped + e.late == N for e in found)
    # A client's fate does not depend on who else was drawn.
    _, few = joined(dataclasses.replace(s, cohort_size=3), rounds=200)
    for all_of_them, some in zip(found, few, strict=False):
        assert set(some.clients) <= set(all_of_them.clients)


def test_numbers_of_clients_without_examples_are_cut_out():
    full = clients(1, UNEQUAL)
    data = mixfl.ClientData(full.examples, np.insert(full.offsets, 3, full.offsets[3]),
                            list(range(N + 1)))  # fmt: skip
    term = mixfl.Federated(logistic, data, speeds=np.linspace(0.1, 1, N + 1),
                           available=lambda t: np.arange(N + 1) == t)  # fmt: skip
    kept = np.delete(np.arange(N + 1), 3)
    assert len(term.clients) == N
    np.testing.assert_allclose(term.speeds.at(0), np.linspace(0.1, 1, N + 1)[kept])
    assert np.flatnonzero(term.available.at(5)).tolist() == [4]
    again = dataclasses.replace(term, weight=0.5)
    np.testing.assert_allclose(again.speeds.at(0), term.speeds.at(0))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (dict(sampling=np.ones(3)), r"sampling: expected one number for each of the 12 clients"),
        (dict(speeds=np.full(N, 1.5)), "speeds: the numbers of clients must be finite and at"),
        (dict(sampling=["a"] * N), "sampling: expected one number"),
        (dict(available=np.full(N, np.nan)), "available: the numbers of clients must be finite"),
    ],
)
def test_bad_numbers_are_refused(numbers, message):
    with pytest.raises(MixflError, match=message):
        mixfl.Federated(logistic, clients(1, UNEQUAL), **numbers)


def test_a_function_of_the_round_is_checked_when_it_is_called():
    term = mixfl.Federated(logistic, clients(1, UNEQUAL), available=lambda t: np.ones(t + 1))
    with pytest.raises(MixflError, match=r"available\(3\): expected one number"):
        term.available.at(3)


def test_numbers_of_clients_need_their_data_here():
    with pytest.raises(MixflError, match="the nodes that are connected take part"):
        mixfl.Federated(logistic, lambda node: {}, speeds=np.ones(3))


def test_two_kinds_of_weights_are_refused():
    term = mixfl.Federated(logistic, clients(1, UNEQUAL), sampling=np.ones(N))
    with pytest.raises(MixflError, match="has weights of its own"):
        Participation(term, 0, settings(sampling="examples"))


# Rounds


@pytest.mark.parametrize(
    ("name", "changes", "numbers"),
    [
        ("2wgt", dict(sampling="poisson", cohort_size=4, drop_rate=0.3), {}),
        ("fedavg", dict(sampling="examples", cohort_size=6, late_rate=0.3), {}),
        ("2wgt", dict(cohort_size=6, local_steps=8, min_speed=0.2), {}),
        ("example-transfer", dict(cohort_size=6), dict(available=np.full(N, 0.6))),
    ],
)
def test_rounds_are_those_of_the_reference(name, changes, numbers):
    matches_reference(problem(**numbers), name, settings(**changes))


def test_chunks_and_devices_change_nothing():
    given = dict(cohort_size=8, local_steps=8, sampling="poisson", drop_rate=0.2, min_speed=0.5)
    s = settings(**given)
    simulator, infos, state = trained(problem(), "2wgt", s)
    assert len(simulator.feeder.shapes[0]) > 1
    for changes in (dict(cohort_chunk=2), dict(devices=2)):
        _, other, found = trained(problem(), "2wgt", dataclasses.replace(s, **changes))
        np.testing.assert_allclose(flat(found.x), flat(state.x), atol=1e-6)
        assert [i["clients/federated"] for i in other] == [i["clients/federated"] for i in infos]


def test_a_slow_client_makes_the_first_of_its_steps():
    s = settings(cohort_size=N, local_steps=8)
    speeds = np.linspace(0.05, 1, N)
    simulator, _, _ = trained(problem(speeds=speeds), "fedavg", s, 1)
    full, _, _ = trained(problem(), "fedavg", s, 1)
    pieces = [next(x.feeder.of_one_size().pieces(x.at(0), 0)) for x in (simulator, full)]
    slow, fast = (p.clients[0][0].batches for p in pieces)
    steps, all_steps = (b.mask.any(2).sum(1) for b in (slow, fast))
    order = cohort.cohort(s.seed, 0, 0, N, N)
    assert steps.tolist() == np.ceil(speeds[order] * all_steps - 1e-9).clip(1).tolist()
    assert steps.sum() < all_steps.sum()
    same = slow.mask > 0
    assert (slow.data["x"][same] == fast.data["x"][same]).all()


def test_speeds_are_drawn_once_for_each_client():
    who = Participation(population(sizes=UNEQUAL), 0, settings(min_speed=0.4))
    speeds = who.speeds(0, np.arange(N))
    assert (who.speeds(7, np.arange(N)[::-1])[::-1] == speeds).all()
    assert 0.4 <= speeds.min() < speeds.max() <= 1


def test_a_round_without_clients_is_skipped():
    never = problem(available=lambda t: np.full(N, float(t != 1)))
    s = settings(cohort_size=3, server_opt="adam")
    simulator = Simulator(never, ALGORITHMS["2wgt"].build(never, s), s)
    states, infos = [], []
    for result in simulator.rounds(simulator.init(), 0, 3):
        states.append(jax.tree.map(np.array, result.state))
        infos.append(result.info)
    assert [int(i["rounds/skipped"]) for i in infos] == [0, 1, 0]
    jax.tree.map(np.testing.assert_array_equal, states[0], states[1])
    assert not np.allclose(flat(states[2].x), flat(states[1].x))
    assert simulator.traces == 1


def test_all_algorithms_have_the_same_clients():
    given = dict(cohort_size=8, sampling="poisson", drop_rate=0.3, late_rate=0.2)
    p, counts = problem(), []
    for name in ("fedavg", "pt", "1wgt", "2wgt"):
        result = mixfl.train(p, name, rounds=3, client_batch=3, eval_every=1, devices=1, **given)
        keys = ("clients/dropped", "clients/late", "clients/federated")
        counts.append([[row.get(k) for k in keys] for row in result.metrics])
    assert counts[0][-1][0] > 0
    assert all(c == counts[0] for c in counts)


def test_the_median_ignores_empty_places():
    s = settings(cohort_size=6, aggregation="median", clip="off")
    one = problem(available=lambda t: np.arange(N) == 2)
    _, _, alone = trained(one, "fedavg", s, 1)
    mean = dataclasses.replace(s, aggregation="mean")
    _, _, expected = trained(one, "fedavg", mean, 1)
    np.testing.assert_allclose(flat(alone.x), flat(expected.x), atol=1e-6)


# Local epochs


def epochs(name, rounds=3, **changes):
    p = problem()
    given = dict(cohort_size=6, client_batch=3, local_epochs=3, client_lr=0.1) | changes
    recipe = ALGORITHMS[name]
    _, s = settings_of(p, recipe, given)
    return p, dataclasses.replace(s, devices=1)


@pytest.mark.parametrize("name", ["fedavg", "2wgt", "1wgt"])
@pytest.mark.parametrize("cap", [None, 7])
def test_epochs_are_those_of_the_reference(name, cap):
    p, s = epochs(name, **({} if cap is None else dict(local_steps=cap)))
    assert s.local_steps == (cap or 3 * 14)  # the largest client has 14 batches
    matches_reference(p, name, s)


def test_an_epoch_has_every_example_once():
    sizes, first = np.array([1, 4, 9, 7]), np.array([0, 1, 5, 14])
    taken = np.array([3, 6, 8, 5])
    rows, mask = cohort.cohort_rows(0, 2, 0, np.arange(4), first, sizes, 9, 3, taken)
    once, _ = cohort.cohort_rows(0, 2, 0, np.arange(4), first, sizes, 3, 3)
    assert mask.any(2).sum(1).tolist() == taken.tolist()
    for i, n in enumerate(sizes):
        per = -(-n // 3)
        read = [rows[i, k][mask[i, k] > 0] for k in range(taken[i])]
        for start in range(0, taken[i], per):
            epoch = np.concatenate(read[start : start + per])
            assert len(set(epoch)) == len(epoch) <= n
            if start + per <= taken[i]:
                assert sorted(epoch) == list(range(first[i], first[i] + n))
        assert (once[i].ravel()[: min(n, 9)] == np.concatenate(read[:per])).all()
        assert set(rows[i].ravel()) <= set(range(first[i], first[i] + n))
    assert not (rows[2, :3] == rows[2, 3:6]).all()  # another order in each epoch


def test_nobody_is_padded_to_the_largest_without_need():
    p, s = epochs("fedavg", local_epochs=4)
    simulator, _, _ = trained(p, "fedavg", s, 1)
    shapes = simulator.feeder.shapes[0]
    assert shapes[-1] == (56, 3)
    assert shapes[0].steps == 4
    piece = next(simulator.feeder.pieces(simulator.at(0), 0))
    padded = sum(f.batches.mask.size for f in piece.clients[0])
    assert padded < 0.75 * 6 * 56 * 3


def test_the_server_takes_as_many_steps_as_clients_on_average():
    p, s = epochs("pt")
    steps = [3 * -(-n // 3) for n in UNEQUAL]
    resolved = ALGORITHMS["pt"].resolve(p, s)
    assert resolved.central_steps == round(np.mean(steps))
    assert ALGORITHMS["1wgt"].resolve(p, s).central_batch == min(40, round(np.mean(steps)) * 18)
    assert ALGORITHMS["pt"].resolve(p, settings()).central_steps == settings().local_steps


def test_predictions_use_the_mean_of_the_steps():
    p, s = epochs("pt")
    assert ALGORITHMS["pt"].resolve(p, s).central_steps == setup_of(p, s).K
    assert settings().local_steps == setup_of(p, settings()).K


def test_epochs_with_an_optimizer_that_is_not_plain():
    p, s = epochs("1wgt", client_opt="sgd(momentum=0.5)", local_steps=9)
    plain = Simulator(p, ALGORITHMS["1wgt"].build(p, s), s)
    *_, last = plain.rounds(plain.init(), 0, 2)
    assert np.isfinite(flat(last.state.x)).all()
    assert jnp.any(last.info["clients/federated"] > 0)

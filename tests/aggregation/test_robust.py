"""Centers other than the mean, against NumPy; and that they keep bad clients out."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import flat, louder, settings

import mixfl
from mixfl.aggregation import robust
from mixfl.algorithms import ALGORITHMS, recipe
from mixfl.algorithms.contract import Broadcast, Upload
from mixfl.algorithms.steps import mean_delta, weighted_summand
from mixfl.engine import Simulator
from mixfl.errors import MixflError

ROBUST = ("median", "trimmed-mean", "krum")
seeds = st.integers(0, 2**31)
counts = st.sampled_from([1, 2, 5, 12])  # of clients; each is compiled for itself


@given(seed=seeds, clients=counts, bad=st.integers(0, 4))
def test_the_median_is_numpys(seed, clients, bad):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(clients, 3, 2)).astype(np.float32)
    good = rng.permutation(clients) >= min(bad, clients - 1)
    a[~good] = rng.choice([np.nan, np.inf, 1e30])
    s = mixfl.Settings(aggregation="median")
    found = robust.center(s, {"w": jnp.asarray(a)}, jnp.asarray(good))["w"]
    np.testing.assert_allclose(found, np.median(a[good], axis=0), rtol=1e-6)


@given(seed=seeds, clients=counts, trim=st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.45]))
def test_the_trimmed_mean_is_that_of_what_is_left(seed, clients, trim):
    a = np.random.default_rng(seed).normal(size=(clients, 5)).astype(np.float32)
    s = mixfl.Settings(aggregation="trimmed-mean", trim=trim)
    found = robust.center(s, [jnp.asarray(a)], jnp.ones(clients, bool))[0]
    drop = min(math.ceil(trim * clients - 1e-4), (clients - 1) // 2)
    wanted = np.sort(a, axis=0)[drop : clients - drop].mean(0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def slow_krum(a, bad):
    """Blanchard et al. 2017, client by client."""
    n = len(a)
    scores = []
    for i in range(n):
        others = sorted(np.sum((a[i] - a[j]) ** 2) for j in range(n) if j != i)
        scores.append(sum(others[: max(n - bad - 2, 1)]))
    return np.sort(np.argsort(scores, kind="stable")[: n - bad])


@given(seed=seeds, clients=st.sampled_from([5, 8, 12]))
def test_krum_takes_those_that_are_near_each_other(seed, clients):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(clients, 4))
    trim = 0.3
    good = jnp.ones(clients, bool)
    found = robust.nearest([jnp.asarray(a, jnp.float32)], good, trim)
    np.testing.assert_array_equal(
        np.flatnonzero(found), slow_krum(a, math.ceil(trim * clients - 1e-4))
    )


def test_krum_leaves_out_those_far_away():
    a = np.random.default_rng(0).normal(size=(10, 6)).astype(np.float32)
    a[[2, 7]] += 50
    found = robust.nearest([jnp.asarray(a)], jnp.ones(10, bool), 0.2)
    np.testing.assert_array_equal(np.flatnonzero(~np.asarray(found)), [2, 7])


def test_krum_leaves_out_what_overflows_and_never_everybody():
    a = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    a[3] = 1e25  # its square is no 32-bit number
    found = robust.nearest([jnp.asarray(a)], jnp.ones(6, bool), 0.2)
    assert not np.asarray(found)[3]
    alone = robust.nearest([jnp.asarray(a)], jnp.arange(6) == 2, 0.2)
    np.testing.assert_array_equal(np.flatnonzero(alone), [2])


@pytest.mark.parametrize("aggregation", ROBUST)
def test_sums_are_those_of_clients_that_all_have_the_center(aggregation):
    """What the augmenting gradient did comes back with each client's own steps."""
    s = mixfl.Settings(aggregation=aggregation, client_lr=0.1, local_steps=4)
    rng = np.random.default_rng(1)
    steps = np.array([1, 4, 2, 3, 4], np.float32)
    aug = {"w": rng.normal(size=3).astype(np.float32)}
    broadcast = Broadcast({"w": np.zeros(3, np.float32)}, aug)
    own = rng.normal(size=(5, 3)).astype(np.float32)
    uploads = Upload({"w": own}, steps * 2, steps, None, np.ones(5, np.float32))
    summands = jax.vmap(lambda u: weighted_summand(s, u))(jax.tree.map(jnp.asarray, uploads))
    good = np.array([True, True, False, True, True])
    sums = robust.robust_sums(s, summands, good)
    middle = np.asarray(robust.center(s, jnp.asarray(own), jnp.asarray(good)))
    whole = [2 * k * (middle - 0.1 * k * aug["w"]) for k in steps[good]]
    wanted = sum(whole) / (2 * steps[good].sum())
    np.testing.assert_allclose(mean_delta(s, broadcast, sums)["w"], wanted, rtol=1e-4, atol=1e-5)
    assert sums.weight == 2 * steps[good].sum()
    assert sums.clients == 4


def trained(p, algorithm, **changes):
    s = settings(rounds=6, cohort_size=8, **changes)
    simulator = Simulator(p, ALGORITHMS[algorithm].build(p, s), s)
    *_, last = simulator.rounds(simulator.init(), 0, s.rounds)
    return last


@pytest.mark.parametrize("aggregation", ROBUST)
@pytest.mark.parametrize("algorithm", [pytest.param("fedavg", marks=pytest.mark.numbers), "2wgt"])
def test_equal_clients_are_their_center(algorithm, aggregation):
    """Then it is the mean, in every algorithm, with what the server sent."""
    one = problems.examples(1, 6, 0.3)
    same = mixfl.ClientData.from_clients({str(i): one for i in range(8)})
    p = problems.problem()
    terms = [dataclasses.replace(p.terms[0], clients=same), p.terms[1]]
    p = dataclasses.replace(p, terms=terms)
    whole = dict(client_batch=6, weighting="uniform")  # no order of examples
    mean = trained(p, algorithm, clip="off", **whole)
    found = trained(p, algorithm, aggregation=aggregation, **whole)
    np.testing.assert_allclose(flat(found.state.x), flat(mean.state.x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregation", ROBUST)
def test_bad_clients_do_little(aggregation):
    p = problems.problem()
    bad = dataclasses.replace(p.terms[0], clients=louder(p.terms[0].clients))
    loud = dataclasses.replace(p, terms=[bad, p.terms[1]])
    honest = flat(trained(p, "fedavg", clip="off").state.x)
    keys = {"trim": 0.25}
    kept = flat(trained(loud, "fedavg", clip="off", aggregation=aggregation, **keys).state.x)
    lost = flat(trained(loud, "fedavg", clip="off").state.x)
    assert np.linalg.norm(kept - honest) < 0.5 * np.linalg.norm(lost - honest)


def test_a_client_that_is_not_finite_does_not_count():
    p = problems.problem()
    clients = p.terms[0].clients
    columns = {k: np.array(v) for k, v in clients.examples.all().items()}
    columns["x"][clients.rows(4)] *= 1e30  # after a step, its losses are not finite
    owner = np.repeat(np.arange(len(clients)), clients.sizes())
    clients = mixfl.ClientData.from_arrays(columns, client=owner)
    p = dataclasses.replace(p, terms=[dataclasses.replace(p.terms[0], clients=clients), p.terms[1]])
    last = trained(p, "2wgt", aggregation="median")
    assert np.isfinite(flat(last.state.x)).all()
    assert last.info["clients/rejected"] == 1


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (dict(aggregation="mode"), "aggregation"),
        (dict(aggregation="krum", trim=0.5), "below 0.5"),
        (dict(aggregation="krum", trim=-0.1), "trim"),
    ],
)
def test_bad_settings_are_refused(keys, told):
    with pytest.raises(MixflError, match=told):
        mixfl.Settings(**keys)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (dict(cohort_chunk=2), "cohort_chunk"),
        (dict(devices=2), "devices = 1"),
        (dict(first_layer="low-rank"), "aggregation"),
    ],
)
def test_what_needs_single_uploads_says_so(keys, told):
    p = problems.problem()
    s = settings(**{"aggregation": "median", **keys})
    with pytest.raises(MixflError, match=told):
        Simulator(p, recipe("fedavg").build(p, s), s)

"""Populations with settings of their own: S, B, K, eta, ClientOpt and others."""

import dataclasses
import math

import numpy as np
import pytest
import reference
from problems import (
    OPTIMIZERS,
    datacenter,
    flat,
    init,
    population,
    problem,
    reference_round,
    reference_terms,
    settings,
)

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import CLIENT_KEYS, algorithm
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.measure.check import check_problem
from mixfl.measure.diagnosis import diagnose

ROUNDS = 5
OWN = {
    "plain": dict(cohort_size=3, client_batch=2, local_steps=5, client_lr=0.35),
    "momentum": dict(
        cohort_size=6, client_batch=4, local_steps=2, client_lr=0.05, client_opt="momentum",
        weighting="steps",
    ),
    "clipped": dict(local_steps=4, grad_clip=0.2, proximal=0.5, weighting="uniform"),
}  # fmt: skip


def two(own) -> mixfl.Problem:
    """Two populations, the second with settings of its own, and a central term."""
    given = {k: OPTIMIZERS.get(v, v) if k == "client_opt" else v for k, v in own.items()}
    other = population(5, 0.5, "other", shift=-0.4)
    return mixfl.Problem(init, [population(), datacenter(), _with(other, given)])


def run_both(name, own, **changes):
    s, p = settings(rounds=ROUNDS, **changes), two(own)
    simulator = Simulator(p, ALGORITHMS[name].build(p, s), s)
    state = simulator.init()
    x0 = flat(state.x).astype(float)
    fed = [reference_round(simulator.feeder, simulator.at(t), t, s) for t in range(ROUNDS)]
    apart = {
        k: v for k, v in own.items() if k not in ("cohort_size", "client_batch", "local_steps")
    }
    given = reference.Settings(s.client_lr, apart={2: apart}, pretrain_rounds=ROUNDS // 2)
    expected = reference.train(name, reference_terms(p), x0, given, fed)
    models = [flat(r.state.x) for r in simulator.rounds(state, 0, ROUNDS)]
    return simulator, fed, np.array(models), np.array(expected)


@pytest.mark.parametrize("name", ["fedavg", "pt", "1wgt", "2wgt", "pretrain"])
@pytest.mark.parametrize(
    "own", ["plain", "momentum", pytest.param("clipped", marks=pytest.mark.numbers)]
)
def test_simulator_equals_reference(name, own):
    simulator, fed, models, expected = run_both(name, OWN[own])
    np.testing.assert_allclose(models, expected, rtol=2e-4, atol=2e-5)
    assert simulator.traces == (2 if name == "pretrain" else 1)
    # The reference was fed what the settings say.
    for j, (size, batch, most) in enumerate([(5, 3, 3), (
        OWN[own].get("cohort_size", 5), OWN[own].get("client_batch", 3), OWN[own]["local_steps"]
    )]):  # fmt: skip
        cohort = fed[-1].clients[j]
        assert len(cohort) == size
        assert max(len(b["y"]) for client in cohort for b in client) == batch
        assert max(map(len, cohort)) <= most
    steps = [len(client) for r in fed[-2:] for client in r.clients[1]]
    assert max(steps) == min(OWN[own]["local_steps"], 6)


@pytest.mark.parametrize("way", [dict(cohort_chunk=2), dict(devices=2)])
def test_chunks_and_devices_change_nothing(way):
    _, _, models, expected = run_both("2wgt", OWN["plain"], **way)
    np.testing.assert_allclose(models, expected, rtol=2e-4, atol=2e-5)


KEYS = dict(rounds=4, cohort_size=5, client_batch=3, local_steps=3, client_lr=0.2, devices=1,
            eval_every=1)  # fmt: skip


def test_a_rate_of_its_own_may_be_a_schedule():
    own = dict(client_lr="cosine(0.4, 8)")
    result = mixfl.train(two(own), "2wgt", **KEYS)
    rates = [row["rate/other.client_lr"] for row in result.metrics]
    assert rates == pytest.approx(
        [0.2 * (1 + math.cos(math.pi * t / 8)) for t in range(4)], rel=1e-5
    )
    fixed = mixfl.train(two(dict(client_lr=0.4)), "2wgt", **KEYS)
    assert np.abs(flat(result.params) - flat(fixed.params)).max() > 1e-3


def test_other_rates_share_the_program_and_other_optimizers_do_not():
    p, s = two(dict(client_lr=0.1)), settings()
    traces = []
    for own in (dict(client_lr=0.1), dict(client_lr=0.3), dict(client_lr=0.3, client_opt="adam")):
        again = p.with_terms([*p.terms[:2], _with(p.terms[2], own)])
        simulator = Simulator(again, ALGORITHMS["fedavg"].build(again, s), s)
        list(simulator.rounds(simulator.init(), 0, 1))
        traces.append(simulator.traces)
    assert traces == [1, 0, 1]


def _with(term, own):
    return dataclasses.replace(term, settings=own)


def test_the_configuration_has_them_and_repeats_them(tmp_path):
    out = tmp_path / "run"
    own = dict(cohort_size=3, client_lr=0.1, client_opt="sgd(momentum=0.5)")
    result = mixfl.train(two(own), "2wgt", out=out, **KEYS)
    config = mixfl.load(out).config
    assert {k: v for k, v in config.items() if k.startswith("other.")} == {
        f"other.{k}": v for k, v in own.items()
    }
    with pytest.raises(MixflError, match=r"another run \(other.client_lr was 0.1, now 0.2"):
        mixfl.train(two({**own, "client_lr": 0.2}), "2wgt", out=out, resume=True, **KEYS)
    # By hand, over what the problem says.
    given = {"other.client_lr": 0.1, "other.cohort_size": 3, "other.client_opt": own["client_opt"]}
    again = mixfl.train(two(dict(client_lr=9.0)), "2wgt", **KEYS, **given)
    np.testing.assert_array_equal(flat(again.params), flat(result.params))


BAD = {
    "an unknown key": (dict(client_rl=0.1), "population 'other': unknown key 'client_rl'. Did you"),
    "a key of the run": (dict(server_lr=0.1), "population 'other': unknown key 'server_lr'"),
    "a bad value": (dict(client_lr=-1), "population 'other': client_lr = -1: expected"),
    "a bad schedule": (dict(client_lr="cosine(0.1, 2)"), "is 0 in round 3 of 4"),
    "a large cohort": (dict(cohort_size=99), "cohort_size = 99, but the population 'other'"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_settings_get_a_sentence(kind, tmp_path):
    own, message = BAD[kind]
    p = mixfl.Problem(init, [_with(population(5, 0.5, "other"), own), datacenter()])
    with pytest.raises(MixflError, match=message):
        mixfl.train(p, "fedavg", out=tmp_path / "run", **KEYS)
    assert not (tmp_path / "run").exists()


def test_keys_of_unknown_populations_name_the_nearest():
    with pytest.raises(MixflError, match=r"Did you mean 'other.client_lr'"):
        mixfl.train(two({}), "fedavg", **KEYS, **{"othr.client_lr": 0.1})
    with pytest.raises(MixflError, match="settings must be a dict"):
        _with(population(), 3)


def test_what_does_not_know_of_them_refuses():
    @algorithm("mine", CLIENT_KEYS)
    def mine(problem, s):
        return fed_avg.build(problem, s)

    for one in (mine, "example-transfer"):
        with pytest.raises(MixflError, match="'other' has settings of its own, which '"):
            mixfl.train(two(dict(client_lr=0.1)), one, **KEYS)
    with pytest.raises(MixflError, match="The theory knows one K"):
        diagnose(two(dict(client_lr=0.1)), settings())


def test_checks_leave_them_out():
    own = dict(client_lr=0.01, local_steps=5, client_batch=1)
    assert all(f.good for f in check_problem(two(own), settings(cohort_size=3)))


def test_without_them_nothing_changes():
    found = mixfl.train(problem(), "2wgt", **KEYS).params
    same = mixfl.Problem(init, [_with(population(), {}), datacenter()])
    np.testing.assert_array_equal(flat(found), flat(mixfl.train(same, "2wgt", **KEYS).params))


@pytest.mark.system
@pytest.mark.parametrize("own", [
    dict(cohort_size=2, client_batch=2, local_steps=2, client_lr="cosine(0.4, 9)"),
    dict(cohort_size=1, client_opt="sgd(momentum=0.5)", local_steps=4, client_lr=0.05),
])  # fmt: skip
def test_deployment_is_the_simulator(own):
    from deployed import assert_same, deploy, simulate

    given = {f"other.{k}": v for k, v in own.items()}
    found, _, _ = deploy("two populations", algorithm="2wgt", **given)
    assert_same(found.params, simulate("two populations", "2wgt", **given).params)
    assert found.metrics[-1]["clients/other"] == own["cohort_size"]

"""Private runs: what they say, spend, keep secret and refuse."""

import dataclasses
import json
import shutil
import stat

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest

import mixfl
from mixfl.errors import MixflError
from mixfl.privacy.config import dp_keys
from mixfl.runs.plan import plan_of

SMALL = dict(rounds=6, cohort_size=3, client_batch=3, local_steps=3, client_lr=0.2, devices=1)
QUIET = dict(progress=False)
FIXED = mixfl.DP(noise_multiplier=2.0, delta=1e-3, clip=0.1, sampling="none", seed=3)


def trained(dp, algorithm="fedavg", terms="two terms", **more):
    return mixfl.train(
        problems.problem(terms), algorithm, dp=dp, **{**SMALL, "eval_every": 2, **QUIET, **more}
    )


def test_noise_that_drowns_the_clients_is_said():
    """Before anything is trained: with 25 parameters and 3 clients, from a multiplier of 6 on."""
    wide = dataclasses.replace(
        problems.problem("two terms"), init=lambda key: {"w": jnp.zeros((5, 5))}
    )

    def said(z, **more):
        dp = mixfl.DP(noise_multiplier=z, delta=1e-3, clip=0.1, sampling="none", **more)
        return [n for n in plan_of(wide, "fedavg", SMALL | dp.keys()).promise() if "times" in n]

    assert said(5.9) == said(0.0) == []
    (note,) = said(6.1)
    assert "about 10.2 times as long as" in note
    assert "6.1 clip norms x sqrt(25 parameters) / 3 clients" in note
    assert "Larger cohorts of more clients" in note
    assert not any("as long as" in n for n in said(6.1, scale=2))


def test_a_run_says_what_it_spends(tmp_path):
    dp = mixfl.DP(epsilon=4, delta=1e-3, clip=0.1, sampling="none")
    result = trained(dp, out=tmp_path / "run")
    spent = [row["privacy/epsilon"] for row in result.metrics]
    assert spent == sorted(spent)
    assert 3.9 < spent[-1] <= 4
    assert {row["privacy/delta"] for row in result.metrics} == {1e-3}
    for row in result.metrics:
        assert not any(k.startswith(("train/federated", "clients/federated")) for k in row)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows == result.metrics
    assert result.config["weighting"] == "uniform"
    assert result.config["dp_noise_multiplier"] > 1


def test_only_the_owner_can_read_the_key(tmp_path):
    trained(FIXED, out=tmp_path / "run", rounds=2)
    files = [p for p in (tmp_path / "run/checkpoints").rglob("*") if p.is_file()]
    assert len(files) > 2
    assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o600}


def test_a_run_ends_when_its_budget_is_spent(tmp_path, caplog):
    caplog.set_level("INFO", "mixfl")
    dp = mixfl.DP(epsilon=6, noise_multiplier=2.0, delta=1e-3, clip=0.1, sampling="none")
    result = trained(dp, rounds=40, eval_every=1)
    last = result.metrics[-1]
    assert last["round"] < 40
    assert last["privacy/epsilon"] <= 6
    assert result.config["rounds"] == last["round"]
    assert f"spent after round {last['round']} of 40" in caplog.text


def stopped_at(round):
    def stop(event):
        if event.round == round:
            raise RuntimeError("stopped")

    return stop


@pytest.mark.parametrize("seed", [3, None])
def test_resuming_spends_nothing_twice_and_goes_on_with_the_same_key(tmp_path, seed):
    dp = mixfl.DP(noise_multiplier=2.0, delta=1e-3, sampling="none", seed=seed)
    first, second = tmp_path / "first", tmp_path / "second"
    with pytest.raises(RuntimeError, match="stopped"):
        trained(dp, out=first, checkpoint_every=2, callbacks=[stopped_at(4)])
    shutil.copytree(first, second)
    a, b = (trained(dp, out=f, checkpoint_every=2, resume=True) for f in (first, second))
    for one, other in zip(*map(jax.tree.leaves, (a.params, b.params)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert a.metrics[-1]["privacy/epsilon"] == b.metrics[-1]["privacy/epsilon"]
    if seed is not None:
        whole = trained(dp, checkpoint_every=2)
        for one, other in zip(*map(jax.tree.leaves, (a.params, whole.params)), strict=True):
            np.testing.assert_array_equal(one, other)
        assert [r["privacy/epsilon"] for r in a.metrics] == [
            r["privacy/epsilon"] for r in whole.metrics
        ]


def test_other_data_is_refused(tmp_path):
    trained(FIXED, out=tmp_path / "run", rounds=2)
    with pytest.raises(MixflError, match="same noise on other data"):
        trained(FIXED, out=tmp_path / "run", rounds=2, resume=True, changed_data=True)


def test_pretraining_spends_nothing_before_clients_take_part():
    dp = mixfl.DP(noise_multiplier=4.0, delta=1e-3, clip=0.1, sampling="none")
    rows = trained(dp, "pretrain", pretrain_rounds=2).metrics
    assert rows[0]["privacy/epsilon"] == 0
    alone = trained(dp, rounds=4).metrics
    assert rows[-1]["privacy/epsilon"] == alone[-1]["privacy/epsilon"]


def test_several_populations_count_by_the_largest():
    dp = mixfl.DP(noise_multiplier=4.0, delta=1e-3, clip=0.1, sampling="none")
    both = trained(dp, "2wgt", "two populations").metrics[-1]
    one = trained(dp, "2wgt").metrics[-1]
    assert both["privacy/epsilon"] == one["privacy/epsilon"]  # of eight clients each


@pytest.mark.parametrize(
    ("dp", "algorithm", "more", "message"),
    [
        (dict(epsilon=0), "fedavg", {}, "above 0"),
        (dict(epsilon=4, delta=0.2), "fedavg", {}, "below 1/clients"),
        (dict(epsilon=4, delta=None), "fedavg", {}, "delta is missing"),
        (dict(epsilon=4, cap=2, sampling="poisson"), "fedavg", {}, "more than the cap"),
        (dict(epsilon=4), "central", {}, "no effect on 'central'"),
        (dict(epsilon=4), "oracle", {}, "no effect on 'oracle'"),
        (dict(epsilon=4), "2wgt", dict(measure="dissimilarity"), "without noise"),
        (dict(epsilon=4), "2wgt", dict(aggregation="median"), "no bound"),
        (dict(epsilon=4), "2wgt", dict(clip=1.0), "--dp clip=1"),
        (dict(epsilon=4, mechanism="banded", sampling="none"), "2wgt", {}, "needs a clip norm"),
        (dict(epsilon=4, mechanism="banded", sampling="fixed"), "2wgt", {}, "no credit"),
        (dict(epsilon=4, min_sep=5, sampling="none"), "2wgt", {}, "cohort_size = 3 is more"),
        (dict(epsilon=1e-3, noise_multiplier=1.0), "2wgt", {}, "one round"),
    ],
)  # fmt: skip
def test_what_can_not_be_private_is_refused(dp, algorithm, more, message, tmp_path):
    dp = {"delta": 1e-3, "sampling": "none", **dp}
    with pytest.raises(MixflError, match=message):
        trained(mixfl.DP(**dp), algorithm, out=tmp_path / "run", **more)
    assert not (tmp_path / "run").exists()


def test_evaluations_of_participants_are_refused():
    p = problems.problem()
    metric = problems.logistic
    for at_server in (False, True):
        judge = mixfl.ClientEvaluation(metric, p.populations[0].clients, at_server=at_server)
        judged = dataclasses.replace(p, client_eval=judge)
        if at_server:
            mixfl.train(judged, "fedavg", dp=FIXED, **{**SMALL, **QUIET, "rounds": 1})
            continue
        with pytest.raises(MixflError, match="not in the budget"):
            mixfl.train(judged, "fedavg", dp=FIXED, **{**SMALL, **QUIET})


def test_smile_does_not_standardize_by_the_clients_sums():
    from mixfl.runs.plan import plan

    given = {**dp_keys({"noise_multiplier": 1.0, "delta": 1e-6}), "image_size": 8, "clients": 80}
    assert plan("smile", "fedavg", preset="demo", given=given).options["inputs"] == "central"
    with pytest.raises(MixflError, match="inputs = central"):
        plan("smile", "fedavg", preset="demo", given={**given, "inputs": "standardized"})


def test_keys_of_the_command_line():
    keys = dp_keys({"epsilon": 4, "delta": 1e-5})
    assert keys["sampling"] == "poisson"
    assert dp_keys({}) == {}
    with pytest.raises(MixflError, match="Did you mean 'epsilon'"):
        dp_keys({"epsilo": 4})
    with pytest.raises(MixflError, match="epsilon or noise_multiplier"):
        dp_keys({"delta": 1e-5})
    with pytest.raises(MixflError, match="epsilon or noise_multiplier"):
        dp_keys({"seed": 1})

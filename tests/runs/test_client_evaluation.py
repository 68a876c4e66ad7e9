"""Evaluation of each client: against plain NumPy, in runs, in reports and comparisons."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_problem
from run_folders import lines, train

import mixfl
from mixfl import client_evaluation
from mixfl.client_evaluation import refuse_participants_data
from mixfl.errors import MixflError
from mixfl.report.document import Curves, Sweep, Table
from mixfl.report.from_runs import document
from mixfl.studies.compare import Outcome, rows
from mixfl.tasks import find

SIZES = (1, 4, 2, 9, 3, 5, 1, 1, 2, 6, 7, 3)
RNG = np.random.default_rng(0)
OWNER = np.repeat(np.arange(len(SIZES)), SIZES)
X = RNG.normal(size=len(OWNER)).astype(np.float32)
CLIENTS = mixfl.ClientData.from_arrays(
    {"x": X, "region": np.array([0, 1, 2])[OWNER % 3]}, client=[f"c{i:02d}" for i in OWNER]
)


def squared(params, batch):
    return (batch["x"] - params) ** 2


def by_hand(values, worst_is_high=True):
    """From one number per example, in a loop."""
    means = [np.mean([v for v, o in zip(values, OWNER, strict=True) if o == i])
             for i in range(len(SIZES))]  # fmt: skip
    ordered = sorted(means, reverse=worst_is_high)
    quantiles = {f"p{q:02d}": np.percentile(means, q) for q in (5, 25, 50, 75, 95)}
    return {"mean": np.mean(means), "worst10": ordered[0], **quantiles}, means


@pytest.mark.parametrize("chunk", [1024, 7, 1])
def test_numbers_are_those_of_a_loop(chunk, monkeypatch):
    monkeypatch.setattr(client_evaluation, "CHUNK_EXAMPLES", chunk)
    found = mixfl.ClientEvaluation(squared, CLIENTS)(jnp.float32(0.5))
    expected, _ = by_hand((X.astype(np.float64) - 0.5) ** 2)
    assert found == pytest.approx({f"loss/{k}": v for k, v in expected.items()}, rel=1e-6)


def test_worst_is_lowest_where_higher_is_better():
    def metrics(params, batch):
        error = squared(params, batch)
        return {"loss": error, "accuracy": (error < 1).astype(jnp.float32)}

    many = mixfl.ClientData.from_arrays({"x": np.arange(40.0)}, client=np.arange(40))
    judge = mixfl.ClientEvaluation(lambda p, b: {"score": -b["x"] + p, "loss": b["x"]}, many)
    found = judge(jnp.zeros(()))
    assert found["score/worst10"] == -(36 + 37 + 38 + 39) / 4
    assert found["loss/worst10"] == (36 + 37 + 38 + 39) / 4
    found = mixfl.ClientEvaluation(metrics, CLIENTS)(jnp.zeros(()))
    expected, _ = by_hand((X**2 < 1).astype(float), worst_is_high=False)
    assert {k: found[f"accuracy/{k}"] for k in expected} == pytest.approx(expected)


def test_groups_by_column_and_by_name():
    _, means = by_hand(X.astype(np.float64) ** 2)
    expected = {f"loss/group/{g}": np.mean(means[g::3]) for g in range(3)}
    found = mixfl.ClientEvaluation(squared, CLIENTS, groups="region")(jnp.zeros(()))
    assert {k: found[k] for k in expected} == pytest.approx(expected, rel=1e-6)
    named = {f"c{i:02d}": ["a", "b", "c"][i % 3] for i in range(12)}
    found = mixfl.ClientEvaluation(squared, CLIENTS, groups=named)(jnp.zeros(()))
    assert found["loss/group/b"] == pytest.approx(expected["loss/group/1"], rel=1e-6)


def test_a_sample_of_many_clients_is_the_same_each_time():
    judge = mixfl.ClientEvaluation(lambda p, b: {"loss": b["x"] + 0 * p}, CLIENTS)
    few = judge(jnp.zeros(()), most=3)
    assert few == judge(jnp.zeros(()), most=3)
    assert few == mixfl.ClientEvaluation(judge.metric, lambda: CLIENTS)(jnp.zeros(()), most=3)
    _, means = by_hand(X)
    some = [np.mean(c) for c in itertools.combinations(means, 3)]
    assert min(abs(few["loss/mean"] - m) for m in some) < 1e-6
    assert few != judge(jnp.zeros(()))


def test_clients_without_examples_do_not_count():
    clients = mixfl.ClientData(CLIENTS.examples, np.insert(CLIENTS.offsets, 3, CLIENTS.offsets[3]),
                               [*CLIENTS.ids[:3], "empty", *CLIENTS.ids[3:]])  # fmt: skip
    expected = mixfl.ClientEvaluation(squared, CLIENTS)(jnp.zeros(()))
    assert mixfl.ClientEvaluation(squared, clients)(jnp.zeros(())) == expected


WRONG = {
    "shape": (lambda: mixfl.ClientEvaluation(lambda p, b: jnp.mean(b["x"]), CLIENTS),
              r"'loss' has shape \(\) for 44 examples"),
    "column": (lambda: mixfl.ClientEvaluation(squared, CLIENTS, groups="regoin"),
               "'regoin'. Did you mean 'region'"),
    "mixed": (lambda: mixfl.ClientEvaluation(squared, CLIENTS, groups="x"),
              "expected one value per client"),
    "missing": (lambda: mixfl.ClientEvaluation(squared, CLIENTS, groups={"c00": "a"}),
                "11 clients have no group, such as 'c01'"),
    "random": (lambda: mixfl.ClientEvaluation(lambda p, b, key: b["x"], CLIENTS),
               "an evaluation draws nothing"),
    "data": (lambda: mixfl.ClientEvaluation(squared, {"x": X}), "needs a mixfl.ClientData"),
    "metric": (lambda: mixfl.ClientEvaluation("loss", CLIENTS), "must be a function"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_said(what):
    make, message = WRONG[what]
    with pytest.raises(MixflError, match=message):
        make()(jnp.zeros(()))


def test_private_runs_can_refuse_participants_data():
    refuse_participants_data(None)
    refuse_participants_data(mixfl.ClientEvaluation(squared, CLIENTS, at_server=True))
    with pytest.raises(MixflError, match="differential privacy does not cover"):
        refuse_participants_data(mixfl.ClientEvaluation(squared, CLIENTS))


# In a run

REGIONS = {i: "north" if i % 2 else "south" for i in range(len(tiny_problem.SIZES))}
PROBLEM = dataclasses.replace(
    tiny_problem.problem,
    client_eval=mixfl.ClientEvaluation(tiny_problem.loss, tiny_problem.clients, REGIONS),
)


def test_a_run_reports_clients_and_can_choose_by_them(tmp_path):
    out = tmp_path / "2wgt"
    result = train("2wgt", out, PROBLEM, rounds=4, keep_best=True,
                   best_by="eval/clients/loss/worst10")  # fmt: skip
    assert lines(out) == result.metrics
    found = PROBLEM.client_eval(result.params)
    row = result.metrics[-1]
    assert {k: row[f"eval/clients/{k}"] for k in found} == found
    assert {"loss/p05", "loss/p95", "loss/worst10", "loss/group/north"} < found.keys()
    worst = [row["eval/clients/loss/worst10"] for row in result.metrics]
    assert result.best["round"] == 1 + worst.index(min(worst))
    few = train("2wgt", None, PROBLEM, rounds=1, eval_clients=2).metrics[-1]
    assert few["eval/clients/loss/p05"] != result.metrics[0]["eval/clients/loss/p05"]

    (section,) = document([out]).sections
    (spread,) = (p for p in section.parts if isinstance(p, Sweep))
    assert [(p.x, p.mean) for p in spread.lines[0].points] == [
        (q, row[f"eval/clients/loss/p{q:02.0f}"]) for q in (5, 25, 50, 75, 95)
    ]
    tables = {p.title: p for p in section.parts if isinstance(p, Table)}
    assert [r[0] for r in tables["loss of a client by group"].rows] == ["north", "south"]
    assert "worst tenth's loss" in tables["After training"].header
    assert not any(
        m.startswith("eval/clients") and not m.endswith(("p05", "p50", "p95", "worst10"))
        for p in section.parts if isinstance(p, Curves) for m in p.metrics
    )  # fmt: skip
    header, cells = rows([Outcome("2wgt", [result.metrics])])
    assert header[:3] == ["algorithm", "loss", "worst tenth's loss"]
    assert cells[0][2] == f"{row['eval/clients/loss/worst10']:.4f}"


SMALL = {
    "smile": dict(clients=20, image_size=8, per_client=4, hidden=2),
    "text": dict(clients=20, per_client=2, articles=20, length=12, embedding=4, hidden=4),
    "movie": dict(users=40, movies=50),
}


@pytest.mark.parametrize("task", SMALL)
def test_tasks_evaluate_their_held_out_clients(task):
    import jax

    spec = find(task)
    problem = spec.build(spec.options | SMALL[task] | {"client_eval": True}, None)
    params = problem.init(jax.random.key(0))
    found = problem.client_eval(params)
    refuse_participants_data(problem.client_eval)
    name = "hinge" if task == "movie" else "loss"
    assert found[f"{name}/p05"] <= found[f"{name}/p50"] <= found[f"{name}/worst10"]
    if task == "smile":  # over all examples, it is the task's own evaluation
        chosen = problem.client_eval._chosen(10_000)
        values = problem.client_eval._values(params, chosen, None)["loss"]
        assert values.mean() == pytest.approx(float(problem.evaluate(params)["loss"]), rel=1e-5)
    assert spec.build(spec.options | SMALL[task], None).client_eval is None


def test_a_metric_may_need_frozen_arrays():
    def loss(params, batch, frozen):
        return (batch["x"] - params * frozen["scale"]) ** 2

    problem = mixfl.Problem(
        lambda key: jnp.ones(()), [mixfl.Federated(loss, CLIENTS)],
        client_eval=mixfl.ClientEvaluation(loss, CLIENTS), frozen={"scale": np.float32(3)},
    )  # fmt: skip
    row = mixfl.train(problem, "fedavg", rounds=1, client_lr=1e-9).metrics[-1]
    expected, _ = by_hand((X.astype(np.float64) - 3) ** 2)
    assert row["eval/clients/loss/p50"] == pytest.approx(expected["p50"], rel=1e-5)

"""The state of a model: carried by steps, merged by weighted means, against a plain loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import problems
import pytest
from problems import reference_round, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.measure.check import check
from mixfl.runs.reading import load
from mixfl.trees import Model

KEEP = 0.7  # of the old mean, in a step
START = {"mean": np.full(problems.DIM, 0.5, np.float32)}


def loss(params, batch, state):
    """Logistic regression on inputs without their running mean."""
    mask = batch["mask"][:, None]
    mean = (batch["x"] * mask).sum(0) / jnp.maximum(mask.sum(), 1)
    losses = problems.logistic(params, {**batch, "x": batch["x"] - state["mean"]})
    return losses, {"mean": KEEP * state["mean"] + (1 - KEEP) * mean}


def evaluate(params, state):
    return {"loss": jnp.sum(params["w"] ** 2), "mean": state["mean"][0]}


def problem(terms="two terms", **more):
    own = [
        dataclasses.replace(t, loss=loss) if getattr(t, "examples", None) is not None else t
        for t in problems.PROBLEMS[terms]()
    ]
    return mixfl.Problem(problems.init, own, evaluate, state=START, **more)


def slope(x, mean, batch):
    """The gradient of the mean loss; x = (b, w)."""
    shifted = {**batch, "x": batch["x"] - mean}
    return problems.numpy_logistic(x, shifted)[1]


def steps(x, mean, batches, weight, lr, aug=0.0):
    """Plain steps: the last x and mean, and the sum of the gradients."""
    for batch in batches:
        x = x - lr * (weight * slope(x, mean, batch) + aug)
        mean = KEEP * mean + (1 - KEEP) * batch["x"].mean(0)
    return x, mean


def plain(algorithm, p, simulator, s, rounds):
    """fedavg, pt, 1wgt and 2wgt on one population and one central term, from the paper."""
    w_f, w_c = (t.weight for t in p.terms)
    start = simulator.init().x
    x, mean = problems.flat(start.params).astype(float), np.asarray(start.state["mean"], float)
    gt_f = gt_c = 0.0
    for t in range(rounds):
        fed = reference_round(simulator.feeder, simulator.at(t), t, s)
        p_i = np.array([sum(len(b["y"]) for b in c) for c in fed.clients[0]], float)
        aug_f = gt_c if algorithm == "2wgt" else 0.0
        if algorithm == "1wgt":
            aug_f = w_c * slope(x, mean, fed.drawn[1][0])
        every = [steps(x, mean, c, w_f, s.client_lr, aug_f) for c in fed.clients[0]]
        delta_f = sum(p * (c[0] - x) for p, c in zip(p_i, every, strict=True)) / p_i.sum()
        mean_f = sum(p * c[1] for p, c in zip(p_i, every, strict=True)) / p_i.sum()
        if algorithm in ("fedavg", "1wgt"):
            x, mean = x + delta_f, mean_f
            continue
        lr = s.client_lr  # eta_c = eta x eta_s
        aug_c = gt_f if algorithm == "2wgt" else 0.0
        x_c, mean_c = steps(x, mean, fed.drawn[1], w_c, lr, aug_c)
        delta_c = x_c - x
        if algorithm == "2wgt":
            k = sum(len(c) for c in fed.clients[0])
            gt_f_new = -sum(c[0] - x for c in every) / (lr * k) - gt_c
            gt_c = -delta_c / (lr * len(fed.drawn[1])) - gt_f
            gt_f = gt_f_new
        x = x + (delta_f + delta_c) * (0.5 if algorithm == "2wgt" else 1.0)
        mean = (w_f * mean_f + w_c * mean_c) / (w_f + w_c)
    return x, mean


def trained(p, algorithm, s, rounds=3):
    simulator = Simulator(p, ALGORITHMS[algorithm].build(p, s), s)
    *_, last = simulator.rounds(simulator.init(), 0, rounds)
    return last.state.x, simulator


@pytest.mark.parametrize("algorithm", ["fedavg", "pt", "1wgt", "2wgt"])
def test_against_a_plain_loop(algorithm):
    p, s = problem(), settings(central_batch=6, clip="off")
    found, simulator = trained(p, algorithm, s)
    x, mean = plain(algorithm, p, simulator, simulator.s, 3)
    np.testing.assert_allclose(problems.flat(found.params), x, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found.state["mean"], mean, rtol=2e-5, atol=2e-6)


def test_optimizers_leave_it_alone():
    """fedavg's merged state is the mean, whatever the optimizers do with the parameters."""
    others = dict(client_opt="adam", grad_clip=1e-3, weight_decay=0.1, proximal=0.1)
    means = [
        trained(problem(), "fedavg", settings(clip="off", **more), rounds=1)[0].state["mean"]
        for more in ({}, {"server_opt": "adam", "server_lr": 0.01}, others)
    ]
    np.testing.assert_allclose(means[1], means[0], rtol=1e-6)
    np.testing.assert_allclose(means[2], means[0], rtol=1e-6)
    assert np.abs(means[0] - START["mean"]).max() > 0.05


def test_a_run_saves_resumes_and_loads_it(tmp_path):
    s = dict(rounds=4, cohort_size=3, client_batch=2, checkpoint_every=2, eval_every=2, clip="off")
    out, p = tmp_path / "run", problem()
    whole = mixfl.train(p, "2wgt", out=out, **s)
    assert sorted(whole.params) == ["b", "w"]
    assert whole.metrics[-1]["eval/mean"] == pytest.approx(float(whole.state["mean"][0]), rel=1e-6)
    kept = load(out)
    np.testing.assert_array_equal(kept.state["mean"], whole.state["mean"])
    np.testing.assert_array_equal(kept.params["w"], whole.params["w"])
    again = load(out, like=p.init(jax.random.key(0)))
    np.testing.assert_array_equal(again.state["mean"], whole.state["mean"])
    (out / "model.safetensors").unlink()
    (out / "checkpoints" / "4").rename(tmp_path / "last")
    resumed = mixfl.train(p, "2wgt", out=out, resume=True, **s)
    np.testing.assert_array_equal(resumed.state["mean"], whole.state["mean"])
    np.testing.assert_array_equal(resumed.params["w"], whole.params["w"])


def test_check_looks_at_the_mask():
    lines, good = check(problem(), settings())
    assert good, lines

    def without(params, batch, state):
        losses, _ = loss(params, {**batch, "mask": jnp.ones(len(batch["y"]))}, state)
        return losses, {"mean": batch["x"].mean(0)}

    terms = [dataclasses.replace(t, loss=without) for t in problems.PROBLEMS["two terms"]()]
    p = mixfl.Problem(problems.init, terms, state=START)
    lines, good = check(p, settings())
    assert not good
    assert any("padding" in line and line.startswith("FAIL") for line in lines)


def test_with_frozen_arrays():
    def scaled(params, batch, frozen, state):
        losses, state = loss(params, batch, state)
        return losses * frozen, state

    terms = [dataclasses.replace(t, loss=scaled) for t in problems.PROBLEMS["two terms"]()]
    p = mixfl.Problem(problems.init, terms, state=START, frozen=np.float32(1.0))
    s = settings(central_batch=6)
    found, expected = trained(p, "pt", s)[0], trained(problem(), "pt", s)[0]
    np.testing.assert_allclose(found.state["mean"], expected.state["mean"], rtol=1e-6)
    assert isinstance(p.init(jax.random.key(0)), Model)


def stateless(params, batch):
    return problems.logistic(params, batch)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: mixfl.Problem(problems.init, [mixfl.Federated(loss, problems.clients(1))]),
         "give Problem"),
        (lambda: mixfl.Problem(problems.init, problems.PROBLEMS["two terms"](), state=START),
         "no loss has a parameter of this name"),
        (lambda: mixfl.train(problem(), "example-transfer", rounds=1, cohort_size=2),
         "does not say how it merges"),
        (lambda: mixfl.train(problem(), "pt", rounds=1, cohort_size=2, compute="bfloat16"),
         "lose digits"),
        (lambda: mixfl.train(problem(), "pt", rounds=1, cohort_size=2, central_batch=8,
                             central_chunk=4), "central_chunk = central_batch"),
    ],
)  # fmt: skip
def test_refused(make, told):
    with pytest.raises(MixflError, match=told):
        make()


def test_a_loss_must_return_it():
    def alone(params, batch, state):
        return loss(params, batch, state)[0]

    def other(params, batch, state):
        return loss(params, batch, state)[0], {"mean": jnp.zeros(2)}

    for own, told in ((alone, "must return"), (other, "must be like")):
        term = mixfl.Federated(own, problems.clients(1))
        p = mixfl.Problem(problems.init, [term], state=START)
        with pytest.raises(MixflError, match=told):
            mixfl.train(p, "fedavg", rounds=1, cohort_size=2)

"""`mixfl diagnose --dp`: predictions with the noise of privacy, against what the simulator does."""

import dataclasses
import itertools
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import mixfl
from mixfl.aggregation import private
from mixfl.algorithms import ALGORITHMS
from mixfl.cli import cli
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.measure.diagnosis import diagnose
from mixfl.privacy.planning import planned
from mixfl.privacy.rules import applied
from mixfl.settings import Settings
from mixfl.theory.predictions import Setup, clip_norm, course, errors
from mixfl.theory.private_advice import afford, fitting, left
from mixfl.theory.quadratic import QuadraticModel, QuadraticTerm

D = 5


def matrix(rng, low=0.2, high=2.0, size=D):
    q, _ = np.linalg.qr(rng.normal(size=(size, size)))
    return (q * np.geomspace(low, high, size)) @ q.T


def exact(*terms, start):
    """Without noise of data: terms are (H, minimum, federated)."""
    none = np.zeros((len(start), len(start)))
    made = [QuadraticTerm(str(i), fed, 1.0, -H @ m, H, none, none)
            for i, (H, m, fed) in enumerate(terms)]  # fmt: skip
    return QuadraticModel(made, start)


def apart(start=None):
    rng = np.random.default_rng(5)
    parts = (matrix(rng), rng.normal(size=D), True), (matrix(rng), rng.normal(size=D), False)
    return exact(*parts, start=3 * rng.normal(size=D) if start is None else start), parts


def quadratic(H):
    H = jnp.asarray(H, jnp.float32)
    return lambda x, b: 0.5 * jnp.einsum("ni,ij,nj->n", x - b["a"], H, x - b["a"])


@pytest.mark.parametrize("algorithm", ["pt", "1wgt", "2wgt"])
def test_the_predicted_error_is_that_of_private_runs(algorithm, monkeypatch):
    seeds, keys = itertools.count(), private.secret_keys
    monkeypatch.setattr(private, "secret_keys", lambda seed, j: keys(next(seeds), j))
    model, parts = apart()
    rows = [np.repeat(m[None], 12, 0).astype(np.float32) for _, m, _ in parts]
    people = mixfl.ClientData.from_arrays({"a": rows[0]}, client=np.arange(12) // 4)
    terms = [
        mixfl.Federated(quadratic(parts[0][0]), people),
        mixfl.Central(quadratic(parts[1][0]), {"a": rows[1]}),
    ]
    p = mixfl.Problem(init=lambda key: jnp.asarray(model.start, jnp.float32), terms=terms)
    s = Settings(cohort_size=3, client_batch=1, local_steps=4, client_lr=0.05, server_lr=1.2,
                 central_batch=2, central_steps=3, devices=1, rounds=8, dp_noise_multiplier=0.02,
                 dp_clip=100.0, dp_delta=1e-6)  # fmt: skip
    s = applied(algorithm, s)
    simulator = Simulator(p, ALGORITHMS[algorithm].build(p, s), s)
    H = model.hessian
    best = np.linalg.solve(H, -model.gradient)

    def gap(x):
        off = np.asarray(x, np.float64) - best
        return 0.5 * off @ H @ off

    ran = [[gap(r.state.x) for r in simulator.rounds(simulator.init(), 0, 8)] for _ in range(150)]
    setup = Setup(S=3, K=4, J=3, client_batch=1, central=6, eta_s=1.2)
    loud = setup.changed(noise=0.02, clip=100.0)
    predicted = list(errors(model, course(model, algorithm, loud, 0.05), 8))[1:]
    quiet = list(errors(model, course(model, algorithm, setup, 0.05), 8))[1:]
    added, expected = np.mean(ran, axis=0) - quiet, np.subtract(predicted, quiet)
    assert expected[-1] > quiet[-1]  # noise matters
    assert added[3:].sum() == pytest.approx(expected[3:].sum(), rel=0.2)


def test_one_coordinate_stands_for_many():
    """A model with all parameters, and one whose last coordinate stands for 25 of them."""
    rng = np.random.default_rng(3)
    bends = [matrix(rng), matrix(rng)]
    whole, small = [], []
    for H, flat, fed in zip(bends, (0.3, 0.1), (True, False), strict=True):
        for size, models in ((25, whole), (1, small)):
            grown = np.zeros((D + size, D + size))
            grown[:D, :D], grown[D:, D:] = H, flat * np.eye(size)
            models.append((grown, np.concatenate([np.ones(D) * (1 + fed), np.zeros(size)]), fed))
    start = np.full(D, 3.0)
    large = exact(*whole, start=np.concatenate([start, np.zeros(25)]))
    brief = exact(*small, start=np.append(start, 0.0))._replace(copies=np.append(np.ones(D), 25.0))
    setup = Setup(S=3, K=4, J=4, client_batch=1, central=8, noise=0.3, clip=0.5)
    for algorithm in ("pt", "1wgt", "2wgt"):
        found = [list(errors(m, course(m, algorithm, setup, 0.1), 20)) for m in (large, brief)]
        np.testing.assert_allclose(*found, rtol=1e-9)


def test_many_rounds_at_once():
    model, _ = apart()
    setup = Setup(S=3, K=4, J=3, client_batch=1, central=6, noise=0.2, clip=1.0)
    for rounds in (1, 2, 7, 40):
        first, *_, last = errors(model, course(model, "2wgt", setup, 0.05), rounds)
        assert left(model, "2wgt", setup, 0.05, rounds) == pytest.approx(last / first)
    assert left(model, "2wgt", setup, 1e6, 400) == math.inf


def test_the_usual_norm_of_a_change():
    term = QuadraticTerm("t", True, 1.0, *[np.zeros(1)] * 4, square=4.0, variance=8.0)
    setup = Setup(S=3, K=3, J=3, client_batch=2, central=6)
    assert clip_norm(term, setup, 0.1) == pytest.approx(0.1 * math.sqrt(9 * 4 + 3 * 8 / 2))
    assert clip_norm(term, setup.changed(clip=0.7), 0.1) == 0.7


def test_the_advice_depends_on_the_noise():
    """Without noise, PT's bias decides. With much of it, 2-way has it in its gradients too."""
    model, _ = apart()
    model = model._replace(terms=[t._replace(square=1.0) for t in model.terms])
    setup = Setup(S=10, K=10, J=10, client_batch=1, central=20)
    chosen = [fitting(afford(model, setup.changed(noise=z), 60)).algorithm for z in (0.0, 30.0)]
    assert chosen[0] != "pt"
    assert chosen[1] == "pt"
    errors_left = [min(p.error for p in afford(model, setup.changed(noise=z), 60))
                   for z in (0.0, 1.0, 10.0)]  # fmt: skip
    assert errors_left == sorted(errors_left)


FILE = """import numpy as np, jax.numpy as jnp, mixfl
rng = np.random.default_rng(0)
a = rng.normal(size=(240, 3)).astype('f4')
data = mixfl.ClientData.from_arrays({'a': a}, client=np.repeat(np.arange(40), 6))
H = jnp.diag(jnp.array([1.0, 0.3, 0.1]))
loss = lambda x, b: 0.5 * jnp.einsum('ni,ij,nj->n', x - b['a'], H, x - b['a'])
away = {'a': (2 + rng.normal(size=(300, 3))).astype('f4')}
problem = mixfl.Problem(init=lambda key: jnp.full(3, 5.0), name='own',
    terms=[mixfl.Federated(loss, data), mixfl.Central(loss, away)],
    settings=dict(cohort_size=10, client_batch=2, local_steps=3, client_lr=0.1, rounds=20,
                  devices=1))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(FILE)
    return f"{path}:problem"


def test_diagnose_under_a_budget(file, tmp_path):
    budget = ["--dp", "epsilon=2", "--dp", "delta=1e-3", "--dp", "sampling=none"]
    call = ["diagnose", file, "--budget", "1", *budget, "--json", "--out", str(tmp_path / "page")]
    result = CliRunner().invoke(cli, call)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)["private"]
    plan = planned(40, 10, 20, 1e-3, epsilon=2.0, sampling="none")
    assert said["noise_multiplier"] == pytest.approx(plan["noise_multiplier"])
    assert said["epsilon"] == pytest.approx(plan["epsilon"])
    assert (said["rounds"], said["parameters"]) == (20, 3)
    # An adaptive clip norm has somewhat more noise, for its bits.
    least = plan["noise_multiplier"] * said["clip"] / 10
    assert least < said["deviation"] < 1.3 * least
    assert said["clip"] == said["norm"]
    lefts = [min(one["left"].values(), key=lambda p: p["error"])["error"]
             for one in (said["others"][0], said, *said["others"][1:])]  # fmt: skip
    assert lefts == sorted(lefts, reverse=True)  # less noise, less error
    assert said["others"][-1]["epsilon"] is None  # no noise
    page = (tmp_path / "page/diagnosis.html").read_text()
    assert "clients were measured without noise" in page


@pytest.mark.parametrize(
    ("dp", "message"),
    [
        (["epsilon=0", "delta=1e-3"], "above 0"),
        (["epsilon=2", "delta=0.5"], "below 1/clients"),
        (["epsilon=2"], "delta is missing"),
        (["epsilo=2"], "Did you mean 'epsilon'"),
        (["epsilon=2", "delta=1e-3", "mechanism=banded", "min_sep=2", "clip=0.1"], "independent"),
    ],
)
def test_a_budget_that_makes_no_sense(file, tmp_path, dp, message):
    given = [text for one in dp for text in ("--dp", one)]
    result = CliRunner().invoke(cli, ["diagnose", file, *given, "--out", str(tmp_path / "page")])
    assert isinstance(result.exception, MixflError), result.output
    assert message in str(result.exception)
    assert not (tmp_path / "page").exists()


def test_a_low_clip_norm_is_told(file):
    from mixfl.report.private_diagnosis import private_words
    from mixfl.runs.plan import plan

    given = mixfl.DP(epsilon=2, delta=1e-3, clip=1e-3, sampling="none").keys()
    s = plan(file, "pt", given=given).settings
    p = plan(file, "pt", given=given).problem
    found = diagnose(p, s, budget=1.0)
    assert found.private.clip == 1e-3
    assert any("biases training" in line for line in private_words(found.private))
    # What is measured has no noise: the same figures as without privacy.
    bare = diagnose(p, dataclasses.replace(plan(file, "pt").settings), budget=1.0)
    assert bare.private is None
    both = min(len(found.curve), len(bare.curve))  # how far they get is a matter of time
    assert both > 1
    np.testing.assert_allclose(found.curve[:both], bare.curve[:both])

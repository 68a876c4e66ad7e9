"""What is measured, against closed forms; what is predicted, against what the simulator does."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.cli import cli
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.measure.curvature import Curvature, lanczos
from mixfl.measure.diagnosis import COHORTS, LOOKS, decided, diagnose, noise_known, setup_of
from mixfl.measure.dissimilarity import dissimilarity
from mixfl.measure.gradients import Gradients, Measured, Term
from mixfl.measure.quadratic_model import directions, quadratic_model
from mixfl.report.diagnosis import Verdict
from mixfl.settings import Settings
from mixfl.theory.advice import central_batch, changes, choose
from mixfl.theory.intervals import interval
from mixfl.theory.predictions import (
    Setup,
    course,
    error_parts,
    errors,
    limited_by_noise,
    local,
    optimum,
    rounds_to,
)
from mixfl.theory.quadratic import QuadraticModel, QuadraticTerm, covariance, positive

D = 5


def matrix(rng, low=0.2, high=2.0):
    q, _ = np.linalg.qr(rng.normal(size=(D, D)))
    return (q * np.geomspace(low, high, D)) @ q.T


def quadratic(H):
    H = jnp.asarray(H, jnp.float32)
    return lambda x, b: 0.5 * jnp.einsum("ni,ij,nj->n", x - b["a"], H, x - b["a"])


def problem(points, central, H_f, H_c, start, weights=(1.0, 1.0)):
    """`points` [clients, n, D] and `central` [n, D] are minima of the examples' losses."""
    clients, n = points.shape[:2]
    data = mixfl.ClientData.from_arrays(
        {"a": points.reshape(-1, D).astype(np.float32)}, client=np.repeat(np.arange(clients), n)
    )
    return mixfl.Problem(
        init=lambda key: jnp.asarray(start, jnp.float32),
        terms=[
            mixfl.Federated(quadratic(H_f), data, weight=weights[0]),
            mixfl.Central(quadratic(H_c), {"a": central.astype(np.float32)}, weight=weights[1]),
        ],
    )


@pytest.fixture(scope="module")
def noisy():
    """Known: H_f, H_c, and the covariances of the examples' minima."""
    rng = np.random.default_rng(0)
    H_f, H_c = matrix(rng), matrix(rng)
    own = 0.7 * rng.normal(size=(400, 1, D))
    points = own + 0.5 * rng.normal(size=(400, 12, D))
    central = 1 + 0.8 * rng.normal(size=(4000, D))
    return (
        problem(points, central, H_f, H_c, np.full(D, 2.0), (0.6, 0.4)),
        H_f,
        H_c,
        points,
        central,
    )


def test_dissimilarity_by_hand():
    a, b = {"u": jnp.array([3.0, 0.0])}, {"u": jnp.array([0.0, 4.0])}
    # apart: 9 / 0.5 + 16 / 0.5 = 50, together: 25
    assert tuple(map(float, dissimilarity([a, b], [0.5, 0.5]))) == pytest.approx((25, 2))
    # weights are scaled: the same problem
    assert tuple(map(float, dissimilarity([a, b], [2, 2]))) == pytest.approx((25, 2))
    # 9 / 0.25 + 16 / 0.75 - 25, three terms of which one counts for nothing
    g2, b2 = dissimilarity([a, b, a], [1, 3, 0])
    assert float(g2) == pytest.approx(9 / 0.25 + 16 / 0.75 - 25)
    assert float(b2) == pytest.approx((9 / 0.25 + 16 / 0.75) / 25)


@pytest.mark.parametrize("seed", range(5))
def test_g2_is_0_and_b2_is_1_where_gradients_are_alike_and_never_below(seed):
    rng = np.random.default_rng(seed)
    w = rng.uniform(0.1, 1, 3)
    g = rng.normal(size=D)
    g2, b2 = dissimilarity([w_j * g for w_j in w], w)
    assert float(g2) == pytest.approx(0, abs=1e-5)
    assert float(b2) == pytest.approx(1, abs=1e-5)
    g2, b2 = dissimilarity(list(rng.normal(size=(3, D))), w)
    assert g2 > 0
    assert b2 > 1


@pytest.mark.parametrize("more", [{}, {"cohort_chunk": 7}, {"devices": 2}], ids=str)
def test_the_sampled_metrics_are_those_of_the_rounds_own_batches(noisy, more):
    problem, H_f, H_c, _, _ = noisy
    s = Settings(cohort_size=20, client_batch=5, local_steps=3, central_batch=11, **more)
    x, t = jnp.full(D, 0.3), 4
    measure = Gradients(problem, s)
    found = measure.dissimilarity(x, t)
    # One gradient per client and per central term, no more.
    assert [shapes[-1].steps for shapes in measure.simulator.feeder.shapes] == [1]
    assert [d and d.steps for d in measure.algorithm.feed.draw] == [None, 1]
    pieces = list(measure.simulator.feeder.pieces(measure.algorithm, t))
    batches = np.concatenate([p.clients[0][0].batches.data["a"] for p in pieces])[:20, 0]
    drawn = np.asarray(pieces[0].drawn[1].data["a"]).reshape(-1, D)
    drawn = drawn[np.asarray(pieces[0].drawn[1].mask).reshape(-1) > 0]
    assert batches.shape == (20, 5, D)
    assert drawn.shape == (11, D)
    g_f = 0.6 * ((0.3 - batches) @ H_f).mean((0, 1))
    g_c = 0.4 * ((0.3 - drawn) @ H_c).mean(0)
    apart, together = g_f @ g_f / 0.6 + g_c @ g_c / 0.4, (g_f + g_c) @ (g_f + g_c)
    assert found == pytest.approx((apart - together, apart / together), rel=1e-4)


def test_variances_within_their_intervals(noisy):
    problem, H_f, H_c, _, _ = noisy
    s = Settings(cohort_size=40, client_batch=3, central_batch=16)
    measure = Gradients(problem, s, 4)
    measured = [measure.at(jnp.zeros(D), t) for t in range(12)]
    truth = {
        (0, "v"): 0.6**2 * 0.5**2 * np.trace(H_f @ H_f),
        (0, "between"): 0.6**2 * 0.7**2 * np.trace(H_f @ H_f),
        (1, "v"): 0.4**2 * 0.8**2 * np.trace(H_c @ H_c),
    }
    for (j, name), value in truth.items():
        found = interval([getattr(m.terms[j], name) for m in measured])
        half = found.high - found.mean
        assert half < 0.35 * value  # it says something
        assert abs(found.mean - value) < 2 * half
    assert all(m.terms[1].between == 0 for m in measured)


def test_a_population_of_one_distribution_has_nothing_between_clients():
    rng = np.random.default_rng(1)
    points = rng.normal(size=(300, 8, D))
    given = problem(points, rng.normal(size=(50, D)), np.eye(D), np.eye(D), np.zeros(D))
    measure = Gradients(given, Settings(cohort_size=60, client_batch=4), 2)
    found = interval([measure.at(jnp.ones(D), t).terms[0].between for t in range(10)])
    assert found.low < 0.1
    assert abs(found.mean) < 0.1


def test_a_batch_of_all_central_examples_has_no_noise(noisy):
    given, *_ = noisy
    rng = np.random.default_rng(2)
    few = dataclasses.replace(
        given.terms[1], data=mixfl.Examples.from_arrays({"a": rng.normal(size=(9, D)).astype("f4")})
    )
    whole = dataclasses.replace(given, terms=[given.terms[0], few])
    measure = Gradients(whole, Settings(cohort_size=4, client_batch=2, central_batch=9), 3)
    assert measure.at(jnp.ones(D), 0).terms[1].v == pytest.approx(0, abs=1e-6)


def test_covariances_in_a_basis_are_the_variances(noisy):
    given, *_ = noisy
    measure = Gradients(given, Settings(cohort_size=30, client_batch=3, central_batch=8), 3)
    found = measure.at(jnp.ones(D), 3, basis=jnp.eye(D))
    for term in found.terms:
        assert np.trace(term.v_matrix) == pytest.approx(term.v, rel=1e-3)
        assert np.trace(term.between_matrix) == pytest.approx(term.between, rel=1e-3, abs=1e-4)


def test_smoothness_of_quadratics_and_of_linear_regression(noisy):
    given, H_f, H_c, _, _ = noisy
    measure = Gradients(given, Settings(cohort_size=10, client_batch=3, central_batch=8), 2)
    found = Curvature(given, measure.simulator, 0).smoothness(jnp.zeros(D))
    truth = [np.linalg.eigvalsh(H)[-1] for H in (0.6 * H_f, 0.4 * H_c, 0.6 * H_f + 0.4 * H_c)]
    np.testing.assert_allclose(found, truth, rtol=1e-4)

    rng = np.random.default_rng(3)
    z, y = rng.normal(size=(40, 6, D)).astype("f4"), rng.normal(size=(40, 6)).astype("f4")
    loss = lambda x, b: 0.5 * (b["z"] @ x - b["y"]) ** 2  # noqa: E731
    data = mixfl.ClientData.from_arrays(
        {"z": z.reshape(-1, D), "y": y.reshape(-1)}, client=np.repeat(np.arange(40), 6)
    )
    regression = mixfl.Problem(
        init=lambda key: jnp.zeros(D),
        terms=[mixfl.Federated(loss, data), mixfl.Central(lambda x: 0.05 * jnp.sum(x**2))],
    )
    measure = Gradients(regression, Settings(cohort_size=40, client_batch=6))
    found = Curvature(regression, measure.simulator, 0).smoothness(jnp.ones(D))
    H = np.einsum("kni,knj->ij", z, z) / 240
    np.testing.assert_allclose(
        found, [np.linalg.eigvalsh(H)[-1], 0.1, np.linalg.eigvalsh(H)[-1] + 0.1], rtol=1e-3
    )


def test_lanczos_finds_the_largest_eigenvalue_by_size():
    rng = np.random.default_rng(4)
    q, _ = np.linalg.qr(rng.normal(size=(60, 60)))
    H = jnp.asarray((q * np.concatenate([np.linspace(0, 1, 59), [-3]])) @ q.T, jnp.float32)
    assert lanczos(lambda v: H @ v, jnp.asarray(rng.normal(size=60), jnp.float32)) == pytest.approx(
        3, rel=1e-3
    )


def test_lanczos_stops_when_it_has_converged():
    rng = np.random.default_rng(5)
    q, _ = np.linalg.qr(rng.normal(size=(200, 200)))
    start = jnp.asarray(rng.normal(size=200), jnp.float32)

    def products(values):
        H, calls = jnp.asarray((q * values) @ q.T, jnp.float32), []
        found = lanczos(lambda v: calls.append(1) or H @ v, start)
        return found, len(calls)

    found, few = products(np.concatenate([np.linspace(0, 1, 199), [20.0]]))
    assert found == pytest.approx(20, rel=1e-3)
    assert few < 8
    # Where the largest ones are close, it takes all iterations, and is a little below.
    found, many = products(np.linspace(0, 1, 200))
    assert many == 20
    assert 0.97 < found <= 1.0001


def test_each_terms_products_and_gradients(noisy):
    given, H_f, H_c, points, _ = noisy
    measure = Gradients(given, Settings(cohort_size=400, client_batch=12, central_batch=8), 2)
    curvature = Curvature(given, measure.simulator, 0)
    v = np.arange(1.0, D + 1)
    found = curvature.products(jnp.zeros(D), jnp.asarray(v, jnp.float32))
    np.testing.assert_allclose(found, [0.6 * H_f @ v, 0.4 * H_c @ v], rtol=1e-4, atol=1e-4)
    slope = curvature.gradients(jnp.ones(D))[0]
    np.testing.assert_allclose(slope, 0.6 * H_f @ (1 - points.mean((0, 1))), rtol=1e-3, atol=1e-3)


def test_losses_and_products_are_not_in_compiled_loops(noisy, monkeypatch):
    """XLA's convolutions are slow there on CPUs."""
    given, *_ = noisy
    measure = Gradients(given, Settings(cohort_size=400, client_batch=12, central_batch=8), 2)
    curvature = Curvature(given, measure.simulator, 0)
    assert len(curvature.samples[0].weights) > 1
    for loop in ("scan", "map", "switch", "while_loop", "fori_loop", "cond"):
        monkeypatch.setattr(jax.lax, loop, None)
    x = jnp.ones(D)
    assert curvature.losses(x).shape == (2,)
    assert curvature.products(x, x).shape == (2, D)


def test_a_step_follows_the_measured_gradients(noisy):
    given, *_ = noisy
    s = Settings(cohort_size=20, client_batch=5, central_batch=11)
    still, moving = Gradients(given, s), Gradients(given, s, step=0.25)
    x = jnp.full(D, 0.3)
    g2, b2, after = moving.stepped(x, 4)
    assert (g2, b2) == pytest.approx(still.dissimilarity(x, 4))
    mixed = sum(t.gradient for t in still.at(x, 4).terms)
    np.testing.assert_allclose(after, 0.3 - 0.25 * mixed, rtol=1e-5)
    assert np.array_equal(still.stepped(x, 4)[2], x)


def of_noise(values, inside=None) -> list[Measured]:
    """One federated term; its variances in all parameters and in one direction."""
    inside = values if inside is None else inside
    return [
        Measured(0, 1, [Term(np.zeros(1), 0.0, v, np.zeros((1, 1)), np.full((1, 1), w))])
        for v, w in zip(values, inside, strict=True)
    ]


def test_noise_is_known_when_its_intervals_are_narrow():
    setup = Setup(10, 2, 2, 5, 50)
    narrow, wide = [1.0, 1.05, 0.95, 1.0], [1.0, 1.5, 0.5, 1.0]
    assert noise_known(of_noise(narrow), setup)
    assert not noise_known(of_noise(wide), setup)
    assert not noise_known(of_noise(narrow, wide), setup)
    # Much within clients hides what is uncertain between them.
    loud = [m._replace(terms=[t._replace(v=100.0, v_matrix=np.full((1, 1), 100.0))
            for t in m.terms]) for m in of_noise(wide)]  # fmt: skip
    assert noise_known(loud, setup)


@pytest.mark.parametrize(("batch", "cohorts"), [(900, LOOKS[0]), (100, COHORTS)])
def test_measuring_ends_when_it_is_accurate_enough(batch, cohorts):
    """A batch of all central rows has no noise; that of another is hard to know from two batches of
    five parameters a cohort. The noise of 150 clients is easy to know."""
    rng = np.random.default_rng(10)
    points, central = rng.normal(size=(200, 6, D)), rng.normal(size=(900, D))
    given = problem(points, central, np.eye(D), np.eye(D), np.full(D, 3.0))
    s = Settings(cohort_size=150, client_batch=3, central_batch=batch, client_lr=0.1, local_steps=2)
    seen: list[str] = []
    diagnose(given, s, budget=1e6, report=lambda i, n, what: seen.append(what))
    assert seen.count("gradients and their noise") == cohorts


# The quadratic model, and what is predicted on it


def test_a_problem_in_small_is_the_problem_where_there_are_few_directions(noisy):
    given, H_f, H_c, points, central = noisy
    measure = Gradients(given, Settings(cohort_size=400, client_batch=6, central_batch=4000), 2)
    curvature = Curvature(given, measure.simulator, 0)
    found = directions(curvature, jnp.ones(D), jnp.full(D, 2.0))
    measured = [measure.at(jnp.ones(D), t, found.basis) for t in (0, 1)]
    tiny = quadratic_model(given, found, measured)
    assert [t.federated for t in tiny.terms] == [True, False]
    for t, H in zip(tiny.terms, (0.6 * H_f, 0.4 * H_c), strict=True):
        np.testing.assert_allclose(
            np.linalg.eigvalsh(t.hessian), np.linalg.eigvalsh(H), rtol=1e-3, atol=1e-4
        )
    # f - f* at the start, from all the data (of the server a sample).
    m_f, m_c = points.mean((0, 1)), central.mean(0)
    H = 0.6 * H_f + 0.4 * H_c
    off = 2 - np.linalg.solve(H, 0.6 * H_f @ m_f + 0.4 * H_c @ m_c)
    first = next(errors(tiny, course(tiny, "pt", Setup(1, 1, 1, 1, 1), 0.1), 0))
    assert first == pytest.approx(0.5 * off @ H @ off, rel=0.02)


def exact(terms, start, names=None) -> QuadraticModel:
    """Without noise: terms are (H, minimum, federated, weight)."""
    none = np.zeros((D, D))
    return QuadraticModel(
        [QuadraticTerm(str(i), fed, w, -w * H @ m, w * H, none, none)
         for i, (H, m, fed, w) in enumerate(terms)],
        start,
    )  # fmt: skip


@pytest.mark.parametrize("eta_m", [None, 0.8])
@pytest.mark.parametrize("algorithm", ["pt", "1wgt", "2wgt"])
@pytest.mark.parametrize("populations", [1, 2])
def test_without_noise_the_prediction_is_what_the_simulator_does(algorithm, populations, eta_m):
    rng = np.random.default_rng(5)
    start = rng.normal(size=D)
    parts = [(matrix(rng), rng.normal(size=D), j < populations, 0.3 + 0.5 * j)
             for j in range(populations + 1)]  # fmt: skip
    terms = []
    for j, (H, m, federated, weight) in enumerate(parts):
        rows = np.repeat(m[None], 12, 0).astype(np.float32)
        if federated:
            data = mixfl.ClientData.from_arrays({"a": rows}, client=np.arange(12) // 4)
            terms.append(mixfl.Federated(quadratic(H), data, weight=weight, name=f"p{j}"))
        else:
            terms.append(mixfl.Central(quadratic(H), {"a": rows}, weight=weight))
    given = mixfl.Problem(init=lambda key: jnp.asarray(start, jnp.float32), terms=terms)
    s = Settings(cohort_size=3, client_batch=1, local_steps=4, client_lr=0.1, server_lr=1.3,
                 central_batch=2, central_steps=3, merge_lr=eta_m or "auto")  # fmt: skip
    simulator = Simulator(given, ALGORITHMS[algorithm].build(given, s), s)
    tiny = exact(parts, start)
    H = tiny.hessian
    best = np.linalg.solve(H, -tiny.gradient)

    def gap(x):
        off = np.asarray(x, np.float64) - best
        return 0.5 * off @ H @ off

    setup = Setup(S=3, K=4, J=3, client_batch=1, central=6, eta_s=1.3, eta_m=eta_m)
    predicted = list(errors(tiny, course(tiny, algorithm, setup, 0.1), 12))
    ran = [gap(start)]
    ran += [gap(r.state.x) for r in simulator.rounds(simulator.init(), 0, 12)]
    np.testing.assert_allclose(predicted, ran, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("federated", [True, False])
def test_the_noise_of_local_steps_is_that_of_many_trials(federated):
    rng = np.random.default_rng(6)
    H, a, b = matrix(rng), matrix(rng), matrix(rng)
    term = QuadraticTerm("t", federated, 1.0, rng.normal(size=D), H, a, b)
    setup = Setup(S=2, K=4, J=3, client_batch=5, central=9, clients=41)
    found, trials, eta = local(term, setup, 0.2), 40000, 0.2
    steps = 4 if federated else 3

    def noise(cov, count):
        return rng.multivariate_normal(np.zeros(D), cov, count)

    x = np.zeros((trials, D))
    own = noise(b, trials) if federated else 0
    for _ in range(steps):
        x = x - eta * (x @ H + term.gradient + own + noise(a / (5 if federated else 3), trials))
    cov = np.cov(x.T) * ((39 / 40) / 2 if federated else 1)  # a cohort of 2 of 41
    np.testing.assert_allclose(found.noise, cov, atol=0.04 * np.abs(cov).max())
    np.testing.assert_allclose(x.mean(0), -found.push @ term.gradient, atol=0.02)


@pytest.mark.parametrize("algorithm", ["pt", "1wgt", "2wgt"])
def test_errors_are_those_of_the_mean_and_the_covariance(algorithm):
    rng = np.random.default_rng(11)
    parts = [(matrix(rng), rng.normal(size=D), j < 1, 0.3 + 0.5 * j) for j in range(2)]
    loud = exact(parts, rng.normal(size=D))
    loud = loud._replace(terms=[t._replace(v=matrix(rng), between=matrix(rng)) for t in loud.terms])
    one_round = course(loud, algorithm, Setup(4, 3, 3, 2, 12), 0.2)
    mean, cov = np.zeros(len(one_round.shift)), np.zeros_like(one_round.noise)
    mean[:D] = loud.start
    expected = []
    for _ in range(15):
        off = mean[:D] - optimum(loud)
        expected.append(0.5 * (off @ loud.hessian @ off + np.sum(loud.hessian * cov[:D, :D])))
        mean = one_round.map @ mean + one_round.shift
        cov = one_round.map @ cov @ one_round.map.T + one_round.noise
    np.testing.assert_allclose(list(errors(loud, one_round, 14)), expected, rtol=1e-9)
    noise = [n for _, n in error_parts(loud, one_round, 14)]
    assert noise[0] == 0
    assert (np.diff(noise) > 0).all()


def test_rounds_to_an_aim_and_limits_by_noise():
    rng = np.random.default_rng(7)
    parts = [(matrix(rng), np.zeros(D), True, 1.0), (matrix(rng), np.zeros(D), False, 1.0)]
    tiny = exact(parts, rng.normal(size=D))
    setup = Setup(10, 5, 5, 4, 200)
    n = rounds_to(tiny, "pt", setup, 0.05, 0.01)
    course_ = list(errors(tiny, course(tiny, "pt", setup, 0.05), 50))
    assert course_[math.ceil(n)] <= 0.01 * course_[0] < course_[math.floor(n)]
    assert rounds_to(tiny, "pt", setup, 50.0, 0.01) == math.inf  # diverges
    assert not limited_by_noise(tiny, "pt", setup, 0.05, 0.01)
    loud = tiny._replace(terms=[t._replace(v=1e4 * np.eye(D)) for t in tiny.terms])
    assert limited_by_noise(loud, "pt", setup, 0.05, 0.01)
    assert not limited_by_noise(loud, "pt", setup, 50.0, 0.01)  # but by its length


def test_advice_follows_what_is_known_of_the_algorithms():
    rng = np.random.default_rng(8)
    H = matrix(rng, 0.02)
    start = 3 * rng.normal(size=D)
    apart = rng.normal(size=D)
    alike = exact([(H, 0 * apart, True, 1.0), (H, 0 * apart, False, 1.0)], start)
    different = exact([(H, apart, True, 1.0), (matrix(rng, 0.02), -apart, False, 1.0)], start)
    # With K = 1, PT and 1-way are the same: of two alike, the one that asks least.
    once = {p.algorithm: p for p in choose(alike, Setup(10, 1, 1, 4, 40), 1e-3).all}
    assert once["pt"][1:] == pytest.approx(once["1wgt"][1:])
    only = once["pt"].rounds / once["2wgt"].rounds
    chosen = choose(alike, Setup(10, 1, 1, 4, 40), 1e-3).chosen.algorithm
    assert chosen == ("pt" if only <= 1.05 else "2wgt")
    setup = Setup(10, 20, 20, 4, 800)
    found = choose(different, setup, 1e-3)
    rounds = {p.algorithm: p.rounds for p in found.all}
    assert found.chosen.algorithm != "pt"
    assert rounds["pt"] > 2 * found.chosen.rounds
    said = dict(changes(different, setup, 1e-3, 500, found.chosen.algorithm))
    assert found.chosen.algorithm not in said.values()
    fewer = choose(different, setup.changed(K=5, J=5), 1e-3, 500).chosen.algorithm
    assert said.get("local steps K = 5", found.chosen.algorithm) == fewer
    two = exact([(H, apart, True, 1.0), (H, -apart, True, 1.0)], start)
    assert [p.algorithm for p in choose(two, setup, 1e-3).all] == ["pt", "2wgt"]
    loud = alike._replace(terms=[t._replace(v=1e6 * np.eye(D)) for t in alike.terms])
    beyond = choose(loud, setup, 1e-3, 200)
    assert not beyond.reached
    # Nothing that could be taken for a number of rounds, but a learning rate each.
    assert all(p.rounds == math.inf and math.isfinite(p.eta) for p in beyond.all)


def test_the_central_batch_is_the_rubrics_where_variances_are_alike():
    setup = Setup(S=10, K=4, J=4, client_batch=5, central=200)
    assert central_batch("pt", setup, v=2.0, between=0.0, v_c=2.0) == (50, 50)
    assert central_batch("1wgt", setup, v=2.0, between=0.0, v_c=2.0) == (200, 200)
    assert central_batch("2wgt", setup, v=2.0, between=0.0, v_c=6.0) == (50, 150)
    # Clients that differ among themselves: the cohort is noisier, a smaller batch will do.
    assert central_batch("2wgt", setup, v=2.0, between=0.1, v_c=2.0) == (50, 25)
    assert central_batch("2wgt", setup, v=0.0, between=0.0, v_c=2.0) == (50, 50)


def test_the_probe_overrules_only_clearly():
    def of(losses):
        return decided(0.1, {eta: np.full(10, loss) for eta, loss in losses.items()}, first=5.0)

    assert of({0.05: 1.02, 0.1: 1.01, 0.2: 1.0}) == 0.1
    assert of({0.05: 1.0, 0.1: 3.0, 0.2: math.inf}) == 0.05
    assert of({0.1: 3.0, 0.2: 1.1, 0.4: 1.0}) == 0.2


def test_matrices_made_positive():
    values = lambda m: np.linalg.eigvalsh(m)  # noqa: E731
    np.testing.assert_allclose(values(positive(np.diag([2.0, -3.0]))), [2, 3])
    kept = covariance(np.diag([3.0, 2.0, -1.0]))
    assert np.trace(kept) == pytest.approx(4)
    assert values(kept)[0] > -1e-12
    assert np.abs(covariance(np.diag([1.0, -3.0]))).max() == 0


# The whole of it


@pytest.fixture(scope="module")
def divided():
    """Two kinds of clients, told apart by a column."""
    rng = np.random.default_rng(9)
    kind = np.arange(200) % 2
    points = 2.0 * (2 * kind[:, None, None] - 1) + 0.3 * rng.normal(size=(200, 6, D))
    columns = {
        "a": points.reshape(-1, D).astype("f4"),
        "kind": np.repeat(kind, 6).astype("f4"),
        "other": np.repeat(rng.integers(0, 2, 200), 6).astype("f4"),
    }
    data = mixfl.ClientData.from_arrays(columns, client=np.repeat(np.arange(200), 6))
    loss = quadratic(np.eye(D))
    return mixfl.Problem(
        init=lambda key: jnp.full(D, 4.0),
        terms=[
            mixfl.Federated(lambda x, b: loss(x, {"a": b["a"]}), data),
            mixfl.Central(loss, {"a": rng.normal(size=(500, D)).astype("f4")}),
        ],
        settings=dict(cohort_size=20, client_batch=3, local_steps=2, client_lr=0.1),
    )


@pytest.mark.slow
def test_diagnose_says_whether_dividing_a_population_pays(divided):
    s = Settings(**divided.settings)
    by_kind = diagnose(divided, s, budget=1, column="kind").splits[0]
    by_other = diagnose(divided, s, budget=1, column="other").splits[0]
    assert by_kind.pays
    assert by_kind.explained > 0.8
    assert by_kind.noise > 0.5
    assert not by_other.pays
    assert by_other.explained < 0.3
    assert by_kind.g2 > by_other.g2  # G rises
    with pytest.raises(MixflError, match="no column 'nothing'"):
        diagnose(divided, s, budget=1, column="nothing")


def test_diagnose_needs_something_to_choose(divided):
    alone = dataclasses.replace(divided, terms=divided.terms[:1])
    with pytest.raises(MixflError, match="only one term"):
        diagnose(alone, Settings(cohort_size=5))
    with pytest.raises(MixflError, match="no federated term"):
        diagnose(dataclasses.replace(divided, terms=divided.terms[1:]), Settings())


def test_the_setup_is_what_the_clients_can_reach(divided):
    s = Settings(cohort_size=20, client_batch=3, local_steps=50)
    setup = setup_of(divided, s)
    assert (setup.K, setup.J, setup.central, setup.clients) == (2, 2, 120, 200)
    assert setup_of(divided, dataclasses.replace(s, central_batch=7)).central == 14
    assert setup_of(divided, dataclasses.replace(s, merge_lr=1.0)).eta_m == 1 != setup.eta_m


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(
        "import numpy as np, jax.numpy as jnp, mixfl\n"
        "rng = np.random.default_rng(0)\n"
        "a = rng.normal(size=(240, 3)).astype('f4')\n"
        "data = mixfl.ClientData.from_arrays({'a': a}, client=np.repeat(np.arange(40), 6))\n"
        "H = jnp.diag(jnp.array([1.0, 0.3, 0.1]))\n"
        "loss = lambda x, b: 0.5 * jnp.einsum('ni,ij,nj->n', x - b['a'], H, x - b['a'])\n"
        "away = {'a': (2 + rng.normal(size=(300, 3))).astype('f4')}\n"
        "problem = mixfl.Problem(init=lambda key: jnp.full(3, 5.0), name='own',\n"
        "    terms=[mixfl.Federated(loss, data), mixfl.Central(loss, away)],\n"
        "    evaluate=lambda x: {'loss': jnp.sum(x**2)},\n"
        "    settings=dict(cohort_size=10, client_batch=2, local_steps=3, client_lr=0.1,\n"
        "                  rounds=6, eval_every=2))\n"
    )
    return f"{folder}/own.py:problem"


def test_diagnose_on_the_command_line(file, tmp_path):
    out = tmp_path / "page"
    found = CliRunner().invoke(
        cli, ["diagnose", file, "--budget", "1", "--json", "--out", str(out)]
    )
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert said["algorithm"] in ("pt", "1wgt", "2wgt")
    assert said["g2"] > 0
    assert said["b2"] > 1
    assert set(said["variances"]) == {"federated", "central"}
    # Gradients of an example: H (x - a) with a of variance 1.
    v = said["variances"]["federated"]["per_example"]
    assert v["low"] < 1.1 < v["high"] or abs(v["mean"] - 1.1) < 0.3
    assert said["beta"]["sum"]["mean"] == pytest.approx(2, rel=1e-3)
    assert said["steps"]["guaranteed_client_lr"][said["algorithm"]] < said["client_lr"]
    assert said["download_bytes"] in (12, 24)
    assert said["upload_bytes"] > 0
    assert json.loads((out / "diagnosis.json").read_text())["algorithm"] == said["algorithm"]
    page = (out / "diagnosis.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_verdict_says_when_probes_decided_or_were_cut_short(file):
    verdict = Verdict(file, None, None, {}, 0.1, 1, None, lambda *_: None)
    before = "\n".join(verdict.lines())
    assert "compared by probes" not in before
    assert verdict.as_json()["loss_in_probes"] == {}
    found = {"pt": 0.5, "2wgt": 0.25}
    verdict.diagnosis = verdict.diagnosis._replace(tried=found, changes=[])
    after = "\n".join(verdict.lines())
    assert "compared by probes" in after
    assert "Parallel Training 0.5, 2-way Gradient Transfer 0.25" in after
    assert "not predicted" in after
    assert verdict.as_json()["loss_in_probes"] == found
    for cut_short in (False, True):
        verdict.diagnosis = verdict.diagnosis._replace(cut_short=cut_short, seconds=61.0)
        said = "\n".join(verdict.lines())
        assert ("when the time ran out" in said) == cut_short
        assert ("such as --budget 240" in said) == cut_short
        assert verdict.as_json()["cut_short"] is cut_short


def test_diagnose_says_what_is_wrong(file, tmp_path):
    for arguments, message in [
        (["diagnose", file, "--target", "2"], "--target"),
        (["diagnose", "smil"], "smile"),
        (["diagnose", file, "--set", "client_lr=1e30", "--budget", "1"], "lower client_lr"),
    ]:
        found = CliRunner().invoke(cli, arguments)
        assert found.exit_code != 0
        assert message in found.output + str(found.exception)


def test_dissimilarity_on_the_command_line(file, tmp_path):
    arguments = ["dissimilarity", file, "--rounds", "12", "--simulations", "2", "--json"]
    found = CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    curves = np.array(said["g2_curves"])
    assert curves.shape == (2, 13)
    assert not np.array_equal(curves[0], curves[1])
    assert said["g2"] == curves[:, 10:].max()
    assert said["g2"] < curves.max() + 1e-9
    assert (tmp_path / "dissimilarity.png").stat().st_size > 1000


def test_a_run_measures_with_each_evaluation(file, tmp_path):
    arguments = ["run", file, "--algorithm", "1wgt", "--measure", "dissimilarity"]
    found = CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path / "run")])
    assert found.exit_code == 0, found.output
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert [r["round"] for r in rows] == [2, 4, 6]
    assert all(r["theory/g2"] > 0 and r["theory/b2"] >= 1 for r in rows)
    run = mixfl.load(tmp_path / "run")
    from mixfl.tasks import find

    given = find(file).build({}, None)
    s = Settings(**given.settings)
    last = Gradients(given, s).dissimilarity(jax.tree.map(jnp.asarray, run.params), 6)
    assert last == pytest.approx((rows[-1]["theory/g2"], rows[-1]["theory/b2"]), rel=1e-5)
    wrong = CliRunner().invoke(cli, ["run", file, "--algorithm", "pt", "--measure", "much"])
    assert "dissimilarity" in str(wrong.exception)


def test_what_is_measured_does_not_change_the_run(file, tmp_path):
    for name, more in (("a", []), ("b", ["--measure", "dissimilarity"])):
        found = CliRunner().invoke(
            cli, ["run", file, "--algorithm", "2wgt", "--out", str(tmp_path / name), *more]
        )
        assert found.exit_code == 0, found.output
    a, b = (mixfl.load(tmp_path / n).params for n in "ab")
    assert np.array_equal(a, b)

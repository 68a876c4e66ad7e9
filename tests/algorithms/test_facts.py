"""Facts 2, 3, 4 and 11 of the design, on quadratics whose optimum and fixed points are known.

A loss is a x^2 / 2 - c x in every coordinate, so its gradient is a x - c; a = 0 makes it linear.
All examples of a client are the same, so that there is no sampling noise. From x, k steps with
the gradient g(x) + aug move by

    Delta = -eta S (g(x) + aug),    S = sum over j < k of (1 - eta a)^j,

and every fixed point is the root of a weighted sum of gradients.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator


def loss(x, batch):
    return jnp.sum(0.5 * batch["a"] * x**2 - batch["c"] * x, axis=-1)


def examples(a, c, n):
    a, c = np.broadcast_arrays(np.atleast_1d(a), c)
    return {"a": np.repeat([a], n, axis=0), "c": np.repeat([c], n, axis=0)}


def federated(*clients, weight=1.0, name="federated"):
    """Clients as (a, c, examples)."""
    data = {f"client {i}": examples(*client) for i, client in enumerate(clients)}
    return mixfl.Federated(loss, mixfl.ClientData.from_clients(data), weight, name)


def central(a, c, weight=1.0, name="central"):
    return mixfl.Central(loss, examples(a, c, 1), weight, name)


def run(algorithm, terms, x0, rounds, **settings):
    """The models [rounds + 1, d]; batches of one example, and all clients in every round."""
    size = min(len(t.clients) for t in terms if isinstance(t, mixfl.Federated))
    defaults = dict(rounds=rounds, cohort_size=size, client_batch=1, devices=1)
    s = mixfl.Settings(**(defaults | settings))
    problem = mixfl.Problem(lambda key: jnp.array(x0, jnp.float32), terms)
    simulator = Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)
    found = [np.array(r.state.x) for r in simulator.rounds(simulator.init(), 0, rounds)]
    return np.array([x0, *found], dtype=float)


def travel(a, eta, k):
    """S: the steps that count, of k that each shrink the gradient by 1 - eta a."""
    return sum((1 - eta * np.asarray(a, float)) ** j for j in range(k))


def root(*parts):
    """The x with sum of w (a x - c) = 0, for parts (w, a, c)."""
    return sum(w * np.asarray(c) for w, a, c in parts) / sum(w * np.asarray(a) for w, a, c in parts)


# Fact 4 -------------------------------------------------------------------------------------------

UNEQUAL = federated((1.0, [1.0, -1.0], 3), (3.0, [0.5, 2.0], 1))  # clients (a, c, examples)
OTHER = central(2.0, [-1.0, 4.0])


def test_fact_4_with_one_step_pt_and_1wgt_take_the_same_step():
    settings = dict(local_steps=1, client_lr=0.1, server_lr=0.7)  # so eta_c = 0.07
    pt = run("pt", [UNEQUAL, OTHER], [2.0, 1.0], 5, **settings)
    one_way = run("1wgt", [UNEQUAL, OTHER], [2.0, 1.0], 5, **settings)
    np.testing.assert_allclose(one_way, pt, rtol=1e-6)
    # One batch of one example per client: each weighs the same, f_f has the mean a and c.
    gradient = (2.0 + 2.0) * pt[:-1] - (np.array([0.75, 0.5]) + [-1.0, 4.0])
    np.testing.assert_allclose(np.diff(pt, axis=0), -0.07 * gradient, rtol=1e-4, atol=1e-6)


def test_fact_4_without_central_loss_all_are_fedavg():
    # Every number is a short binary fraction, so that float32 is exact.
    clients = federated((1.0, [3.0, -1.0], 1), (0.5, [1.0, 2.0], 3))
    terms = [clients, central(2.0, [-1.0, 4.0], weight=0.0)]
    settings = dict(local_steps=3, client_lr=0.5)
    fedavg = run("fedavg", terms, [2.0, 1.0], 3, **settings)
    assert (np.abs(np.diff(fedavg, axis=0)) > 0.01).all()
    np.testing.assert_array_equal(run("pt", terms, [2.0, 1.0], 3, **settings), fedavg)
    np.testing.assert_array_equal(run("1wgt", terms, [2.0, 1.0], 3, **settings), fedavg)
    two_way = run("2wgt", terms, [2.0, 1.0], 3, **settings, merge_lr=1)
    np.testing.assert_array_equal(two_way[:2], fedavg[:2])
    # From then on its central steps carry the clients' gradient.
    assert (np.abs(two_way[2] - fedavg[2]) > 0.1).all()


# Fact 3 -------------------------------------------------------------------------------------------

ETA, K = 0.05, 10
A_F, C_F = 4.0, np.array([4.0, -2.0])  # the clients' minimum is [1, -0.5]
A_C, C_C = 0.5, np.array([-1.0, 1.5])  # the server's is [-2, 3]


@pytest.mark.parametrize("apart", [0, 3], ids=["equal clients", "equal curvature"])
@pytest.mark.parametrize("algorithm", ["pt", "1wgt", "2wgt"])
def test_fact_3_only_gradient_transfer_reaches_the_optimum(algorithm, apart):
    terms = [federated((A_F, C_F + apart, K), (A_F, C_F - apart, K)), central(A_C, C_C)]
    models = run(algorithm, terms, [3.0, 3.0], 60, local_steps=K, client_lr=ETA)
    optimum = root((1, A_F, C_F), (1, A_C, C_C))
    if algorithm == "pt":
        fixed = root((travel(A_F, ETA, K), A_F, C_F), (travel(A_C, ETA, K), A_C, C_C))
        assert (np.abs(fixed - optimum) > 0.2).all()  # the bias that is measured here
        np.testing.assert_allclose(models[-1], fixed, atol=2e-6)
    else:
        np.testing.assert_allclose(models[-1], optimum, atol=2e-6)


DRIFT = {
    "unequal curvature": [(1.0, [2.0, 1.0], K), (6.0, [-6.0, 4.0], K)],
    "unequal K_i": [(3.0, [2.0, 1.0], K), (3.0, [-1.0, 4.0], 2)],
}


@pytest.mark.parametrize("clients", DRIFT)
@pytest.mark.parametrize("algorithm", ["fedavg", "pt", "1wgt", "2wgt"])
def test_fact_3_unequal_clients_leave_a_drift(algorithm, clients):
    (a_1, c_1, k_1), (a_2, c_2, k_2) = DRIFT[clients]
    terms = [federated(*DRIFT[clients]), central(A_C, C_C)]
    settings = dict(local_steps=K, client_lr=ETA, weighting="uniform")
    models = run(algorithm, terms, [0.5, 0.5], 60, **settings)
    np.testing.assert_allclose(models[-1], models[-2], atol=1e-5)  # it has arrived
    mixed = [] if algorithm == "fedavg" else [(1, A_C, C_C)]
    optimum = root((0.5, a_1, c_1), (0.5, a_2, c_2), *mixed)
    assert (np.abs(models[-1] - optimum) > 0.02).all()
    # Where it arrived: a client counts as much as it travels.
    s_1, s_2, s_c = travel(a_1, ETA, k_1), travel(a_2, ETA, k_2), travel(A_C, ETA, K)
    at = {"fedavg": 0, "pt": s_c, "1wgt": (s_1 + s_2) / 2}
    if algorithm in at:
        parts = (s_1 / 2, a_1, c_1), (s_2 / 2, a_2, c_2), (at[algorithm], A_C, C_C)
        np.testing.assert_allclose(models[-1], root(*parts), atol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "weighting", "weights"),
    [("1wgt", "uniform", (1, 3)), ("2wgt", "uniform", (1, 3)), ("1wgt", "examples", (1, 9))],
)
def test_fact_3_with_unequal_k_a_client_is_weighted_by_p_k(algorithm, weighting, weights):
    # Linear client losses: S is K_i exactly. Batches of one example: K_i = n_i = 1 and 3.
    c_1, c_2 = np.array([1.0, -2.0]), np.array([3.0, 2.0])
    terms = [federated((0.0, c_1, 1), (0.0, c_2, 3)), central(1.0, [0.5, 0.0])]
    settings = dict(local_steps=3, client_lr=0.2, weighting=weighting)
    x = run(algorithm, terms, [0.0, 0.0], 60, **settings)[-1]
    # The gradient at the optimum is x - c_c - (weighted mean of the c_i) = 0.
    np.testing.assert_allclose(
        x, [0.5, 0.0] + np.average([c_1, c_2], axis=0, weights=weights), atol=1e-5
    )


# Fact 2 -------------------------------------------------------------------------------------------

# The gradients a x - c of the first two, and of all three.
QUADRATIC = [
    federated((1.0, [1.0, 2.0], 1)),
    central(2.0, [0.5, 0.0]),
    central(0.5, [3.0, 3.0], name="another"),
]
GRADIENT = {2: (3.0, np.array([1.5, 2.0])), 3: (3.5, np.array([4.5, 5.0]))}
LINEAR = [
    federated((0.0, [1.0, -2.0], 1)),
    central(0.0, [0.5, 4.0]),
    central(0.0, [2.0, 2.0], name="another"),
]


@pytest.mark.parametrize(("m", "merge_lr"), [(2, 1.0), (2, "auto"), (3, 1.0), (3, "auto")])
def test_fact_2_at_one_step_2wgt_adds_the_gradient_of_the_round_before_per_other_term(m, merge_lr):
    eta = 0.05
    settings = dict(local_steps=1, client_lr=eta, merge_lr=merge_lr)
    x = run("2wgt", QUADRATIC[:m], [2.0, -1.0], 6, **settings)
    a, c = GRADIENT[m]
    now = a * x[:-1] - c
    before = np.concatenate([np.zeros((1, 2)), now[:-1]])  # nothing to transfer at first
    eta_m = 1 / m if merge_lr == "auto" else 1.0
    expected = -eta * eta_m * (now + (m - 1) * before)
    np.testing.assert_allclose(np.diff(x, axis=0), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("m", [2, 3])
def test_fact_2_in_steady_state_2wgt_steps_m_times_as_far_as_pt_unless_auto(m):
    # Linear losses: the gradient is always the same. The numbers are exact in float32.
    settings = dict(local_steps=1, client_lr=0.25)
    steps = {
        (algorithm, merge_lr): np.diff(
            run(algorithm, LINEAR[:m], [0.0, 0.0], 3, merge_lr=merge_lr, **settings), axis=0
        )
        for algorithm, merge_lr in [("pt", "auto"), ("2wgt", 1.0), ("2wgt", "auto")]
    }
    pt = steps["pt", "auto"]
    assert (pt == pt[0]).all()
    assert (pt[0] != 0).all()
    np.testing.assert_array_equal(steps["2wgt", 1.0][0], pt[0])  # the first transfers nothing
    np.testing.assert_array_equal(steps["2wgt", 1.0][1:], m * pt[1:])
    np.testing.assert_allclose(steps["2wgt", "auto"][1:], pt[1:], rtol=1e-6)


def test_fact_2_where_local_steps_saturate_a_full_merge_stalls_and_auto_cures_it():
    # eta a = 1: one step reaches a term's minimum, the other 99 stay there.
    terms = [federated((1.0, [1.0, 2.0], 100)), central(1.0, [3.0, -2.0])]
    settings = dict(local_steps=100, client_lr=1.0, central_batch=1)
    optimum = np.array([2.0, 0.0])
    stalled = run("2wgt", terms, [6.0, 5.0], 40, merge_lr=1, **settings) - optimum
    cured = run("2wgt", terms, [6.0, 5.0], 40, merge_lr="auto", **settings) - optimum
    np.testing.assert_allclose(stalled[1:6] / stalled[:5], -1, atol=0.2)
    assert (np.abs(stalled[-20:]).max(axis=0) > np.abs(stalled[0])).all()
    assert (np.abs(cured[1:]) < 0.02 * np.abs(cured[0])).all()


# Fact 11 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("w_f", "w_c"), [(0.4, 0.6), (0.6, 0.4)])
def test_fact_11_where_local_steps_saturate_1wgt_multiplies_the_error_by_w_c_over_w_f(w_f, w_c):
    terms = [
        federated((1.0, [1.0, 2.0], 40), weight=w_f),
        central(1.0, [3.0, -2.0], weight=w_c),
    ]
    models = run("1wgt", terms, [6.0, 5.0], 10, local_steps=40, client_lr=1.0)
    error = models - root((w_f, 1.0, [1.0, 2.0]), (w_c, 1.0, [3.0, -2.0]))
    np.testing.assert_allclose(error[1:] / error[:-1], -w_c / w_f, rtol=1e-3)
    grows = np.abs(error[-1]) > 10 * np.abs(error[0])
    assert (grows == (w_c > w_f)).all()

"""Row-sparse tables: the same results as dense ones, at the price of a client's own rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_problem import (
    DIM,
    PROBLEMS,
    ROWS,
    SETTINGS,
    N,
    assert_equal,
    data,
    init,
    loss,
    penalty,
    population,
    simulator,
    trained,
)

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.forms import rows as sparse
from mixfl.measure.check import check_problem

SPARSE = ("fedavg", "pt", "1wgt", "2wgt", "pretrain")  # fact 7's, and what consists of them


VARIANTS = {
    "plain": {},
    "weighted by steps": dict(weighting="steps"),
    "uniform": dict(weighting="uniform"),
    "server momentum": dict(server_opt="sgd(momentum=0.9)", server_lr=0.5),
}


@pytest.mark.parametrize(
    ("algorithm", "variant"),
    [*((a, "plain") for a in SPARSE), *(("2wgt", v) for v in VARIANTS if v != "plain")],
)
def test_sparse_is_dense(algorithm, variant):
    settings = VARIANTS[variant]
    sim, state, _ = trained(algorithm, **settings)
    dense, expected, _ = trained(algorithm, tables="dense", **settings)
    assert (bool(sim.forms.tables), bool(dense.forms.tables)) == (True, False)
    assert_equal(state.x, expected.x)
    start = jax.tree.leaves(jax.tree.map(np.array, dense.init().x))
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(expected.x), start, strict=True)]
    assert min(moved) > 0.01  # every parameter has been trained


@pytest.mark.parametrize("terms", [p for p in PROBLEMS if p != "regularizer"])
@pytest.mark.parametrize("algorithm", [pytest.param("1wgt", marks=pytest.mark.numbers), "2wgt"])
def test_sparse_is_dense_on_other_problems(algorithm, terms):
    _, state, _ = trained(algorithm, terms)
    _, expected, _ = trained(algorithm, terms, tables="dense")
    assert_equal(state.x, expected.x)


def test_sparse_is_dense_whatever_the_size_of_a_client(monkeypatch):
    monkeypatch.setattr(sparse, "SMALLEST", 4)
    assert len(sparse.padded_sizes({"towers/items": 30})) == 4
    _, state, _ = trained.__wrapped__("1wgt")
    _, expected, _ = trained("1wgt", tables="dense")
    assert_equal(state.x, expected.x)


def test_adaptive_server_optimizers_agree_too():
    """Adam's first steps depend on the sign of a sum that may be all rounding: a larger epsilon."""
    import optax

    adam = lambda lr: optax.adam(lr, eps=1e-3)  # noqa: E731
    for algorithm in ("pt", "1wgt"):
        _, state, _ = trained(algorithm, server_opt=adam, server_lr=0.05)
        _, expected, _ = trained(algorithm, server_opt=adam, server_lr=0.05, tables="dense")
        assert_equal(state.x, expected.x, rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["2wgt"])
def test_chunks_and_devices_change_nothing(algorithm):
    _, expected, info = trained(algorithm)
    for changes in (dict(cohort_chunk=2), dict(devices=2)):
        _, state, other = trained(algorithm, **changes)
        assert_equal(state.x, expected.x)
        assert other["clients/federated"] == info["clients/federated"]


def test_a_round_is_traced_once_whatever_rows_the_clients_hold():
    sim, _, _ = trained("2wgt")
    assert sim.traces == 1


@pytest.mark.parametrize("algorithm", ["fedavg", "pt", "1wgt", "2wgt"])
def test_bytes_are_those_of_the_rows(algorithm):
    sim, _, _ = trained(algorithm)
    for t in (0, 3):
        held = []
        (feeds,) = next(simulator(algorithm, tables="dense").feeder.pieces(sim.at(t), t)).clients
        for columns, mask, _ in (feed.batches for feed in feeds):
            for seen, following in zip(*(columns[c][mask.any((1, 2))] for c in ("seen", "next")),
                                       strict=True):  # fmt: skip
                held.append(len({*following.ravel(), *seen.ravel()}))
        floats = np.mean(held) * (DIM + 1) + DIM * DIM
        copies = 2 if algorithm in ("1wgt", "2wgt") else 1  # the augmenting gradient's rows too
        down, up = sim.round_bytes(t)
        assert down == pytest.approx(4 * copies * floats)
        # p_i, K_i, and a byte for each row: both tables have the same, and are below 128 apart
        assert up == pytest.approx(4 * (floats + 2) + np.mean(held))
    dense = simulator(algorithm, tables="dense").round_bytes(0)
    assert dense[0] == 4 * copies * (N * DIM + N + DIM * DIM)


def test_a_client_that_is_not_finite_is_left_out():
    sizes = (3, 3, 3, 3)
    columns = data(0, sum(sizes)) | {"bad": np.zeros(sum(sizes), np.float32)}
    columns["bad"][3:6] = 1
    clients = mixfl.ClientData.from_arrays(columns, client=np.repeat(np.arange(4), sizes))

    def fragile(params, batch):
        return loss(params, batch) / (1 - batch["bad"])

    def one_round(function, clients, **changes):
        term = mixfl.Federated(function, clients, rows=ROWS)
        problem = mixfl.Problem(init, [term, mixfl.Central(penalty)])
        s = mixfl.Settings(**(SETTINGS | dict(rounds=1, client_batch=3) | changes))
        sim = Simulator(problem, ALGORITHMS["1wgt"].build(problem, s), s)
        (result,) = sim.rounds(sim.init(), 0, 1)
        return jax.tree.map(np.array, result.state.x), int(result.info["clients/rejected"])

    x, rejected = one_round(fragile, clients)
    # A client's order depends on its place among the clients: one batch, in which it plays no part.
    expected, none = one_round(loss, clients.select(np.array([0, 2, 3])), cohort_size=3)
    assert (rejected, none) == (1, 0)
    assert_equal(x, expected)


DENSE = {
    "momentum": ("1wgt", dict(client_opt="sgd(momentum=0.9)"), "client_opt = sgd"),
    "baseline": ("baseline", {}, "beyond those in their own data"),
}


@pytest.mark.parametrize("case", DENSE)
def test_where_it_is_not_exact_tables_are_dense_and_the_run_says_so(case, capsys):
    algorithm, changes, reason = DENSE[case]
    problem = mixfl.Problem(init, PROBLEMS["regularizer"]())
    settings = SETTINGS | dict(rounds=2) | changes
    keys = {k: v for k, v in settings.items() if k in ALGORITHMS[algorithm].uses}
    result = mixfl.train(problem, algorithm, progress=True, **keys)
    assert result.config["tables"] == "dense"
    assert reason in "".join(capsys.readouterr())
    with pytest.raises(MixflError, match="not exact here"):
        mixfl.train(problem, algorithm, tables="rows", **keys)


BAD_ROWS = {
    "no such parameter": ({"items": ("seen",)}, "towers/items"),
    "no such column": ({"towers/items": ("sen",)}, "seen"),
    "no whole numbers": ({"towers/items": ("price",)}, "whole numbers"),
    "a row that the table lacks": ({"towers/items": ("big",)}, "row 60 of 'towers/items'"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_wrong_marks_are_a_sentence(case):
    rows, message = BAD_ROWS[case]
    columns = data(0, 8) | {"price": np.ones(8, np.float32), "big": np.full(8, N)}
    clients = mixfl.ClientData.from_arrays(columns, client=np.arange(8) // 2)
    problem = mixfl.Problem(init, [mixfl.Federated(loss, clients, rows=rows)])
    with pytest.raises(MixflError, match=message):
        mixfl.train(problem, "fedavg", rounds=1, cohort_size=2)


def with_bias(key):
    return init(key) | {"bias": jnp.zeros(N)}


REFUSED = {
    "the whole table": lambda p, b: loss(p, b) + jnp.mean(p["towers"]["items"] ** 2),
    "the number of a row": lambda p, b: loss(p, b) * jnp.where(b["next"] > 30, 2.0, 1.0),
    "a mask by number": lambda p, b: loss(p, b) * (b["seen"][:, 0] > 0),
    "a parameter that is not marked, and 0": lambda p, b: loss(p, b) + p["bias"][b["next"]],
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_uses_more_than_the_rows_is_refused(case):
    """Its result would silently differ from the dense one."""
    columns = data(0, 8)
    columns["seen"][5] = 0
    clients = mixfl.ClientData.from_arrays(columns, client=np.arange(8) // 2)
    problem = mixfl.Problem(with_bias, [mixfl.Federated(REFUSED[case], clients, rows=ROWS)])
    with pytest.raises(MixflError, match="another one when"):
        mixfl.train(problem, "fedavg", rounds=1, cohort_size=2)
    failed = [f.what for f in check_problem(problem, mixfl.Settings(cohort_size=2)) if not f.good]
    assert "rows that a batch names" in failed[0]
    mixfl.train(problem, "fedavg", rounds=1, cohort_size=2, tables="dense")


def test_padding_rows_reject_nobody():
    """They are zeros, where a loss that normalizes its table has no gradient."""

    def normalized(params, batch):
        items = params["towers"]["items"]
        unit = items / jnp.linalg.norm(items, axis=1, keepdims=True)
        bad = jnp.where(batch["next"] < 0, 0.0, 1.0) / batch["fine"]
        return (1 - jnp.sum(unit[batch["next"]] * unit[batch["seen"][:, 0]], 1)) * bad

    columns = data(0, 12) | {"fine": np.repeat([1, 0, 1, 1], 3).astype(np.float32)}
    clients = mixfl.ClientData.from_arrays(columns, client=np.repeat(np.arange(4), 3))
    term = mixfl.Federated(normalized, clients, rows=ROWS)
    problem = mixfl.Problem(init, [term])
    s = mixfl.Settings(**(SETTINGS | dict(rounds=1)))
    sim = Simulator(problem, ALGORITHMS["fedavg"].build(problem, s), s)
    (result,) = sim.rounds(sim.init(), 0, 1)
    assert int(result.info["clients/rejected"]) == 1


def test_half_precision_is_sent_in_half_precision():
    half = lambda key: jax.tree.map(lambda a: a.astype(jnp.bfloat16), init(key))  # noqa: E731
    ups = []
    for algorithm in ("pt", "1wgt"):
        problem = mixfl.Problem(half, PROBLEMS["regularizer"]())
        s = mixfl.Settings(**SETTINGS)
        ups.append(Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s).round_bytes(0)[1])
    assert ups[0] == ups[1]


def test_tables_that_nobody_marked():
    problem = mixfl.Problem(init, [population(rows={})])
    with pytest.raises(MixflError, match="no term marks a table"):
        mixfl.train(problem, "fedavg", rounds=1, cohort_size=2, tables="rows")


@pytest.mark.parametrize("rows", [["t"], {"t": 5}, None, {3: "seen"}])
def test_rows_of_the_wrong_kind(rows):
    with pytest.raises(MixflError, match="expected a dict from a table's name"):
        population(rows=rows)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 12))
def test_renumbered_batches_name_the_same_rows(seed, rows, width):
    rng = np.random.default_rng(seed)
    columns = {
        "a": rng.integers(0, rows, (3, 2, width)), "b": rng.integers(0, rows, (3, 5)),
        "c": rng.integers(0, 9, (3, 5)),
    }  # fmt: skip
    marked = {"t": sparse.Table(("a", "b"), rows)}
    local, ids = sparse.renumber(columns, marked, {"t": min(rows, 2 * width + 5)})
    for i in range(3):
        held = ids["t"][i][ids["t"][i] < rows]
        assert len(set(held)) == len(held)
        assert set(held) == {*columns["a"][i].ravel(), *columns["b"][i].ravel()}
        for c in ("a", "b"):
            np.testing.assert_array_equal(ids["t"][i][local[c][i]], columns[c][i])
    assert local["c"] is columns["c"]


def test_sizes_are_few_and_fit():
    assert [s["t"] for s in sparse.padded_sizes({"t": 1760})] == [1760, 880, 440, 220, 110]
    assert sparse.padded_sizes({"t": 100}) == [{"t": 100}]
    assert sparse.padded_sizes({"t": 300, "u": 5})[-1] == {"t": 75, "u": 2}

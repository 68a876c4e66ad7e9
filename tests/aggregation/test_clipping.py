"""Clients whose own part is far longer than others' are clipped: as the reference says, alike in
every form, and never so that what the server sent is clipped with it."""

import dataclasses

import jax
import jax.numpy as jnp
import layer_problem
import numpy as np
import problems
import pytest
import reference
import table_problem
from problems import (
    OPTIMIZERS,
    REFERENCE_KEYS,
    flat,
    louder,
    reference_round,
    reference_terms,
    refuses,
    settings,
)

import mixfl
from mixfl.aggregation import clipping
from mixfl.aggregation.clipping import Clipping
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import Broadcast, Upload
from mixfl.algorithms.steps import own_part, weighted_summand
from mixfl.engine import Simulator
from mixfl.errors import MixflError

CLIENTS = [name for name, recipe in ALGORITHMS.items() if "clip" in recipe.uses]


def loud_problem(terms="two terms") -> mixfl.Problem:
    p = problems.problem(terms)
    found = [
        dataclasses.replace(t, clients=louder(t.clients)) if isinstance(t, mixfl.Federated) else t
        for t in p.terms
    ]
    return dataclasses.replace(p, terms=found)


def trained(p, algorithm, s):
    """The models and the number of clients clipped, after each round."""
    simulator = Simulator(p, ALGORITHMS[algorithm].build(p, s), s)
    models, clipped = [], []
    for result in simulator.rounds(simulator.init(), 0, s.rounds):
        models.append(flat(result.state.x))
        clipped.append(int(result.info.get("clients/clipped", 0)))
    return simulator, np.array(models), clipped


def expected(p, algorithm, s, simulator, **names):
    rounds = [reference_round(simulator.feeder, simulator.at(t), t, s) for t in range(s.rounds)]
    given = {k: getattr(s, k) for k in REFERENCE_KEYS if getattr(s, k) != "auto"} | names
    given = reference.Settings(**given, pretrain_rounds=s.rounds // 2)
    x0 = flat(p.init(jax.random.key(s.seed))).astype(float)
    return np.array(reference.train(algorithm, reference_terms(p), x0, given, rounds))


NUMBERS = pytest.mark.numbers
SOME = ["2wgt", *(pytest.param(a, marks=NUMBERS) for a in ("fedavg", "1wgt"))]
EVERYTHING = "two populations and a central term"
CASES = [
    *((algorithm, "sgd", "two terms") for algorithm in CLIENTS if algorithm != "baseline"),
    ("baseline", "sgd", "regularizer"),
    ("2wgt", "momentum", EVERYTHING),
    *(pytest.param(a, "momentum", EVERYTHING, marks=NUMBERS) for a in ("fedavg", "1wgt")),
    ("2wgt", "adam", "two terms"),
]


@pytest.mark.parametrize(("algorithm", "client_opt", "terms"), CASES)
def test_it_follows_the_reference(algorithm, client_opt, terms):
    p = loud_problem(terms)
    rate = 0.02 if client_opt == "adam" else 0.2
    s = settings(rounds=8, client_opt=OPTIMIZERS[client_opt], client_lr=rate)
    simulator, found, clipped = trained(p, algorithm, s)
    wanted = expected(p, algorithm, s, simulator, client_opt=client_opt)
    np.testing.assert_allclose(found, wanted, rtol=5e-4, atol=5e-5)
    if client_opt != "adam":  # whose steps have one length, however large a gradient is
        assert sum(clipped) > 3
        _, without, none = trained(p, algorithm, dataclasses.replace(s, clip="off"))
        assert not any(none)
        assert np.abs(without - found).max() > 0.1


@pytest.mark.parametrize("value", [0.01, pytest.param(0.05, marks=NUMBERS)])
@pytest.mark.parametrize("algorithm", ["fedavg", "1wgt", "2wgt"])
def test_a_number_is_the_limit(algorithm, value):
    p, s = problems.problem(), settings(clip=value)
    simulator, found, clipped = trained(p, algorithm, s)
    assert any(clipped)
    wanted = expected(p, algorithm, s, simulator)
    np.testing.assert_allclose(found, wanted, rtol=5e-4, atol=5e-5)


@pytest.mark.parametrize("changes", [{"cohort_chunk": 2}, {"devices": 2}, {"cohort_size": 6}])
@pytest.mark.parametrize("algorithm", [pytest.param("fedavg", marks=NUMBERS), "2wgt"])
def test_chunks_and_devices_clip_alike(algorithm, changes):
    p = loud_problem()
    s = settings(rounds=8, **changes)
    _, found, clipped = trained(p, algorithm, s)
    whole = settings(rounds=8, cohort_size=s.cohort_size)
    if s.cohort_chunk != "auto":  # the first round judges by the first chunk's own norms
        s, whole = (dataclasses.replace(s, clip=0.1) for s in (s, whole))
        _, found, clipped = trained(p, algorithm, s)
    _, wanted, count = trained(p, algorithm, whole)
    assert clipped == count
    assert any(count)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", SOME)
def test_low_rank_layers_are_clipped_alike(algorithm):
    p = layer_problem.problem()
    p = dataclasses.replace(
        p, terms=[dataclasses.replace(p.terms[0], clients=louder(p.terms[0].clients)), p.terms[1]]
    )
    s = settings(rounds=8, client_lr=0.5)
    _, low = layer_problem.agree(p, algorithm, s, tolerance=1e-4)
    _, off = layer_problem.trained(p, algorithm, dataclasses.replace(s, clip="off"))
    assert np.abs(flat(low.state.x) - flat(off.state.x)).max() > 0.01


@pytest.mark.parametrize("algorithm", SOME)
@pytest.mark.parametrize("value", ["quantile", 0.02])
def test_row_sparse_tables_are_clipped_alike(algorithm, value):
    _, rows, info = table_problem.trained(algorithm, clip=value)
    _, dense, _ = table_problem.trained(algorithm, clip=value, tables="dense")
    table_problem.assert_equal(rows.x, dense.x, rtol=1e-4)
    if value != "quantile":
        assert info["clients/clipped"] > 0
        _, off, _ = table_problem.trained(algorithm, clip="off")
        assert np.abs(off.x["dense"] - rows.x["dense"]).max() > 0.01


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_what_the_server_sent_is_never_clipped(scale):
    """However large the augmenting gradient is: the client's own part decides alone."""
    s = mixfl.Settings(client_lr=0.1, local_steps=4, clip=0.5)
    x = {"w": jnp.ones(3)}
    broadcast = Broadcast(x, {"w": scale * jnp.array([1.0, -2.0, 3.0])})
    own = np.array([3.0, 4.0, 0.0], np.float32)  # of norm 5, so 1.25 per step
    delta = {"w": own - 0.1 * 4 * np.asarray(broadcast.aug["w"])}
    upload = Upload(own_part(s, broadcast, delta, 4.0), jnp.float32(7.0), 4.0, None, 0.0)
    clip = Clipping(s)
    code, norms = clip.encode(clip.told(clip.init()), weighted_summand(s, upload), None)
    assert norms[0] == pytest.approx(1.25, rel=1e-3)
    np.testing.assert_allclose(code.weighted["w"], 7 * 0.4 * own, rtol=1e-3, atol=1e-2)


@NUMBERS
def test_within_the_limits_nothing_changes_by_a_bit():
    p = problems.problem()
    for algorithm in CLIENTS:
        if refuses(algorithm, "two terms"):
            continue
        s = settings(clip=1e6)
        _, found, clipped = trained(p, algorithm, s)
        _, wanted, _ = trained(p, algorithm, dataclasses.replace(s, clip="off"))
        assert not any(clipped)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_a_quarter_of_the_clients_does_not_move_the_limit():
    rng = np.random.default_rng(0)
    clip = Clipping(mixfl.Settings())
    history = clip.init()
    for _ in range(50):
        norms = rng.uniform(0.1, 0.4, (20, 2))
        norms[:5] = rng.choice([1e6, np.inf, np.nan, 30.0], (5, 2))
        history = clip.next(history, jnp.asarray(norms, jnp.float32))
    assert np.all(np.asarray(clip.told(history)) <= clipping.MARGIN * 0.4)


def test_clients_without_a_change_do_not_pull_the_limit_to_zero():
    clip = Clipping(mixfl.Settings())
    norms = np.zeros((10, 2), np.float32)
    history = clip.next(clip.init(), norms)
    assert not np.asarray(history).any()
    norms[0] = 0.5
    history = clip.next(history, norms)
    np.testing.assert_allclose(clip.told(history), 1.5)


def test_a_first_round_judges_its_clients_by_their_own_norms():
    p = loud_problem()
    s = settings(rounds=1, cohort_size=8)
    _, found, clipped = trained(p, "fedavg", s)
    _, without, _ = trained(p, "fedavg", dataclasses.replace(s, clip="off"))
    assert clipped[0] == 2
    assert np.abs(found).max() < 0.5 * np.abs(without).max()


@pytest.mark.parametrize("scale", [1e3, 1e22])
def test_an_update_whose_norm_overflows_does_no_harm_in_the_first_round(scale):
    """Finite numbers, but the square of their norm is none."""
    clients = mixfl.ClientData.from_clients(
        {str(i): {"w": np.full((2, 3), scale if i == 3 else 1.0, np.float32)} for i in range(8)}
    )
    term = mixfl.Federated(lambda x, batch: -(batch["w"] @ x["w"]), clients)
    p = mixfl.Problem(lambda key: {"w": jnp.zeros(3)}, [term])
    s = settings(rounds=1, cohort_size=8, local_steps=1, client_lr=1.0, weighting="uniform")
    simulator = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
    (last,) = simulator.rounds(simulator.init(), 0, 1)
    overflows = scale > 1e18  # its square is no 32-bit number: it is left out
    assert (last.info["clients/clipped"], last.info["clients/rejected"]) == (
        (0, 1) if overflows else (1, 0)
    )
    assert np.all(np.abs(flat(last.state.x)) < 2)


@pytest.mark.parametrize("bad", ["on", 0, -1, float("nan"), True])
def test_bad_values_are_refused(bad):
    with pytest.raises(MixflError, match="clip"):
        mixfl.Settings(clip=bad)

"""Codes in the simulator: what would arrive is what it trains with, and what it counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table_problem
from problems import flat, problem, settings
from run_folders import train, train_until

import mixfl
from mixfl.aggregation import download
from mixfl.aggregation.download import Download
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import Batches, Broadcast, ClientFeed
from mixfl.engine import Simulator
from mixfl.settings import Settings


def last(simulator, rounds):
    *_, result = simulator.rounds(simulator.init(), 0, rounds)
    return result


def test_a_stopped_run_ends_with_the_same_bits(tmp_path):
    """Ranges, rotations and what messages have lost are part of the state."""
    keys = dict(upload="int4", download="int8")
    whole = train("2wgt", tmp_path / "whole", **keys)
    train_until("2wgt", tmp_path / "run", 3, **keys)
    again = train("2wgt", tmp_path / "run", resume=True, **keys)
    np.testing.assert_array_equal(flat(again.params), flat(whole.params))


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int16"])
def test_errors_of_messages_are_made_up_for(kind):
    """What clients got over the rounds adds up to what was meant, to one message's error."""
    down = Download(Settings(download=kind))
    x = {"a": jax.random.normal(jax.random.key(0), (4, 33)), "b": jnp.float32(0.3)}
    errors, meant, got = down.init(x, 1), 0.0, 0.0
    sent = jax.jit(down.sent)
    for t in range(6):
        now = jax.tree.map(lambda a, t=t: a * (1 + 0.1 * t), x)
        made = sent(errors, [Broadcast(now, now)])
        errors = made.errors
        meant, got = meant + flat(now), got + flat(made.broadcasts[0].x)
        decoded = down.decoded(made.codes[0])
        for a, b in zip(*map(jax.tree.leaves, (decoded.x, made.broadcasts[0].x)), strict=True):
            np.testing.assert_array_equal(a, b)  # clients decode what the server means
    one = {"bfloat16": 2**-8, "int8": 1 / 127, "int16": 1 / 32767}[kind]
    assert np.abs(meant - got).max() < one * 10
    assert np.abs(meant - got).max() > 0
    np.testing.assert_allclose(meant - got, flat(errors[0].x), atol=1e-4)


def test_a_messages_error_is_not_in_the_clients_own_part():
    """So gt_f does not absorb it: u_i is the same for any augmenting gradient that was sent."""
    p, s = problem(), settings(local_steps=1, download="int8")
    algorithm = ALGORITHMS["2wgt"].build(p, s)
    (term, *_) = p.populations
    x = p.init(jax.random.key(0))
    feed = ClientFeed(
        Batches({n: a[None, :3] for n, a in term.examples.take(np.arange(3)).items()},
                np.ones((1, 3), np.float32))
    )  # fmt: skip
    aug = jax.tree.map(lambda a: jnp.full_like(a, 0.37), x)
    coded = download.restored("int8", download.coded("int8", aug))
    odd = jax.tree.map(lambda a: a + 0.1, coded)
    own = [flat(algorithm.client(term, Broadcast(x, a), feed).own) for a in (aug, coded, odd)]
    np.testing.assert_allclose(own[1], own[0], atol=1e-6)
    np.testing.assert_allclose(own[2], own[0], atol=1e-6)


def test_models_states_are_sent_as_they_are():
    from mixfl.trees import Model

    x = Model({"a": jnp.ones((2, 3)) / 3}, {"var": jnp.float32(1e-6)})
    down = Download(Settings(download="int8"))
    made = down.sent(down.init(x, 1), [Broadcast(x)])
    assert float(made.broadcasts[0].x.state["var"]) == np.float32(1e-6)


@pytest.mark.parametrize(
    ("upload", "share"), [("bfloat16", 2), ("int16", 2), ("int8", 4), ("int4", 8), ("int2", 16)]
)
def test_codes_are_counted_as_packed(upload, share):
    p = problem()
    sizes = []
    for kind in ("float32", upload):
        s = settings(upload=kind)
        simulator = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
        sizes.append(simulator.round_bytes(1).up)
    numbers = len(flat(p.init(jax.random.key(0))))
    arrays = len(jax.tree.leaves(p.init(jax.random.key(0))))
    report = 0 if upload == "bfloat16" else 2 * arrays + 1
    assert sizes[0] == 4 * numbers + 8
    assert sizes[1] == np.ceil(4 * numbers / share + report + 8)


def test_tables_by_rows_are_the_dense_ones_with_codes_of_16_bits():
    models = []
    for tables in ("rows", "dense"):
        usual = table_problem.simulator("2wgt")
        s = dataclasses.replace(usual.s, tables=tables, upload="int16")
        simulator = Simulator(usual.problem, ALGORITHMS["2wgt"].build(usual.problem, s), s)
        assert bool(simulator.forms.tables) == (tables == "rows")
        models.append(flat(last(simulator, 2).state.x))
    np.testing.assert_allclose(*models, atol=2e-3)


def test_own_fields_are_refused():
    p, s = problem(), settings(upload="int8")
    simulator = Simulator(p, ALGORITHMS["mimelite"].build(p, s), s)
    with pytest.raises(mixfl.MixflError, match="upload = int8: the clients of this algorithm send"):
        last(simulator, 1)

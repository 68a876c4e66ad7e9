"""Losses that draw at random, with a key per example."""

import dataclasses

import jax
import jax.numpy as jnp
import layer_problem
import numpy as np
import pytest
import table_problem
from layer_problem import agree
from problems import clients, examples, flat, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator, cohort, sizes
from mixfl.engine.seeds import words_of
from mixfl.losses import Takes, takes
from mixfl.measure.check import check_term
from mixfl.measure.gradients import Gradients
from mixfl.randomness import KEYS, WithKeys

SIZES = (1, 2, 40, 3, 2, 1, 4, 17, 2, 3, 1, 2)
DIM = 3


def mask_of(key):
    return jax.random.bernoulli(key, 0.5, (DIM,)).astype(jnp.float32)


def masked(params, batch, key):
    """Its gradient does not depend on the parameters."""
    return batch["x"][:, 0] * (jax.vmap(mask_of)(key) @ params["w"])


def init(key):
    return {"w": jnp.zeros(DIM)}


def problem(loss=masked, start=init, sizes=SIZES):
    federated = mixfl.Federated(loss, clients(1, sizes), 0.7)
    return mixfl.Problem(start, [federated, mixfl.Central(loss, examples(2, 40, -0.5), 0.4)])


def trained(p, name, s, rounds=3):
    simulator = Simulator(p, ALGORITHMS[name].build(p, s), s)
    *_, last = simulator.rounds(simulator.init(), 0, rounds)
    return simulator, flat(last.state.x)


def by_hand(*words):
    """The gradient of an example without its input, from the documented numbers."""
    seeded = np.random.SeedSequence(words).generate_state(2)
    return np.asarray(mask_of(jax.random.wrap_key_data(seeded, impl="threefry2x32")))


def test_a_clients_update_follows_from_the_documented_keys():
    p, s = problem(), settings(seed=3, local_steps=2, cohort_size=4, clip="off")
    term, x = p.populations[0], np.zeros(DIM)
    first, size = np.asarray(term.clients.offsets), term.clients.sizes()
    inputs = term.examples.all()["x"][:, 0]
    for t in range(2):
        who = cohort.cohort(s.seed, t, 0, len(size), 4)
        rows, mask = cohort.cohort_rows(s.seed, t, 0, who, first[who], size[who], 2, 3)
        total, weight = np.zeros(DIM), 0
        for i, client in enumerate(who.tolist()):
            delta = np.zeros(DIM)
            for k in range(2):
                n = int(mask[i, k].sum())
                own = [by_hand(3, t, 6, 1, 0, client, k, b) * inputs[rows[i, k, b]]
                       for b in range(n)]  # fmt: skip
                delta -= s.client_lr * 0.7 * sum(own, np.zeros(DIM)) / max(n, 1)
            total, weight = total + mask[i].sum() * delta, weight + mask[i].sum()
        x = x + total / weight
    assert np.abs(x).max() > 1e-3
    np.testing.assert_allclose(trained(p, "fedavg", s, 2)[1], x, atol=1e-6)


def test_the_servers_steps_follow_from_the_documented_keys():
    p, s = problem(), settings(seed=3, central_steps=2, central_batch=5, central_lr=0.1)
    inputs, x = p.central[0].examples.all()["x"][:, 0], np.zeros(DIM)
    rows = cohort.drawn_rows(cohort.generator(3, 0, cohort.CENTRAL, 1), 40, 2, 5)
    for k in range(2):
        own = [by_hand(3, 0, 6, 2, 1, k, b) * inputs[rows[k, b]] for b in range(5)]
        x -= 0.1 * 0.4 * np.mean(own, axis=0)
    np.testing.assert_allclose(trained(p, "central", s, 1)[1], x, atol=1e-6)


@pytest.mark.parametrize("name", ["2wgt", "example-transfer"])
def test_chunks_devices_and_sizes_change_nothing(name, monkeypatch):
    s = settings(local_steps=8, cohort_size=6)
    simulator, expected = trained(problem(), name, s)
    assert len(simulator.feeder.shapes[0]) > 1  # several sizes
    for changes in (dict(cohort_chunk=2, central_chunk=4), dict(devices=2)):
        _, found = trained(problem(), name, dataclasses.replace(s, **changes))
        np.testing.assert_allclose(found, expected, atol=1e-6)
    monkeypatch.setattr(sizes, "MOST", 1)
    simulator, found = trained(problem(), name, s)
    assert len(simulator.feeder.shapes[0]) == 1
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_resumed_run_draws_the_same():
    p, s = problem(), settings()
    whole = trained(p, "2wgt", s, 4)[1]
    first, second = (Simulator(p, ALGORITHMS["2wgt"].build(p, s), s) for _ in range(2))
    *_, half = first.rounds(first.init(), 0, 2)
    *_, last = second.rounds(half.state, 2, 4)
    assert (flat(last.state.x) == whole).all()
    other = trained(p, "2wgt", dataclasses.replace(s, seed=1), 4)[1]
    assert not np.allclose(other, whole)


def test_all_examples_have_other_keys():
    own = cohort.client_example_keys(0, 5, cohort.ORDER, 0, [0, 7, 300], 4, 6).reshape(-1, 2)
    more = cohort.client_example_keys(0, 5, cohort.SHARE, 0, [0, 7, 300], 4, 6).reshape(-1, 2)
    drawn = cohort.drawn_example_keys(0, 5, cohort.CENTRAL, 0, 8, 9).reshape(-1, 2)
    later = cohort.drawn_example_keys(0, 6, cohort.CENTRAL, 0, 8, 9).reshape(-1, 2)
    every = np.concatenate([own, more, drawn, later])
    assert len(np.unique(every, axis=0)) == len(every) == 2 * 72 + 2 * 72


@pytest.mark.parametrize("words", [(1, 2), (3, 4, 5, 6, 7, 8), (2**40, 1, 0)])
def test_many_words_at_once_are_those_of_a_seed_sequence(words):
    last = np.array([[0, 1], [2**32 - 1, 9]])
    for count in (2, 8):
        found = words_of([*words, last, np.array([4, 5])], count)
        for i, j in np.ndindex(2, 2):
            sequence = np.random.SeedSequence([*words, int(last[i, j]), 4 + j])
            assert (found[i, j] == sequence.generate_state(count)).all()


def test_a_number_of_a_node_may_be_large():
    (found,) = cohort.client_example_keys(1, 2, cohort.ORDER, 0, np.array([2**50], np.uint64), 1, 2)
    expected = np.random.SeedSequence([1, 2, 6, 1, 0, 2**50, 0, 1]).generate_state(2)
    assert (found[0, 1] == expected).all()


# Forms


def network(params, batch, key):
    """With dropout of the inputs and of the hidden layer."""

    def keep(key):
        one, two = jax.random.split(key)
        width = params["hidden"]["b"].shape
        return (
            jax.random.bernoulli(one, 0.8, (DIM,)) / 0.8,
            jax.random.bernoulli(two, 0.5, width) / 0.5,
        )

    inputs, hidden = jax.vmap(keep)(key)
    z = (batch["x"] * inputs) @ params["hidden"]["w"] + params["hidden"]["b"]
    return jnp.logaddexp(0.0, -batch["y"] * ((jnp.tanh(z) * hidden) @ params["out"]))


def test_low_rank_layers_with_dropout():
    s = settings(rounds=3, local_steps=4)
    agree(layer_problem.problem(network), "2wgt", s)


def noisy_rows(params, batch, key):
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5))(key)
    return table_problem.loss(params, batch) * keep


def test_rows_of_tables_with_dropout():
    term = table_problem.PROBLEMS["regularizer"]()[0]
    s = mixfl.Settings(**(table_problem.SETTINGS | dict(rounds=3)))
    p = mixfl.Problem(table_problem.init, [dataclasses.replace(term, loss=noisy_rows)])
    simulator, found = trained(p, "fedavg", s)
    assert simulator.forms.tables
    _, expected = trained(p, "fedavg", dataclasses.replace(s, tables="dense"))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_convolutions_with_dropout():
    def loss(params, batch, key):
        images = batch["x"].reshape(-1, 1, DIM, 1)
        z = jax.lax.conv_general_dilated(images, params["w"], (1, 1), "SAME").reshape(-1, DIM)
        return jnp.sum(jnp.tanh(z) * jax.vmap(mask_of)(key), axis=1)

    p = problem(loss, lambda key: {"w": jax.random.normal(key, (1, 1, 3, 1))})
    simulator, found = trained(p, "2wgt", settings(convolutions="products"))
    assert simulator.resolved().convolutions == "products"
    _, expected = trained(p, "2wgt", settings(convolutions="plain"))
    np.testing.assert_allclose(found, expected, atol=1e-5)


# What a user writes


@mixfl.per_example
def one_by_one(params, example, key):
    return example["x"][0] * (mask_of(key) @ params["w"])


def optional(params, batch, key=None):
    return masked(params, batch, key) if key is not None else batch["x"] @ params["w"]


@pytest.mark.parametrize("loss", [one_by_one, optional, jax.jit(masked)])
def test_ways_to_write_such_a_loss(loss):
    s = settings()
    assert takes(loss).key
    expected = trained(problem(), "pt", s)[1]
    np.testing.assert_allclose(trained(problem(loss), "pt", s)[1], expected, atol=1e-6)


def test_a_loss_of_one_example_without_a_key():
    p = {"w": jnp.arange(3.0)}
    batch = {"x": jnp.ones((4, 3))}
    loss = mixfl.per_example(lambda params, example: example["x"] @ params["w"])
    assert not takes(loss).key
    assert loss(p, batch).tolist() == [3.0] * 4
    loss = mixfl.per_example(lambda params, e, key=None: e["x"] @ params["w"] if key is None else 0)
    assert takes(loss).key
    assert loss(p, batch).tolist() == [3.0] * 4


def test_a_loss_of_one_example_may_take_more():
    loss = mixfl.per_example(lambda params, e, frozen, key: e["x"] @ frozen * mask_of(key)[0])
    assert takes(loss) == Takes(key=True, frozen=True)
    batch, frozen = {"x": jnp.ones((4, 3))}, jnp.arange(3.0)
    keys = jax.random.split(jax.random.key(0), 4)
    expected = 3 * jax.vmap(mask_of)(keys)[:, 0]
    assert (loss({}, batch, key=keys, frozen=frozen) == expected).all()
    words = {**batch, KEYS: jax.random.key_data(keys)}
    assert (WithKeys(loss)({}, words, frozen=frozen) == expected).all()
    assert WithKeys(loss).takes == Takes(frozen=True)


def test_a_loss_with_a_key_and_frozen_arrays():
    def scaled(params, batch, key, frozen):
        return frozen["scale"] * masked(params, batch, key)

    own, s = problem(lambda params, batch, key: 2.0 * masked(params, batch, key)), settings()
    p = mixfl.Problem(init, [dataclasses.replace(t, loss=scaled) for t in problem().terms],
                      frozen={"scale": np.float32(2)})  # fmt: skip
    np.testing.assert_allclose(trained(p, "pt", s)[1], trained(own, "pt", s)[1], atol=1e-6)


def test_one_key_for_all_examples_is_found():
    def loss(params, batch, key):
        return batch["x"][:, 0] * (mask_of(key[0]) @ params["w"])

    x = {"w": jnp.ones(DIM)}
    *_, last = check_term(problem(loss).populations[0], x, x, settings())
    assert not last.good
    assert "one example's key for others" in last.detail


def test_a_key_array_is_not_one_key():
    def loss(params, batch, key):
        return batch["x"][:, 0] * (mask_of(key) @ params["w"])

    with pytest.raises(mixfl.MixflError, match="one per example: use jax"):
        mixfl.train(problem(loss), "fedavg", rounds=1, cohort_size=2)


def test_what_a_key_does_not_determine_is_refused():
    rng = np.random.default_rng(0)

    def loss(params, batch, key):
        return masked(params, batch, key) * rng.normal()

    with pytest.raises(mixfl.MixflError, match=r"is not pure.* loss\(params, batch, key\)"):
        mixfl.train(problem(loss), "fedavg", rounds=1, cohort_size=2)


def test_a_regularizer_takes_no_key():
    with pytest.raises(mixfl.MixflError, match="no data, so there are no examples to draw keys"):
        mixfl.Central(lambda params, key: 0.0)


def test_measurements_at_one_point_draw_the_same():
    p, s = problem(network, layer_problem.init), settings()
    x = p.init(jax.random.key(0))
    measure = Gradients(p, s, 2)
    once, again, later = (measure.at(x, t) for t in (3, 3, 4))
    assert (once.terms[0].gradient == again.terms[0].gradient).all()
    assert not np.allclose(once.terms[0].gradient, later.terms[0].gradient)


def test_a_column_of_keys_is_not_downloaded():
    s = settings()
    p = problem()
    plain = [dataclasses.replace(t, loss=lambda params, batch: batch["x"] @ params["w"])
             for t in p.terms]  # fmt: skip
    bytes_of = [
        Simulator(q, ALGORITHMS["example-transfer"].build(q, s), s).round_bytes(0)
        for q in (p, mixfl.Problem(init, plain))
    ]
    assert bytes_of[0] == bytes_of[1]
    feeder = Simulator(p, ALGORITHMS["example-transfer"].build(p, s), s).feeder
    piece = next(feeder.pieces(ALGORITHMS["example-transfer"].build(p, s), 0))
    assert KEYS in piece.clients[0][0].share

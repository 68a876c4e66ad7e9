"""Low-rank first layers give what the plain way gives, and what the reference says."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from layer_problem import WIDTH, agree, init, network, problem, trained
from problems import DIM, examples, flat, reference_round, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import CLIENT_KEYS, algorithm
from mixfl.algorithms.steps import add, client_update, gradient, scale
from mixfl.engine import Simulator
from mixfl.engine.auto import clients_at_once
from mixfl.forms import first_layers
from mixfl.forms import low_rank as lowrank
from mixfl.forms.first_layers import Layer, pays

MIXED = ("fedavg", "pt", "1wgt", "2wgt", "pretrain")


def numpy_network(x, batch):
    """The same in NumPy: losses [n] and the gradient of their mean; x = ravel(b, w, out)."""
    b, w, out = np.split(x, [WIDTH, WIDTH + DIM * WIDTH])
    inputs, y = batch["x"].astype(float), batch["y"].astype(float)
    hidden = np.tanh(inputs @ w.reshape(DIM, WIDTH) + b)
    margin = y * (hidden @ out)
    slope = -y / (1 + np.exp(margin)) / len(y)
    d_z = slope[:, None] * out * (1 - hidden**2)
    return np.logaddexp(0, -margin), np.concatenate(
        [d_z.sum(0), (inputs.T @ d_z).ravel(), hidden.T @ slope]
    )


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.numbers), 3])
def test_it_follows_the_reference(name, steps):
    p = problem()
    s = settings(local_steps=steps, first_layer="low-rank", pretrain_rounds=2)
    simulator, last = trained(p, name, s)
    rounds = [reference_round(simulator.feeder, simulator.at(t), t, s) for t in range(s.rounds)]
    terms = [
        reference.Term(type(t).__name__.lower(), numpy_network, t.weight) for t in p.terms
    ]  # fmt: skip
    x0 = flat(p.init(jax.random.key(s.seed)))
    wanted = reference.train(
        name, terms, x0, reference.Settings(s.client_lr, pretrain_rounds=2), rounds
    )
    assert simulator.forms.low_rank == {"federated": ["hidden/w"]}
    np.testing.assert_allclose(flat(last.state.x), wanted[-1], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["2wgt"])
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({"weighting": "uniform"}, marks=pytest.mark.numbers),
        {"weighting": "steps", "server_opt": "adam", "server_lr": 0.05},
        {"cohort_chunk": 2},
        {"devices": 2, "cohort_size": 6},
        {"client_batch": 1, "local_steps": 12},
    ],
    ids=str,
)
def test_low_rank_is_plain(name, variant):
    simulator, _ = agree(problem(), name, settings(rounds=4, **variant), tolerance=1e-4)
    assert simulator.forms.low_rank == {"federated": ["hidden/w"]}


@pytest.mark.parametrize(
    ("depth", "width", "inputs", "low_rank"),
    [
        (21168, 64, 10, True),  # smile
        (21168, 64, 320, False),  # more than twice as many inputs as units
        (128, 128, 20, False),  # a small weight, whose copies cost little
    ],
)
def test_it_is_chosen_where_it_pays(depth, width, inputs, low_rank, monkeypatch):
    monkeypatch.setattr(first_layers, "COPIED", 2**15)  # as measured; see tests/conftest.py
    layer = Layer(depth, width, inputs, False, False, None, None)
    assert pays(layer, 1) == low_rank


def test_a_large_rest_is_scanned(monkeypatch):
    s = settings(rounds=4)
    simulator, last = agree(problem(), "2wgt", s, tolerance=1e-4)
    forms = simulator.forms.of["federated"]
    assert clients_at_once("cpu", s.cohort_size, last.state.x, forms) == s.cohort_size
    monkeypatch.setattr("mixfl.engine.auto.SMALL_MODEL", 0)
    agree(problem(), "2wgt", s, tolerance=1e-4)
    assert clients_at_once("cpu", s.cohort_size, last.state.x, forms) == 1


def turned(params, batch):
    """Weights [width, inputs], as Equinox has them, applied example by example."""
    hidden = jax.vmap(lambda x: jnp.tanh(params["w"] @ x))(batch["x"])
    return jnp.logaddexp(0.0, -batch["y"] * hidden.sum(1))


def in_jit(params, batch):
    @jax.jit
    def hidden(w, x):
        return jnp.tanh(jax.lax.dot_general(2 * x - 1, w, (((1,), (1,)), ((), ()))))

    return jnp.logaddexp(0.0, -batch["y"] * hidden(params["w"], batch["x"]).sum(1))


def transposed(params, batch):
    return jnp.logaddexp(0.0, -batch["y"] * jnp.tanh(batch["x"] @ params["w"].T).sum(1))


@pytest.mark.parametrize("loss", [turned, in_jit, transposed])
def test_it_is_found_however_it_is_written(loss):
    start = lambda key: {"w": jax.random.normal(key, (WIDTH, DIM))}  # noqa: E731
    simulator, _ = agree(problem(loss, start), "1wgt", settings(rounds=3))
    assert simulator.forms.low_rank == {"federated": ["w"]}


def test_it_is_found_in_flax():
    model = nn.Sequential([nn.Dense(WIDTH), nn.relu, nn.Dense(1)])

    def loss(params, batch):
        return jnp.logaddexp(0.0, -batch["y"] * model.apply(params, batch["x"])[:, 0])

    p = problem(loss, lambda key: model.init(key, jnp.zeros((1, DIM))))
    simulator, _ = agree(p, "pt", settings(rounds=3))
    assert simulator.forms.low_rank == {"federated": ["params/layers_0/kernel"]}


def test_beside_a_row_sparse_table():
    def loss(params, batch):
        z = batch["x"] @ params["w"] + params["table"][batch["word"]]
        return jnp.logaddexp(0.0, -batch["y"] * jnp.tanh(z).sum(1))

    def start(key):
        return {"w": jax.random.normal(key, (DIM, WIDTH)), "table": jnp.ones((30, WIDTH))}

    def with_words(data):
        rng = np.random.default_rng(0)
        return data | {"word": rng.integers(0, 30, len(data["y"])).astype(np.int32)}

    sizes = (1, 3, 4, 5, 8, 9, 12, 2)
    clients = mixfl.ClientData.from_arrays(
        with_words(examples(1, sum(sizes), 0.3)), client=np.repeat(np.arange(len(sizes)), sizes)
    )
    p = mixfl.Problem(
        start,
        [
            mixfl.Federated(loss, clients, 0.7, rows={"table": "word"}),
            mixfl.Central(loss, with_words(examples(2, 40, -0.5)), 0.4),
        ],
    )
    simulator, _ = agree(p, "2wgt", settings(rounds=4), tolerance=1e-4)
    assert simulator.forms.tables["federated"]


def test_a_client_that_is_not_finite_is_left_out():
    data = examples(1, 12, 0.3)
    data["x"][:3] = 3e38  # finite, but not what becomes of it
    clients = mixfl.ClientData.from_arrays(data, client=np.arange(12) // 3)

    def loss(params, batch):
        return network(params, batch | {"x": batch["x"] * 10})

    p = mixfl.Problem(init, [mixfl.Federated(loss, clients), mixfl.Central(loss, data)])
    s = settings(cohort_size=4, rounds=1, first_layer="low-rank")
    _, last = trained(p, "fedavg", s)
    assert int(last.info["clients/rejected"]) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.state.x))
    good = mixfl.ClientData.from_arrays(
        {k: v[3:] for k, v in data.items()}, client=np.arange(9) // 3
    )
    p = mixfl.Problem(init, [mixfl.Federated(loss, good), mixfl.Central(loss, data)])
    _, expected = trained(p, "fedavg", dataclasses.replace(s, cohort_size=3))
    np.testing.assert_allclose(flat(last.state.x), flat(expected.state.x), rtol=1e-5, atol=1e-6)


def layers(loss, start=init):
    p = problem(loss, start)
    x = jax.eval_shape(p.init, jax.random.key(0))
    return lowrank.first_layers(p.populations[0], x, 3)


def test_only_exact_layers_are_taken():
    def decayed(params, batch):  # the weights are used elsewhere too
        return network(params, batch) + 0.1 * jnp.sum(params["hidden"]["w"] ** 2)

    def shifted(params, batch):  # the inputs depend on a parameter
        return network(params, batch | {"x": batch["x"] + params["out"][0]})

    def tied(params, batch):  # the same weights twice
        return network(params, batch) + (batch["x"] @ params["hidden"]["w"]).sum(1)

    assert list(layers(network)) == ["hidden/w"]
    for loss in (decayed, shifted, tied):
        assert not layers(loss)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fedavg", {"client_opt": "sgd(momentum=0.9)"}),
        ("example-transfer", {}),
        ("oracle", {}),
        ("fedavg", {"first_layer": "plain"}),
    ],
    ids=str,
)
def test_it_is_left_where_it_is_not_exact_or_does_not_pay(name, change):
    s = settings(**change)
    p = problem()
    assert not Simulator(p, ALGORITHMS[name].build(p, s), s).forms.low_rank


def test_large_clients_do_not_keep_small_ones_from_it():
    p, s = problem(), settings(local_steps=40, client_batch=1)
    forms = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s).forms
    assert not forms.of["federated"]  # up to 12 inputs a client, a layer of 4
    assert all(n.steps <= 8 for n, used in forms.smaller["federated"].items() if used)


def test_it_is_taken_by_itself_where_it_pays():
    p, s = problem(), settings(client_batch=2, local_steps=2)
    assert Simulator(p, ALGORITHMS["2wgt"].build(p, s), s).forms.low_rank


def test_asked_for_in_vain_is_a_sentence():
    p, s = problem(), settings(client_opt="adam", first_layer="low-rank")
    with pytest.raises(mixfl.MixflError, match="first_layer = low-rank, but"):
        Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)


def test_a_round_is_traced_once():
    simulator, _ = trained(problem(), "2wgt", settings(first_layer="low-rank"))
    assert simulator.traces == 1


def test_an_algorithm_of_ones_own_trains_the_model_itself():
    """Its client uses x beyond the loss, where a low-rank layer would give it something else."""

    @algorithm("decayed", CLIENT_KEYS)
    def decayed(p, s):
        def client(term, broadcast, feed):
            def grad(x, step):
                loss, g = gradient(term, x, step.batches)
                return loss, add(g, scale(0.05, x))

            return client_update(term, s, broadcast, feed, grad)

        return ALGORITHMS["fedavg"].build(p, s)._replace(client=client)

    p, models = problem(), {}
    for first_layer in ("auto", "plain"):
        s = settings(client_batch=2, local_steps=2, first_layer=first_layer)
        simulator = Simulator(p, decayed.build(p, s), s)
        assert not simulator.forms.low_rank
        *_, last = simulator.rounds(simulator.init(), 0, s.rounds)
        models[first_layer] = flat(last.state.x)
    np.testing.assert_array_equal(models["auto"], models["plain"])
    s = settings(client_batch=2, local_steps=2)
    *_, undecayed = trained(p, "fedavg", s)
    assert np.abs(flat(undecayed.state.x) - models["auto"]).max() > 1e-3

"""The simulator's promises about memory and feeding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import init, logistic, problem, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator, cohort, feeding
from mixfl.engine.feeding import Feeder
from mixfl.engine.prefetch import Prefetch
from mixfl.errors import MixflError


def wide_problem(clients=64, width=400):
    """Examples large enough that batches, not the model, fill the memory."""
    rng = np.random.default_rng(0)
    n = clients * 4
    data = {"x": rng.normal(size=(n, width)).astype(np.float32), "y": np.ones(n, np.float32)}
    people = mixfl.ClientData.from_arrays(data, client=np.arange(n) // 4)
    start = lambda key: {"b": np.zeros((), np.float32), "w": np.zeros(width, np.float32)}  # noqa: E731
    return mixfl.Problem(
        lambda key: jax.tree.map(jax.numpy.asarray, start(key)),
        [mixfl.Federated(logistic, people), mixfl.Central(logistic, data)],
    )


def memory(p, s, name):
    """Bytes of arguments and temporaries of the compiled program that sees the clients."""
    simulator = Simulator(p, ALGORITHMS[name].build(p, s), s)
    piece = next(iter(simulator.feeder.pieces(simulator.algorithm, 0)))
    program = simulator.program(simulator.algorithm)
    state = simulator.init()
    if piece.last:
        lowered = program.whole.lower(state, piece.drawn, piece.clients)
    else:
        messages, _ = program.begin(state, piece.drawn)
        empty = program.empty(messages, piece.clients, state.aggregation)
        lowered = program.accumulate.lower(empty, messages, piece.clients, state.aggregation)
    sizes = lowered.compile().memory_analysis()
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes


def test_memory_is_bounded_by_the_chunk_and_not_by_the_cohort():
    p = wide_problem()
    small = memory(p, settings(cohort_size=8, cohort_chunk=8), "fedavg")
    chunked = memory(p, settings(cohort_size=64, cohort_chunk=8), "fedavg")
    whole = memory(p, settings(cohort_size=64, cohort_chunk=64), "fedavg")
    assert chunked < 1.1 * small
    assert whole > 3 * small


def test_central_memory_is_bounded_by_the_chunk():
    data = wide_problem().central[0].data

    def hidden_layer(params, batch):  # activations [batch, 20000], far more than the model
        return jax.numpy.tanh(batch["x"][:, :4] @ params["w"]).sum(1)

    start = lambda key: {"w": jax.numpy.zeros((4, 20_000))}  # noqa: E731
    p = mixfl.Problem(start, [mixfl.Central(hidden_layer, data)])
    temporaries = []
    for chunk in (16, 256):
        s = settings(cohort_size=1, central_batch=256, central_chunk=chunk, central_steps=1)
        simulator = Simulator(p, ALGORITHMS["central"].build(p, s), s)
        piece = next(iter(simulator.feeder.pieces(simulator.algorithm, 0)))
        program = simulator.program(simulator.algorithm)
        lowered = program.whole.lower(simulator.init(), piece.drawn, piece.clients)
        temporaries.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    model = 4 * 20_000 * 4
    activations = [16 * 20_000 * 4, 256 * 20_000 * 4]
    assert temporaries[1] >= activations[1]
    limit = 2 * activations[0] + 4 * model
    assert activations[0] <= temporaries[0] < limit
    assert limit < activations[1] / 4  # so that a batch that is not cut would be seen


def test_auto_chunk_keeps_a_chunk_within_its_bytes(monkeypatch):
    monkeypatch.setattr(feeding, "CHUNK_BYTES", 50_000)
    p = wide_problem(clients=64, width=400)
    feeder = Feeder(p, settings(cohort_size=64, client_batch=2, local_steps=2))
    per_client = 4 * p.populations[0].examples.example_bytes
    assert 1 < feeder.chunk < 64
    assert feeder.chunk * per_client <= 50_000


def test_no_client_is_padded_beyond_the_largest():
    p = problem()  # the largest client has 12 rows
    feeder = Feeder(p, settings(client_batch=5, local_steps=10**12))
    assert feeder.shapes[0][-1] == (3, 5)
    feeder = Feeder(p, settings(client_batch=10**12, local_steps=2))
    assert feeder.shapes[0][-1] == (1, 12)


@pytest.mark.parametrize("terms", ["two terms", "regularizer"])
def test_central_batches_beyond_memory_are_an_error(terms):
    p, s = problem(terms), settings(local_steps=2**62)
    with pytest.raises(MixflError, match="lower central_steps"):
        Simulator(p, ALGORITHMS["pt"].build(p, s), s)


def test_a_cohort_reads_only_its_own_rows(tmp_path, monkeypatch):
    p = problem()
    p.populations[0].clients.write(tmp_path / "store")
    stored = mixfl.ClientData.open(tmp_path / "store")
    read = []
    column = type(stored.examples.columns["x"])
    real = column.take
    monkeypatch.setattr(column, "take", lambda self, rows: read.append(rows) or real(self, rows))
    s = settings(cohort_size=2)
    other = mixfl.Problem(init, [mixfl.Federated(logistic, stored)])
    feeder = Feeder(other, s)
    list(feeder.pieces(ALGORITHMS["fedavg"].build(other, s), 0))
    chosen = cohort.cohort(s.seed, 0, 0, len(stored), 2)
    allowed = set(np.concatenate([stored.rows(i) for i in chosen]).tolist())
    assert read
    assert set(np.concatenate(read).tolist()) <= allowed


def test_store_and_arrays_train_to_the_same_bits(tmp_path):
    p = problem()
    p.populations[0].clients.write(tmp_path / "store")
    stored = mixfl.ClientData.open(tmp_path / "store")
    again = mixfl.Problem(init, [mixfl.Federated(logistic, stored, 0.7), p.central[0]])
    kw = dict(rounds=3, cohort_size=5, client_batch=3, local_steps=3, client_lr=0.2)
    one, two = mixfl.train(p, "pt", **kw), mixfl.train(again, "pt", **kw)
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_prefetch_hands_on_items_and_errors_and_stops():
    def source():
        yield 1
        yield 2
        raise MixflError("broken")

    items = iter(Prefetch(source))
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(MixflError, match="broken"):
        next(items)
    endless = Prefetch(lambda: iter(int, 1))
    endless.close()
    assert not endless.thread.is_alive()


def test_more_devices_than_there_are_is_an_error():
    with pytest.raises(MixflError, match="devices = 50"):
        Simulator(problem(), ALGORITHMS["pt"].build(problem(), settings()), settings(devices=50))


def test_central_draws_are_without_replacement_and_dealt_fairly():
    rng = np.random.default_rng(0)
    rows = cohort.drawn_rows(rng, 10, 4, 7)
    assert all(len(set(batch)) == 7 for batch in rows)
    dealt = cohort.dealt_rows(rng, 10, 25)
    assert sorted(np.bincount(dealt, minlength=10).tolist()) == [2] * 5 + [3] * 5


@pytest.mark.parametrize(
    ("width", "name", "devices"),
    [
        (2**15, "fedavg", 2),
        (400, "fedavg", 1),  # one of two cores is left to the reader
        (2**15, "central", 1),
        (2**20, "fedavg", 1),  # its products use all cores
    ],
)
def test_auto_devices_share_models_of_middle_size_with_clients(width, name, devices):
    p = wide_problem(clients=8, width=width)
    s = settings(cohort_size=4, central_batch=4, devices="auto")
    assert Simulator(p, ALGORITHMS[name].build(p, s), s).devices == devices


@pytest.mark.parametrize(("behind", "devices"), [(20, 1), (200, 2)])
def test_auto_devices_share_what_is_behind_a_low_rank_layer(behind, devices):
    """The layer's own products use all cores. What is behind it is computed client by client."""

    def start(key):
        return {"w": jnp.zeros((300, 200)), "v": jnp.zeros((200, behind))}

    def loss(params, batch):
        return jnp.sum(jnp.tanh(batch["x"] @ params["w"]) @ params["v"], 1)

    x = np.zeros((80, 300), np.float32)
    clients = mixfl.ClientData.from_arrays({"x": x}, client=np.arange(80) // 10)
    p = mixfl.Problem(start, [mixfl.Federated(loss, clients)])
    s = settings(cohort_size=4, client_batch=10, local_steps=1, devices="auto")
    simulator = Simulator(p, ALGORITHMS["fedavg"].build(p, s), s)
    assert simulator.forms.low_rank == {"federated": ["w"]}
    assert simulator.devices == devices


def test_a_long_round_tells_how_far_it_is():
    s = settings(cohort_size=5, cohort_chunk=2, rounds=2)
    p = problem()
    simulator = Simulator(p, ALGORITHMS["pt"].build(p, s), s)
    told = []
    simulator.on_progress = lambda progress: told.append(progress)
    list(simulator.rounds(simulator.init(), 0, 2))
    assert told == [(t, done / 5, f"{done} of 5 clients") for t in (0, 1) for done in (0, 2, 4, 5)]


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *((name, 1) for name in ("pt", "2wgt", "1wgt", "oracle", "central", "pretrain")),
        ("2wgt", 2),
        *(pytest.param(name, 2, marks=pytest.mark.numbers)
          for name in ("pt", "1wgt", "oracle", "central", "pretrain")),
    ],
)  # fmt: skip
def test_the_server_tells_how_far_it_is(name, devices):
    s = settings(
        cohort_size=4, client_batch=4, cohort_chunk=2, rounds=2, local_steps=2,
        central_batch=16, central_chunk=2, devices=devices,
    )  # fmt: skip
    p = problem()
    algorithm = ALGORITHMS[name].build(p, s)
    plain, telling = Simulator(p, algorithm, s), Simulator(p, algorithm, s)
    expected = list(plain.rounds(plain.init(), 0, 2))[-1].state
    told = []
    telling.on_progress = lambda progress: told.append(progress)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mixfl.engine.simulator.LONG_ROUND", 2)
        state = list(telling.rounds(telling.init(), 0, 2))[-1].state
        jax.block_until_ready(state)
        jax.effects_barrier()
    for a, b in zip(jax.tree.leaves(state.x), jax.tree.leaves(expected.x), strict=True):
        np.testing.assert_array_equal(a, b)
    chunks = {"1wgt": 8, "oracle": 2 * 2 * 8}.get(name, 2 * 8)
    assert not telling.under_way
    for t in (0, 1):
        said = [words for round, part, words in told if round == t]
        if name == "pretrain" and t == 1:
            assert said[-1] == "4 of 4 clients"
            continue
        assert any(w.endswith(f"1 of {chunks} batches at the server") for w in said), said
        assert any(w.endswith(f"{chunks} of {chunks} batches at the server") for w in said), said


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**70 + 3])
def test_a_client_draws_from_a_generator_of_its_own(seed):
    """That of the list [seed, round, what, population, client], as everywhere else."""
    sizes, first, clients = np.array([1, 4, 9, 30]), np.array([0, 1, 5, 14]), np.array([3, 0, 8, 5])
    rows, mask = cohort.cohort_rows(seed, 11, 1, clients, first, sizes, 3, 4)
    for i, client in enumerate(clients):
        rng = cohort.generator(seed, 11, cohort.ORDER, 1, client)
        order = first[i] + rng.permutation(sizes[i])[:12]
        assert mask[i].sum() == len(order)
        np.testing.assert_array_equal(rows[i].ravel()[: len(order)], order)
        last = order[(len(order) - 1) // 4 * 4 :]  # padding repeats the last batch
        assert set(rows[i].ravel()[len(order) :]) <= set(last)

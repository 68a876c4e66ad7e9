"""What a large population costs: work and memory are counted, not timed."""

import tracemalloc

import numpy as np
import pytest

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.data import store as stores
from mixfl.data import writer
from mixfl.data.writer import StoreWriter
from mixfl.engine import cohort
from mixfl.engine.feeding import Feeder
from mixfl.engine.seeds import generators

SETTINGS = mixfl.Settings(cohort_size=20, client_batch=4, local_steps=3)


def peak(function):
    """The most bytes that NumPy and Python hold during the call beyond those before it."""
    tracemalloc.start()
    try:
        kept = function()
        del kept
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Stores of 300 and 30,000 clients, in several record batches."""
    made = tmp_path_factory.mktemp("stores")
    rows = np.arange(14 * 40, dtype=np.int16).reshape(-1, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BATCH_BYTES", 1 << 18)
        for clients in (300, 30_000):
            with StoreWriter(made / str(clients)) as store:
                for i in range(clients):
                    store.add(f"somebody with a long name, {i:07d}", {"x": rows[: 1 + i % 40]})
    return made


def feeder(clients):
    problem = mixfl.Problem(lambda key: None, [mixfl.Federated(lambda x, b: b["x"], clients)])
    return Feeder(problem, SETTINGS), ALGORITHMS["fedavg"].build(problem, SETTINGS)


def test_opening_costs_a_few_numbers_per_client_and_nothing_per_example(folder):
    feeder(mixfl.ClientData.open(folder / "300"))  # imports
    opened = peak(lambda: feeder(mixfl.ClientData.open(folder / "30000")))
    data = (folder / "30000" / "data.arrow").stat().st_size
    assert data > 4_000_000
    assert opened < 200_000 + 4 * 8 * 30_000


def test_a_cohort_costs_the_same_from_any_population(folder):
    costs = []
    for clients in ("300", "30000"):
        made, algorithm = feeder(mixfl.ClientData.open(folder / clients))
        read = lambda t, m=made, a=algorithm: list(m.pieces(a, t))  # noqa: E731
        read(0)
        costs.append(max(peak(lambda t=t, read=read: read(t)) for t in range(5)))
    assert costs[1] < costs[0] + 20_000


def test_drawing_a_cohort_costs_its_size_only():
    assert peak(lambda: cohort.cohort(0, 0, 0, 10**12, 100)) < 50_000
    assert peak(lambda: cohort.drawn_rows(np.random.default_rng(0), 10**12, 2, 100)) < 50_000


def test_names_of_clients_are_not_read(folder, monkeypatch):
    monkeypatch.setattr(stores.Ids, "__getitem__", lambda self, i: 1 / 0)
    made, algorithm = feeder(mixfl.ClientData.open(folder / "30000"))
    assert len(list(made.pieces(algorithm, 0))) > 0


def test_a_column_in_parts_reads_as_one(folder):
    clients = mixfl.ClientData.open(folder / "30000")
    column = clients.examples.columns["x"]
    assert len(column.parts) > 5
    rows = np.random.default_rng(0).integers(0, len(column), 1000)
    whole = np.concatenate(column.parts)
    np.testing.assert_array_equal(column.take(rows), whole[rows])


@pytest.mark.parametrize("words", [[0], [3, 0], [7, 12, 1, 0], [1, 2, 3, 4, 5, 6], [2**40, 3]])
def test_generators_are_those_of_default_rng(words):
    last = np.array([0, 1, 342_476, 2**32 - 1])
    for i, rng in enumerate(generators(words, last)):
        expected = np.random.default_rng([*words, int(last[i])])
        np.testing.assert_array_equal(rng.integers(0, 2**62, 4), expected.integers(0, 2**62, 4))
    assert i == 3

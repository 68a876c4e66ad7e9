"""Columns of lists with different lengths: read padded, with their lengths; kept in stores."""

import itertools

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mixfl
from mixfl.data.columns import Ragged, joined
from mixfl.data.info import info
from mixfl.data.store import LISTS
from mixfl.errors import MixflError

TOKENS = [[5, 2, 9], [7], [], [1, 2], [4]]


def padded(lists, length, fill=0):
    """The slow way."""
    return [[*row[:length], *[fill] * (length - len(row))] for row in lists]


def in_parts(lists, cuts):
    """A Ragged with a part per piece between the cuts."""
    edges = [0, *sorted(cuts), len(lists)]
    pieces = [Ragged.from_lists(lists[a:b]) for a, b in itertools.pairwise(edges)]
    return Ragged([p.parts[0].astype(np.int32) for p in pieces], [p.ends[0] for p in pieces])


@given(
    lists=st.lists(st.lists(st.integers(-99, 99), max_size=5), min_size=1, max_size=9),
    cuts=st.lists(st.integers(0, 9), max_size=3),
    length=st.integers(1, 6), fill=st.integers(-3, 3), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=60)
def test_rows_are_read_as_the_slow_way_pads_them(lists, cuts, length, fill, seed):
    column = in_parts(lists, [min(c, len(lists)) for c in cuts]).padded(length, fill)
    rows = np.random.default_rng(seed).integers(0, len(lists), 7)
    chosen = [lists[i] for i in rows]
    assert column.take(rows).tolist() == padded(chosen, length, fill)
    assert column.lengths(rows).tolist() == [min(len(row), length) for row in chosen]
    again = column[rows]
    assert again.take(np.arange(7)).tolist() == padded(chosen, length, fill)
    twice = joined([again, column])
    assert twice.take(np.arange(len(twice))).tolist() == padded(chosen + lists, length, fill)


@pytest.mark.parametrize("as_given", [list, lambda x: np.array(x, object), Ragged.from_lists])
def test_clients_with_lists(as_given):
    data = mixfl.ClientData.from_arrays(
        {"tokens": as_given(TOKENS), "y": np.arange(5)}, client=[1, 0, 1, 0, 1]
    )
    found = data.examples.all()
    assert found["tokens"].tolist() == padded([TOKENS[i] for i in (1, 3, 0, 2, 4)], 3)
    assert found["tokens_length"].tolist() == [1, 2, 3, 0, 1]
    assert found["tokens"].dtype == found["tokens_length"].dtype == np.int32
    assert found["y"].tolist() == [1, 3, 0, 2, 4]
    assert data.examples.example_bytes == 4 * (3 + 1 + 1)


def test_lists_of_equal_length_in_one_client():
    clients = {"a": {"t": [[1, 2], [3, 4]]}, "b": {"t": [[1, 2, 3], [4]]}, "c": {"t": [[], []]}}
    data = mixfl.ClientData.from_clients(clients)
    lists = [row for columns in clients.values() for row in columns["t"]]
    assert data.examples.all()["t"].tolist() == padded(lists, 3)
    assert data.sizes().tolist() == [2, 2, 2]


def test_padding_is_chosen_when_data_is_read(tmp_path):
    data = mixfl.ClientData.from_arrays({"t": TOKENS}, client=[0, 0, 1, 1, 2])
    data.write(tmp_path / "store")
    for source in (data, mixfl.ClientData.open(tmp_path / "store")):
        short = source.pad("t", 2, fill=-1)
        assert short.examples.all()["t"].tolist() == padded(TOKENS, 2, -1)
        assert short.examples.all()["t_length"].tolist() == [2, 1, 0, 2, 1]
        assert source.examples.all()["t"].tolist() == padded(TOKENS, 3)
        assert source.pad("t", 9).examples.columns["t"].shape == (9,)
        few = source.where(lambda c: c["t_length"] > 1, "t_length").usable()
        assert few.examples.all()["t"].tolist() == padded([TOKENS[0], TOKENS[3]], 3)
    with pytest.raises(MixflError, match="padded to 70000 numbers: expected 1 to 65536"):
        data.pad("t", 70_000)
    data.pad("t", 2, fill=7).write(tmp_path / "short")  # what is written is what is read
    found = mixfl.ClientData.open(tmp_path / "short").examples.all()["t"]
    assert found.tolist() == padded(TOKENS, 2, 7)


BAD = {
    "taken": (lambda: {"t": TOKENS, "t_length": np.arange(5)}, "'t_length' is made for"),
    "strings": (lambda: {"t": [["a"], ["b", "c"]]}, "Turn text and categories"),
    "images": (lambda: {"t": [np.zeros((2, 3)), np.zeros((4, 3))]}, "expected numbers with one"),
    "large": (lambda: {"t": [[1], [2, 1 << 40]]}, "need more than 32 bits"),
    "NaN": (lambda: {"t": [[1.0], [2, np.nan]]}, "NaN or infinite"),
    "rows": (lambda: {"t": Ragged.from_lists([[1], [[2]]])}, "row 1 of a ragged column has"),
    "length": (lambda: {"t": Ragged.from_lists([[1]], length=0)}, "expected at least 1"),
    "fill": (lambda: {"t": Ragged.from_lists([[1]], fill=0.5)}, "that the column can hold"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lists(case):
    make, message = BAD[case]
    with pytest.raises(MixflError, match=message):
        mixfl.ClientData.from_arrays(make(), client=np.zeros(5))


def test_only_ragged_columns_are_padded():
    data = mixfl.ClientData.from_arrays({"t": TOKENS, "y": np.arange(5)}, client=np.zeros(5))
    for name in ("y", "none", "t_length"):
        with pytest.raises(MixflError, match=f"'{name}' is not ragged. Ragged are: t"):
            data.pad(name, 3)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int16, np.float16, np.float32])
def test_stores_keep_lists(tmp_path, dtype):
    lists = [np.array(row, dtype) for row in TOKENS]
    data = mixfl.ClientData.from_arrays({"t": lists}, client=[0, 0, 1, 1, 2])
    data.write(tmp_path / "store")
    found = mixfl.ClientData.open(tmp_path / "store")
    for i in range(3):
        assert found.examples.take(found.rows(i))["t"].tolist() == (
            data.examples.take(data.rows(i))["t"].tolist()
        )
    assert found.examples.columns["t"].dtype == dtype
    assert "    t         " + f"{np.dtype(dtype)} [...], padded to 3" in info(tmp_path / "store")


def test_a_stranger_s_lists(tmp_path):
    """Lists that end before they begin, or lie outside the file, are not read."""
    data = mixfl.ClientData.from_arrays({"t": TOKENS}, client=[0, 0, 1, 1, 2])
    for name, ends in {"back": [0, 3, 2, 4, 6, 7], "out": [0, 3, 4, 4, 6, 99]}.items():
        data.write(tmp_path / name)
        path = tmp_path / name / "data.arrow"
        schema = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).schema
        good = np.array([0, 3, 4, 4, 6, 7], np.int64).tobytes()
        content = path.read_bytes()
        assert good in content
        path.write_bytes(content.replace(good, np.array(ends, np.int64).tobytes()))
        assert schema.names == ["t"]
        with pytest.raises(MixflError, match="is damaged"):
            mixfl.ClientData.open(tmp_path / name).examples.all()


def test_a_store_without_its_lengths_is_damaged(tmp_path):
    mixfl.ClientData.from_arrays({"t": TOKENS}, client=np.zeros(5)).write(tmp_path / "store")
    path = tmp_path / "store" / "clients.arrow"
    table = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()
    for metadata in (None, {LISTS: "[]"}, {LISTS: '{"t": [1e9, 0]}'}, {LISTS: '{"t": 3}'}):
        table = table.replace_schema_metadata(metadata)
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
        with pytest.raises(MixflError, match="is damaged"):
            mixfl.ClientData.open(tmp_path / "store")


def test_training_on_lists_is_training_on_padded_arrays(tmp_path):
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 9, n).tolist() for n in rng.integers(0, 7, 30)]
    client = np.arange(30) // 5
    same = np.array(padded(lists, max(map(len, lists))))
    lengths = np.array([len(row) for row in lists])

    def loss(params, batch):
        known = jnp.arange(batch["t"].shape[1]) < batch["t_length"][:, None]
        return ((params["w"][batch["t"]] * known).sum(1) - batch["t_length"]) ** 2

    mixfl.ClientData.from_arrays({"t": lists}, client=client).write(tmp_path / "store")
    found = [
        mixfl.train(
            mixfl.Problem(lambda key: {"w": jnp.zeros(9)}, [mixfl.Federated(loss, clients)]),
            "fedavg", rounds=2, cohort_size=3, client_batch=2, local_steps=2, client_lr=0.01,
        ).params["w"].tobytes()
        for clients in (
            mixfl.ClientData.open(tmp_path / "store"),
            mixfl.ClientData.from_arrays({"t": same, "t_length": lengths}, client=client),
        )
    ]  # fmt: skip
    assert found[0] == found[1]

"""Client data: from arrays, from clients, and in memory-mapped stores."""

import subprocess
import sys

import jax
import numpy as np
import pyarrow as pa
import pytest
import tiny_problem
from memory_maps import in_map_of

import mixfl
from mixfl.data import writer
from mixfl.data.writer import StoreWriter
from mixfl.errors import MixflError


def example_columns(n=23, seed=0):
    """A column of every dtype that is kept as it is, in several shapes."""
    rng = np.random.default_rng(seed)
    whole = ("int8", "int16", "int32", "uint8", "uint16", "uint32")
    columns = {dtype: rng.integers(0, 100, n).astype(dtype) for dtype in whole}
    return columns | {
        "bool": rng.random(n) > 0.5,
        "flags": rng.random((n, 3)) > 0.5,
        "float16": rng.normal(size=(n, 2)).astype(np.float16),
        "float32": rng.normal(size=(n, 1)).astype(np.float32),
        "image": rng.integers(0, 256, (n, 4, 3, 2)).astype(np.uint8),
    }


def example_clients(n=23, seed=0):
    client = np.sort(np.random.default_rng(seed).integers(0, 6, n))
    return mixfl.ClientData.from_arrays(example_columns(n, seed), client=client)


def contents(data) -> dict:
    """{client: its columns}"""
    return {str(data.ids[i]): data.examples.take(data.rows(i)) for i in range(len(data))}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for client, columns in expected.items():
        assert found[client].keys() == columns.keys()
        for name, a in columns.items():
            assert found[client][name].dtype == a.dtype, name
            np.testing.assert_array_equal(found[client][name], a)


# From arrays


def test_unsorted_clients_are_grouped_and_keep_their_order():
    data = mixfl.ClientData.from_arrays({"x": np.arange(6)}, client=[3, 1, 3, 2, 1, 3])
    assert list(data.ids) == [1, 2, 3]
    assert data.sizes().tolist() == [2, 1, 3]
    found = {client: columns["x"].tolist() for client, columns in contents(data).items()}
    assert found == {"1": [1, 4], "2": [3], "3": [0, 2, 5]}


@pytest.mark.parametrize("dtype", [str, object])
def test_clients_may_have_names(dtype):
    names = np.array(["bo", "al", "bo", "cy"], dtype)
    data = mixfl.ClientData.from_arrays({"x": [0.0, 1.0, 2.0, 3.0]}, client=names)
    found = {client: columns["x"].tolist() for client, columns in contents(data).items()}
    assert found == {"al": [1], "bo": [0, 2], "cy": [3]}


def test_sorted_arrays_are_not_copied():
    x = np.arange(1000, dtype=np.float32)
    data = mixfl.ClientData.from_arrays({"x": x}, client=np.arange(1000) // 7)
    assert np.shares_memory(data.examples.columns["x"].parts[0], x)


def test_what_is_read_is_used_in_place():
    """XLA copies arrays that begin at other addresses."""
    examples = example_clients().examples
    for n in range(1, 20):
        for name, a in examples.take(np.arange(n)).items():
            held = jax.device_put(a)
            assert held.unsafe_buffer_pointer() == a.ctypes.data, (name, n)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("f8", "f4"), ("i8", "i4"), ("u8", "i4"), ("g", "f4"), (">f4", "f4"), (">i2", "i2")],
)
def test_dtypes_are_made_fit_for_jax(given, kept):
    examples = mixfl.Examples.from_arrays({"x": np.arange(5).astype(given)})
    found = examples.all()["x"]
    assert found.dtype == np.dtype(kept)
    assert found.dtype.isnative
    assert found.tolist() == [0, 1, 2, 3, 4]
    assert examples.example_bytes == found.itemsize


BAD = {
    "no dict": ([1, 2], "expected a dict of columns"),
    "no columns": ({}, "expected a dict of columns"),
    "a number": ({"x": 3.0}, r"column 'x' .* shape \(\)"),
    "strings": ({"x": ["a", "b"]}, "Turn text and categories into numbers first"),
    "complex": ({"x": [1j, 2]}, "has dtype complex128"),
    "no width": ({"x": np.zeros((3, 0))}, r"shape \(3, 0\)"),
    "NaN": ({"x": [1.0, np.nan]}, "NaN or infinite value in row 1"),
    "inf": ({"x": [[1.0, -np.inf]]}, "NaN or infinite value in row 0"),
    "half inf": ({"x": np.array([1, np.inf], np.float16)}, "NaN or infinite value in row 1"),
    "beyond float32": ({"x": [1.0, 1e39]}, r"row 1 \(as a 32-bit number\)"),
    "beyond int32": ({"x": [1 << 31]}, "whole numbers that need more than 32 bits"),
    "below int32": ({"x": [-(1 << 31) - 1]}, "whole numbers that need more than 32 bits"),
    "lengths": ({"x": [1, 2], "y": [1]}, "different numbers of rows: {'x': 2, 'y': 1}"),
    "no rows": ({"x": []}, "the data has no rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_columns(case):
    arrays, message = BAD[case]
    for make in (
        mixfl.Examples.from_arrays,
        lambda a: mixfl.ClientData.from_arrays(a, client=[0]),
        lambda a: mixfl.Central(len, a),
    ):
        with pytest.raises(MixflError, match=message):
            make(arrays)


def test_a_late_nan_is_found():
    x = np.zeros((200_000, 2), np.float32)
    x[150_001, 1] = np.nan
    with pytest.raises(MixflError, match="row 150001"):
        mixfl.Examples.from_arrays({"x": x})


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ([1], r"shape \(1,\), the data has 3 rows"),
        ([[1], [2], [3]], r"shape \(3, 1\)"),
        ([1, 2, np.nan], "missing values"),
        (["a", "b", None], "missing values"),
        (np.array([1, "a", 2], object), "mixes kinds of values"),
    ],
)
def test_bad_client_columns(client, message):
    with pytest.raises(MixflError, match=message):
        mixfl.ClientData.from_arrays({"x": np.zeros(3)}, client=client)


# From clients


def test_from_clients_drops_and_counts_the_empty_ones():
    data = mixfl.ClientData.from_clients(
        {"a": {"x": [1.0, 2.0]}, "b": {"x": []}, "c": {}, "d": {"x": np.ones(1)}}
    )
    assert (list(data.ids), data.dropped) == (["a", "d"], 2)
    assert contents(data)["a"]["x"].tolist() == [1, 2]
    assert mixfl.Federated(len, data).clients.dropped == 2


def test_clients_in_a_list_are_numbered():
    data = mixfl.ClientData.from_clients([{"x": [1.0]}, {}, {"x": [2.0, 3.0]}])
    assert (list(data.ids), data.dropped) == ([0, 2], 1)
    assert [c["x"].tolist() for c in contents(data).values()] == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([np.ones(2)], "client 0: expected a dict of columns .* got ndarray"),
        ({}, "none of the 0 clients has an example"),
        ({"a": {"x": []}}, "none of the 1 clients has an example"),
        ({"a": {"x": [1]}, "b": {"y": [1]}}, "client 'b' has columns"),
        (
            {"a": {"x": [1]}, "b": {"x": [[1]]}},
            r"client 'b' .* {'x': \(1,\)}, expected {'x': \(\)}",
        ),
        # In all there are as many rows of x as of y.
        ({"a": {"x": [1, 2], "y": [1]}, "b": {"x": [1], "y": [1, 2]}}, "client 'a': .* different"),
        ({"a": {"x": [1.0]}, "b": {"x": [np.nan]}}, "client 'b': column 'x' has a NaN"),
        ({"a": [1.0]}, "client 'a': expected a dict of columns"),
    ],
)
def test_bad_clients(clients, message):
    with pytest.raises(MixflError, match=message):
        mixfl.ClientData.from_clients(clients)


def test_clients_with_mixed_dtypes_get_one():
    data = mixfl.ClientData.from_clients({"a": {"x": [1, 2]}, "b": {"x": [0.5]}})
    assert data.examples.all()["x"].dtype == np.float32
    assert data.examples.all()["x"].tolist() == [1, 2, 0.5]


# Parts of the data


def test_where_select_and_usable():
    data = mixfl.ClientData.from_arrays(
        {"x": np.arange(8), "y": np.arange(8) % 2}, client=[0] * 3 + [1] * 1 + [2] * 4
    )
    odd = data.where(lambda c: c["y"] == 1, "y")
    assert {c: v["x"].tolist() for c, v in contents(odd).items()} == {
        "0": [1],
        "1": [3],
        "2": [5, 7],
    }
    late = odd.where(lambda c: c["x"] > 3, "x")
    assert late.sizes().tolist() == [0, 0, 2]
    assert late.dropped == 0
    usable = late.usable()
    assert (len(usable), usable.dropped) == (1, 2)
    assert contents(usable)["2"]["x"].tolist() == [5, 7]
    assert usable.usable() is usable

    some = odd.select(np.array([2, 0]))
    assert list(contents(some)) == ["2", "0"]
    assert contents(some)["0"]["x"].tolist() == [1]
    assert contents(some.select([1]))["0"]["x"].tolist() == [1]
    assert len(odd.select([])) == 0


def test_a_population_without_examples_is_refused():
    data = mixfl.ClientData.from_arrays({"x": np.arange(4)}, client=[0, 0, 1, 2])
    for empty, clients in ((data.where(lambda c: c["x"] > 9, "x"), 3), (data.select([]), 0)):
        with pytest.raises(MixflError, match=f"none of its {clients} clients has an example"):
            mixfl.Federated(len, empty)


def test_take_has_the_shape_of_the_index():
    examples = example_clients().examples.subset([5, 3, 4])
    taken = examples.take(np.array([[0, 1], [2, 0]]))
    assert taken["image"].shape == (2, 2, 4, 3, 2)
    np.testing.assert_array_equal(taken["int32"], example_columns()["int32"][[[5, 3], [4, 5]]])


# Stores


@pytest.mark.parametrize("batch_bytes", [1, 200, 32 << 20])
def test_store_gives_back_what_was_written(batch_bytes, monkeypatch, tmp_path):
    monkeypatch.setattr(writer, "BATCH_BYTES", batch_bytes)
    data = example_clients()
    data.write(tmp_path / "store")
    found = mixfl.ClientData.open(tmp_path / "store")
    parts = len(found.examples.columns["image"].parts)
    assert parts == {1: len(data), 32 << 20: 1}.get(batch_bytes, parts)
    assert 1 < parts < len(data) or batch_bytes != 200
    assert_same(contents(found), contents(data))
    rows = np.array([22, 0, 7, 7, 13])  # across the parts
    for name, a in data.examples.take(rows).items():
        np.testing.assert_array_equal(found.examples.take(rows)[name], a)
    odd = found.where(lambda c: c["int8"] % 2 == 1, "int8")
    assert_same(contents(odd), contents(data.where(lambda c: c["int8"] % 2 == 1, "int8")))


def test_store_is_not_read_when_opened(tmp_path):
    """The columns are views of the memory map: opening takes no memory for them."""
    n = 1 << 20
    data = mixfl.ClientData.from_arrays(
        {"x": np.zeros((n, 8), np.float32), "flag": np.zeros(n, bool)}, client=np.arange(n) // 999
    )
    data.write(tmp_path / "store")
    before = pa.total_allocated_bytes()
    found = mixfl.ClientData.open(tmp_path / "store")
    assert pa.total_allocated_bytes() - before < 1 << 16
    for column in found.examples.columns.values():
        for part in column.parts:
            assert not part.flags.owndata
            assert not part.flags.writeable
            assert in_map_of(tmp_path / "store" / "data.arrow", part)


def test_written_without_empty_clients(tmp_path):
    data = mixfl.ClientData.from_arrays({"x": np.arange(4)}, client=[0, 0, 1, 2])
    data.where(lambda c: c["x"] != 2, "x").write(tmp_path / "store")
    assert list(contents(mixfl.ClientData.open(tmp_path / "store"))) == ["0", "2"]
    with pytest.raises(MixflError, match="no client has data"):
        data.where(lambda c: c["x"] > 9, "x").write(tmp_path / "none")
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def write(path, *clients, then=None):
    """A store with clients a, b, ...; the writer is interrupted by `then`."""
    with StoreWriter(path) as writer:
        for name, columns in zip("abc", clients, strict=False):
            writer.add(name, columns)
        if then is not None:
            raise then


def test_interrupted_writer_leaves_no_store(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "BATCH_BYTES", 1)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "store", {"x": np.arange(3)}, then=KeyboardInterrupt())
    assert not list(tmp_path.iterdir())


def test_writer_killed_in_the_middle(tmp_path):
    code = (
        "import os, signal, sys, numpy as np, pathlib\n"
        "from mixfl.data import writer\n"
        "writer.BATCH_BYTES = 1\n"
        "with writer.StoreWriter(pathlib.Path(sys.argv[1])) as w:\n"
        "    w.add('a', {'x': np.arange(3)})\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "store"])
    assert done.returncode == -9
    with pytest.raises(MixflError, match="is not a client store"):
        mixfl.ClientData.open(tmp_path / "store")
    data = example_clients()
    data.write(tmp_path / "store")  # what was left is cleared away
    assert_same(contents(mixfl.ClientData.open(tmp_path / "store")), contents(data))
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_disk_full_while_a_store_is_written(tmp_path):
    code = (
        "import mixfl, resource, sys, numpy as np\n"
        "data = mixfl.ClientData.from_arrays({'x': np.zeros(5000)}, client=np.arange(5000) // 9)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))\n"
        "try:\n"
        "    data.write(sys.argv[1])\n"
        "except mixfl.MixflError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "store"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "store could not be written: " in done.stdout, done.stderr
    assert "File too large" in done.stdout
    assert not list(tmp_path.iterdir())


def test_writer_checks_what_it_is_given(tmp_path):
    example_clients().write(tmp_path / "store")
    with pytest.raises(MixflError, match="already exists"):
        example_clients().write(tmp_path / "store")
    first = {"x": np.zeros((2, 3))}
    for other in ({"x": np.zeros((2, 4))}, {"x": np.zeros((2, 3), int)}, {"y": np.zeros((2, 3))}):
        with pytest.raises(MixflError, match=r"client 'b' .* but earlier clients have"):
            write(tmp_path / "other", first, other)
    with pytest.raises(MixflError, match="column 'x' has a NaN"):
        write(tmp_path / "other", {"x": np.array([np.nan])})
    with pytest.raises(MixflError, match="no client has data"):
        write(tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir()] == ["store"]


def test_opening_imports_no_pandas(tmp_path):
    """Arrow imports it for its own conversions, which takes half a second."""
    example_clients().write(tmp_path / "store")
    code = (
        "import sys, mixfl; before = 'pandas' in sys.modules; "
        "mixfl.ClientData.open(sys.argv[1]); assert before or 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], check=True)


def test_damaged_store(tmp_path):
    path = tmp_path / "store"
    example_clients().write(path)
    good = {file: (path / file).read_bytes() for file in ("data.arrow", "clients.arrow")}
    for file, content in good.items():
        for bad in (b"", b"nonsense", content[: len(content) // 2], content[:-1]):
            (path / file).write_bytes(bad)
            with pytest.raises(MixflError, match=rf"store {path} is damaged: .*Prepare it again"):
                mixfl.ClientData.open(path)
        (path / file).write_bytes(content)
    (path / "data.arrow").unlink()
    with pytest.raises(MixflError, match="is damaged"):
        mixfl.ClientData.open(path)
    mixfl.ClientData.from_arrays({"x": np.zeros(3)}, client=[0, 1, 2]).write(tmp_path / "other")
    (path / "data.arrow").write_bytes((tmp_path / "other" / "data.arrow").read_bytes())
    with pytest.raises(MixflError, match="rows and clients disagree"):
        mixfl.ClientData.open(path)
    with pytest.raises(MixflError, match="is not a client store"):
        mixfl.ClientData.open(tmp_path / "nowhere")


def test_training_from_a_store_is_the_same(tmp_path):
    tiny_problem.clients.write(tmp_path / "store")
    opened = mixfl.ClientData.open(tmp_path / "store")
    found = [
        mixfl.train(
            mixfl.Problem(tiny_problem.init, [mixfl.Federated(tiny_problem.loss, clients)]),
            "fedavg", rounds=3, cohort_size=4,
        ).params["w"].tobytes()
        for clients in (tiny_problem.clients, opened)
    ]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.parametrize("terms", [(), mixfl.Central(len, {"x": [1.0]}), [len]])
def test_a_problem_needs_a_list_of_terms(terms):
    with pytest.raises(mixfl.MixflError, match=r"a list of terms: Problem\(init, \["):
        mixfl.Problem(lambda key: {}, terms)

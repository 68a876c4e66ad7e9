"""The writer of stores: clients in any order, declared columns, bounded memory."""

import tracemalloc

import numpy as np
import pytest

import mixfl
from mixfl.data import writer
from mixfl.errors import MixflError


def contents(path):
    data = mixfl.ClientData.open(path)
    return {data.ids[i]: data.examples.take(data.rows(i)) for i in range(len(data))}


def write(path, declared, *pieces):
    with mixfl.StoreWriter(path, declared) as store:
        for client, columns in zip("aba", pieces, strict=False):
            store.add(client, columns)


@pytest.mark.parametrize("batch_bytes", [1, 60, 32 << 20])
@pytest.mark.parametrize("pending", [2, 4096])
def test_clients_in_any_order_are_brought_together(tmp_path, monkeypatch, batch_bytes, pending):
    monkeypatch.setattr(writer, "BATCH_BYTES", batch_bytes)
    monkeypatch.setattr(writer, "PENDING", pending)
    rng = np.random.default_rng(0)
    expected: dict = {}
    with mixfl.StoreWriter(tmp_path / "s", {"x": "float32 [2]", "t": "uint16 [...]"}) as store:
        for _ in range(40):
            client = "abcde"[rng.integers(5)]
            n = rng.integers(1, 4)
            x = rng.normal(size=(n, 2)).astype(np.float32)
            t = [rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in range(n)]
            store.add(client, {"x": x, "t": t})
            expected.setdefault(client, []).extend(zip(x.tolist(), t, strict=True))
    found = contents(tmp_path / "s")
    assert list(found) == list(expected)  # in the order in which they came
    for client, rows in expected.items():
        assert found[client]["x"].tolist() == [x for x, _ in rows]
        assert found[client]["t_length"].tolist() == [len(t) for _, t in rows]
        assert found[client]["t"].tolist() == [t + [0] * (3 - len(t)) for _, t in rows]
        assert found[client]["t"].dtype == np.uint16
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["clients.arrow", "data.arrow", "s"]


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Rows of 64 KiB in scattered order: 16 MB of data, with at most a few batches in memory."""
    monkeypatch.setattr(writer, "BATCH_BYTES", 1 << 18)
    order = np.random.default_rng(0).permutation(256) % 16
    tracemalloc.start()
    with mixfl.StoreWriter(tmp_path / "s") as store:
        for i, client in enumerate(order):
            store.add(client, {"x": np.full((1, 16384), i, np.float32)})
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "s" / "data.arrow").stat().st_size > 16 << 20
    assert most < 3 << 20
    for client, columns in contents(tmp_path / "s").items():
        assert columns["x"][:, 0].tolist() == np.flatnonzero(order == int(client)).tolist()


def test_small_pieces_take_no_more_than_their_numbers(tmp_path):
    tracemalloc.start()
    with mixfl.StoreWriter(tmp_path / "s", {"y": "int32"}) as store:
        one = np.ones(1, np.int32)
        for i in range(20_000):
            store.add(i % 7, {"y": one})
        most = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert most < 3 << 20
    assert sum(len(c["y"]) for c in contents(tmp_path / "s").values()) == 20_000


def test_declared_columns_take_what_fits(tmp_path):
    declared = {"x": "float32[2]", "n": "uint8", "ok": "bool", "t": "int32 [...]"}
    with mixfl.StoreWriter(tmp_path / "s", declared) as store:
        store.add("a", {"x": [[1, 2]], "n": [7.0], "ok": [1], "t": [[1, 2]]})
        store.add("a", {"t": [[3]], "n": [255], "x": [[0.5, 1]], "ok": [False]})
    found = contents(tmp_path / "s")["a"]
    assert {k: v.tolist() for k, v in found.items()} == {
        "x": [[1, 2], [0.5, 1]], "n": [7, 255], "ok": [True, False], "t": [[1, 2], [3, 0]],
        "t_length": [2, 1],
    }  # fmt: skip
    assert [found[k].dtype for k in ("x", "n", "ok", "t")] == [np.float32, np.uint8, bool, np.int32]


@pytest.mark.parametrize(
    "piece",
    [{"x": [[1, 2, 3]], "n": [1]}, {"x": [[1, 2]], "n": [256]}, {"x": [[1, 2]], "n": [0.5]},
     {"x": [[1, 2]]}, {"x": [[1, 2]], "n": [1], "m": [1]}, {"x": [[1, 2]], "n": [[1], [1, 2]]}],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, piece):
    rows = {k: v * 2 if len(v) == 1 else v for k, v in piece.items()}
    declared = {"x": "float32 [2]", "n": "uint8"}
    with pytest.raises(MixflError, match=r"client 'b' has the columns .* but declared are"):
        write(tmp_path / "s", declared, {"x": [[1, 2]], "n": [1]}, rows)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["int64", "float", "int32 [a]", "str", "int32 [..]", "", 3])
def test_bad_declarations(tmp_path, text):
    with pytest.raises(MixflError, match=r"'x' is declared as .* such as 'int32'"):
        mixfl.StoreWriter(tmp_path / "s", {"x": text})


def test_lists_of_equal_length_by_chance_are_explained(tmp_path):
    with pytest.raises(MixflError, match=r"Declare columns where pieces differ by chance"):
        write(tmp_path / "s", None, {"t": [[1, 2], [3, 4]]}, {"t": [[1], [3, 4]]})
    assert not list(tmp_path.iterdir())


def test_an_error_while_rows_are_grouped_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "lists_at", fail)

    one = {"x": [1.0]}
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "s", None, one, one, one)
    assert not list(tmp_path.iterdir())

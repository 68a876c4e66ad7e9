"""TFF's HDF5 files, made here as they are published; damaged ones, and a stranger's."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from format_files import (
    MUTATION,
    a_store_or_an_error,
    contents,
    fails,
    lists,
    made,
    mutated,
    write,
)
from hypothesis import given, settings

from mixfl.data.formats import hdf5
from mixfl.data.prepare import prepare

h5py = pytest.importorskip("h5py")


def file(path, clients, **options):
    with h5py.File(path, "w") as f:
        for client, columns in clients.items():
            for name, values in columns.items():
                f.create_dataset(f"examples/{client}/{name}", data=values, **options)
        if not clients:
            f.create_group("examples")
    return path


def digits(n, seed=0):
    rng = np.random.default_rng(seed)
    pixels = rng.random((n, 28, 28)).astype(np.float32)
    return {"pixels": pixels, "label": rng.integers(0, 10, n).astype(np.int32)}


def test_emnist(tmp_path):
    (tmp_path / "d").mkdir()
    train = {"f0000_14": digits(3, 1), "f0001_41": digits(2, 2), "f0000_2": digits(1, 3)}
    test = {"f0000_14": digits(1, 4)}
    file(tmp_path / "d" / "fed_emnist_train.h5", train, compression="gzip")
    file(tmp_path / "d" / "fed_emnist_test.h5", test)
    found = made("tff-hdf5", tmp_path / "d", tmp_path / "s", split="official")
    assert found.keys() == {"train", "test"}
    assert list(found["train"]) == ["f0000_2", "f0000_14", "f0001_41"]
    for part, expected in (("train", train), ("test", test)):
        for client, columns in expected.items():
            for name, a in columns.items():
                np.testing.assert_array_equal(found[part][client][name], a)
                assert found[part][client][name].dtype == a.dtype
    both = made("tff-hdf5", tmp_path / "d", tmp_path / "b")  # a client's rows are together
    assert len(both["f0000_14"]["label"]) == 4
    assert len(made("tff-hdf5", tmp_path / "d" / "fed_emnist_train.h5", tmp_path / "t")) == 3


def test_partitions_of_a_file(tmp_path):
    path = file(tmp_path / "train.h5", {"a": digits(20), "b": digits(20, 1)})
    labels = np.concatenate([digits(20)["label"], digits(20, 1)["label"]])
    for how in ("iid:4", "dirichlet:1:4"):
        found = made("tff-hdf5", path, tmp_path / how.replace(":", ""), partition=how)
        got = np.concatenate([columns["label"] for columns in found.values()])
        assert sorted(got.tolist()) == sorted(labels.tolist())
        pixels = {c["pixels"][i].tobytes(): c["label"][i] for c in found.values()
                  for i in range(len(c["label"]))}  # fmt: skip
        for seed in (0, 1):
            for image, label in zip(*digits(20, seed).values(), strict=True):
                assert pixels[image.tobytes()] == label


def test_cifar100(tmp_path):
    columns = {
        "image": np.arange(2 * 32 * 32 * 3).reshape(2, 32, 32, 3).astype(np.uint8),
        "label": np.array([3, 99]), "coarse_label": np.array([1, 19]),
    }  # fmt: skip
    found = made("tff-hdf5", file(tmp_path / "c.h5", {"0": columns}), tmp_path / "s")["0"]
    assert found["image"].dtype == np.uint8
    np.testing.assert_array_equal(found["image"], columns["image"])
    assert (found["label"].tolist(), found["coarse_label"].tolist()) == ([3, 99], [1, 19])


def test_shakespeare(tmp_path):
    texts = {"THE_TRAGEDY_LEAR": ["Howl, howl", "é", "Never"], "A_FOOL": ["Nuncle"]}
    clients = {c: {"snippets": np.array([t.encode() for t in v], object)} for c, v in texts.items()}
    path = file(tmp_path / "s.h5", clients, dtype=h5py.string_dtype())
    done = prepare("tff-hdf5", path, tmp_path / "s", options={"length": 9})
    found = contents(tmp_path / "s")
    shown = {
        c: ["".join(map(chr, row)).rstrip("\0") for row in v["text"]] for c, v in found.items()
    }
    assert shown == {"A_FOOL": ["Nuncle"], "THE_TRAGEDY_LEAR": ["Howl, howl", "Never"]}
    assert done.skipped == {"texts shorter than two characters": 1}
    grouped = made("tff-hdf5", path, tmp_path / "g", length=9, group_examples=3)
    assert len(grouped["A_FOOL..THE_TRAGEDY_LEAR"]["text"]) == 3


def test_other_columns_are_left_out(tmp_path):
    columns = {"x": np.arange(3), "id": np.array([b"a", b"b", b"c"])}
    path = file(tmp_path / "t.h5", {"a": columns, "b": columns})
    done = prepare("tff-hdf5", path, tmp_path / "s", options={})
    assert done.notes == ["the column 'id', which has no numbers, is left out."]
    assert lists(contents(tmp_path / "s"))["a"] == {"x": [0, 1, 2]}


def made_with(change):
    def make(path):
        file(path, {"a": digits(2), "b": digits(2)})
        with h5py.File(path, "a") as f:
            change(f, path)
        return path

    return make


def links(f, path):
    del f["examples/b"]
    f["examples/b"] = h5py.ExternalLink("/etc/other.h5", "/examples/a")


def soft(f, path):
    del f["examples/b"]
    f["examples/b"] = h5py.SoftLink("/examples/a")


def soft_column(f, path):
    del f["examples/b/label"]
    f["examples/b/label"] = h5py.SoftLink("/examples/a/label")


def virtual(f, path):
    del f["examples/b/label"]
    layout = h5py.VirtualLayout((2,), "i4")
    layout[:] = h5py.VirtualSource("/etc/other.h5", "x", (2,))
    f.create_virtual_dataset("examples/b/label", layout)


def external(f, path):
    del f["examples/b/label"]
    f.create_dataset("examples/b/label", (2,), "i4", external=[("/etc/passwd", 0, 8)])


def other_filter(f, path):
    del f["examples/b/label"]
    f.create_dataset("examples/b/label", data=np.arange(2), chunks=(2,), scaleoffset=0)


def huge(f, path):
    del f["examples/b/label"]
    f.create_dataset("examples/b/label", (1 << 40,), "i4", chunks=(1 << 10,))


def huge_chunk(f, path):
    del f["examples/b/label"]
    f.create_dataset("examples/b/label", (2,), "i4", maxshape=(None,), chunks=(1 << 28,))


def many_names(f, path):
    group = f["examples"].create_group("zeros")
    group.create_dataset("pixels", (100_000, 28, 28), "f4", chunks=(100, 28, 28))
    group.create_dataset("label", (100_000,), "i4", chunks=(100,))


def unequal(f, path):
    del f["examples/b/label"]
    f["examples/b/label"] = np.arange(3)


def no_group(f, path):
    del f["examples/b"]
    f["examples/b"] = np.arange(3)


STRANGE = {
    links: "'b' is a link to another place", soft: "'b' is a link", no_group: "'b' is not a group",
    soft_column: "'label' is a link", virtual: "has its numbers in other files",
    external: "has its numbers in other files", other_filter: "needs other programs",
    huge: "more than 536,870,912 bytes", huge_chunk: "more than 536,870,912 bytes",
    many_names: "more than 200 times its bytes", unequal: "columns of different lengths",
}  # fmt: skip


@pytest.mark.parametrize("change", STRANGE)
def test_a_stranger_s_file(tmp_path, change):
    path = made_with(change)(tmp_path / "t.h5")
    fails("tff-hdf5", path, tmp_path, "t.h5", STRANGE[change])


def test_a_long_text_that_many_rows_share(tmp_path, monkeypatch):
    monkeypatch.setattr(hdf5, "ROWS", 5000)
    texts = np.array([b"x" * 1000] * 9, object)
    path = file(tmp_path / "t.h5", {"a": {"snippets": texts}}, dtype=h5py.string_dtype())
    fails("tff-hdf5", path, tmp_path, "a client's texts have more than 5,000 bytes")


def test_damaged_files(tmp_path):
    good = file(tmp_path / "g.h5", {"a": digits(2)}).read_bytes()
    fails("tff-hdf5", write(tmp_path / "t.h5", b"BZh91AY"), tmp_path, "another kind of file")
    fails("tff-hdf5", write(tmp_path / "t.h5", good[: len(good) // 2]), tmp_path, "is damaged")
    fails("tff-hdf5", file(tmp_path / "e.h5", {}), tmp_path, "no usable rows")
    with h5py.File(tmp_path / "n.h5", "w") as f:
        f["other"] = np.arange(3)
    fails("tff-hdf5", tmp_path / "n.h5", tmp_path, "it has no 'examples'")


def test_without_h5py(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    path = write(tmp_path / "t.h5", b"\x89HDF\r\n\x1a\n")
    fails("tff-hdf5", path, tmp_path, "pip install 'mixfl[hdf5]'")


@given(changes=MUTATION)
@settings(max_examples=40)
def test_fuzz(changes):
    with tempfile.TemporaryDirectory() as folder:
        columns = {"x": np.arange(20).reshape(10, 2), "y": np.arange(10)}
        path = file(Path(folder) / "t.h5", {"a": columns, "b": columns}, compression="gzip")
        data = path.read_bytes()
    a_store_or_an_error(
        "tff-hdf5", "t.h5", mutated(data, [(k, 17 * at, n) for k, at, n in changes])
    )

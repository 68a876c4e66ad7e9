"""Client data from other libraries' objects. All data is made here, in memory."""

import io

import numpy as np
import pytest
from memory_maps import in_map_of
from PIL import Image

import mixfl
from mixfl.errors import MixflError

USERS = ["bo", "al", "bo", "cy", "al", "bo"]
TOKENS = [[1], [2, 3], [], [4, 5, 6], [7], [8]]


def held(data, name):
    return {
        data.ids[i]: data.examples.take(data.rows(i))[name].tolist() for i in range(len(data))
    }  # fmt: skip


def padded(rows):
    return [row + [0] * (3 - len(row)) for row in rows]


EXPECTED = {
    "y": {"al": [1, 4], "bo": [0, 2, 5], "cy": [3]},
    "tokens": {"al": padded([[2, 3], [7]]), "bo": padded([[1], [], [8]]), "cy": [[4, 5, 6]]},
    "x": {"al": [[1, 1], [4, 4]], "bo": [[0, 0], [2, 2], [5, 5]], "cy": [[3, 3]]},
}
COLUMNS = {"y": list(range(6)), "tokens": TOKENS, "x": [[float(i), float(i)] for i in range(6)]}


def assert_expected(data, *names):
    for name in names:
        assert held(data, name) == EXPECTED[name]
        assert data.examples.columns[name].dtype == (np.float32 if name == "x" else np.int32)


# pandas


@pytest.fixture
def pandas():
    return pytest.importorskip("pandas")


def test_a_frame(pandas):
    frame = pandas.DataFrame({"user": USERS, **COLUMNS}, index=[5, 5, 1, 2, 3, 4])
    assert_expected(mixfl.ClientData.from_pandas(frame, client="user"), *COLUMNS)
    frame["note"] = "text"
    frame["y"] = frame["y"].astype("Int64")
    frame["user"] = frame["user"].astype("category")
    data = mixfl.ClientData.from_pandas(frame, "user", columns=["y"])
    assert list(data.examples.columns) == ["y"]
    assert_expected(data, "y")
    with pytest.raises(MixflError, match=r"column 'note' has dtype .* Turn text and categories"):
        mixfl.ClientData.from_pandas(frame, "user")


@pytest.mark.parametrize(
    ("change", "client", "columns", "words"),
    [({}, "usr", None, "Did you mean 'user'"), ({}, "user", ["z"], "unknown column of the frame"),
     ({"y": [None, 1.0]}, "user", None, "'y' has missing values: remove such rows"),
     ({"user": ["a", None]}, "user", None, "'user' has missing values")],
)  # fmt: skip
def test_bad_frames(pandas, change, client, columns, words):
    frame = pandas.DataFrame({"user": ["a", "b"], "y": [1, 2], **change})
    with pytest.raises(MixflError, match=words):
        mixfl.ClientData.from_pandas(frame, client, columns)
    with pytest.raises(MixflError, match="expected a frame"):
        mixfl.ClientData.from_pandas([1, 2], "user")


# Hugging Face


@pytest.fixture
def hf():
    return pytest.importorskip("datasets")


def on_disk(hf, path, columns):
    """A memory-mapped data set."""
    hf.Dataset.from_dict(columns).save_to_disk(str(path))
    return hf.load_from_disk(str(path))


def test_a_data_set_with_chosen_rows(hf, tmp_path):
    data = on_disk(hf, tmp_path / "d", {"user": USERS, **COLUMNS})
    assert_expected(mixfl.ClientData.from_huggingface(data, client="user"), *COLUMNS)
    order = np.random.default_rng(0).permutation(6)
    moved = data.select(order).select(np.argsort(order))  # as before, through an index
    assert moved._indices is not None
    assert_expected(mixfl.ClientData.from_huggingface(moved, "user", ["tokens", "y"]), "y")
    few = mixfl.ClientData.from_huggingface(data.filter(lambda row: row["user"] != "bo"), "user")
    assert held(few, "tokens") == {"al": padded([[2, 3], [7]]), "cy": [[4, 5, 6]]}
    part = mixfl.ClientData.from_huggingface(data.select(range(1, 5)), "user")  # a slice
    assert held(part, "tokens") == {
        "al": padded([[2, 3], [7]]), "bo": [[0, 0, 0]], "cy": [[4, 5, 6]]
    }  # fmt: skip


def test_what_is_on_disk_stays_there(hf, tmp_path):
    import pyarrow as pa

    n = 1 << 18
    data = on_disk(hf, tmp_path / "d", {"user": np.arange(n) % 9, "x": np.zeros((n, 4), "f4")})
    before = pa.total_allocated_bytes()
    clients = mixfl.ClientData.from_huggingface(data, client="user")
    assert pa.total_allocated_bytes() - before < n * 16  # the clients' numbers, not the data
    files = list((tmp_path / "d").glob("*.arrow"))
    for part in clients.examples.columns["x"].parts:
        assert any(in_map_of(file, part) for file in files)
    assert clients.sizes().sum() == n


def test_features_of_data_sets(hf):
    images = [Image.new("L", (4, 5), i) for i in range(6)]
    colors = [Image.new("RGB", (2, 3), (i, 2 * i, 3 * i)) for i in range(6)]
    features = hf.Features({
        "user": hf.Value("int32"), "grid": hf.Array2D((2, 3), "uint8"), "gray": hf.Image(),
        "color": hf.Image(), "label": hf.ClassLabel(names=["no", "yes"]), "ok": hf.Value("bool"),
        "pair": hf.Sequence(hf.Value("float32"), length=2),
    })  # fmt: skip
    grid = np.arange(36).reshape(6, 2, 3)
    data = hf.Dataset.from_dict(
        {"user": [0, 0, 1, 1, 2, 2], "grid": grid, "gray": images, "color": colors,
         "label": [0, 1] * 3, "ok": [True, False] * 3, "pair": [[i, i] for i in range(6)]},
        features=features,
    )  # fmt: skip
    clients = mixfl.ClientData.from_huggingface(data, client="user")
    found = clients.examples.all()
    assert found["grid"].tolist() == grid.tolist()
    assert found["grid"].dtype == found["gray"].dtype == np.uint8
    assert found["gray"].shape == (6, 5, 4)
    assert found["gray"][:, 0, 0].tolist() == list(range(6))
    assert found["color"].shape == (6, 3, 2, 3)
    assert found["color"][5, 0, 0].tolist() == [5, 10, 15]
    assert found["label"].tolist() == [0, 1] * 3
    assert found["ok"].tolist() == [True, False] * 3
    assert found["pair"].tolist() == [[i, i] for i in range(6)]


def test_bad_data_sets(hf):
    data = hf.Dataset.from_dict({"user": USERS, "y": list(range(6)), "t": USERS, "n": [None] * 6})
    cases = [
        (data, "usr", None, "Did you mean 'user'"),
        (data, "user", ["t"], "'t' has the type string: expected numbers"),
        (data, "user", ["y", "z"], "unknown column 'z'"),
        (data, "n", ["y"], "the client column has missing values"),
        (data, "user", ["n"], "'n' has missing values"),
        (hf.DatasetDict({"train": data}), "user", None, r"data\['train'\]"),
        (data.to_iterable_dataset(), "user", None, "StoreWriter"),
        (data.with_transform(lambda rows: rows), "user", ["y"], "apply it with map"),
        ([1, 2], "user", None, "expected a datasets.Dataset, got list"),
    ]
    for given, client, columns, words in cases:
        with pytest.raises(MixflError, match=words):
            mixfl.ClientData.from_huggingface(given, client, columns)
    content = io.BytesIO()
    Image.new("L", (9, 9)).save(content, "PCX")  # not among the kinds that are read
    for images, words in (
        ([{"bytes": content.getvalue(), "path": None}], "Pillow finds none of"),
        ([Image.new("L", (4, 5)), Image.new("L", (5, 4))], "in row 1 has the shape"),
    ):
        given = hf.Dataset.from_dict({"user": [0] * len(images), "i": images})
        given = given.cast_column("i", hf.Image())
        with pytest.raises(MixflError, match=words):
            mixfl.ClientData.from_huggingface(given, "user").examples.all()


# flwr-datasets


class Partitioner:
    """With the members of flwr-datasets' partitioners."""

    partition_id_to_natural_id = {0: "north", 1: "south", 2: "none"}
    num_partitions = 3

    def __init__(self, dataset):
        self.dataset = dataset

    def load_partition(self, i):
        return self.dataset.select([[4, 0, 1], range(2, 6), []][i])


def test_partitions(hf, tmp_path):
    data = on_disk(hf, tmp_path / "d", COLUMNS)
    clients = mixfl.ClientData.from_flower(Partitioner(data))
    assert held(clients, "y") == {"north": [4, 0, 1], "south": [2, 3, 4, 5]}
    assert held(clients, "tokens")["north"] == padded([[7], [1], [2, 3]])
    assert clients.dropped == 1
    with pytest.raises(MixflError, match="got list"):
        mixfl.ClientData.from_flower([1])
    with pytest.raises(MixflError, match="split is for a FederatedDataset"):
        mixfl.ClientData.from_flower(Partitioner(data), split="train")


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "natural", "shard", "linear"])
def test_partitioners_of_flwr_datasets(hf, kind):
    flwr = pytest.importorskip("flwr_datasets.partitioner")
    make = {
        "iid": lambda: flwr.IidPartitioner(5),
        "dirichlet": lambda: flwr.DirichletPartitioner(5, "label", 0.5, min_partition_size=1),
        "natural": lambda: flwr.NaturalIdPartitioner("label"),
        "shard": lambda: flwr.ShardPartitioner(5, "label", num_shards_per_partition=2),
        "linear": lambda: flwr.LinearPartitioner(5),
    }
    partitioner = make[kind]()
    with pytest.raises(MixflError, match="has no data set"):
        mixfl.ClientData.from_flower(partitioner)
    label = np.random.default_rng(0).integers(0, 5, 200)
    partitioner.dataset = hf.Dataset.from_dict({"row": np.arange(200), "label": label})
    clients = mixfl.ClientData.from_flower(partitioner)
    assert len(clients) == 5
    for i in range(5):
        expected = partitioner.load_partition(i)["row"]
        assert clients.examples.take(clients.rows(i))["row"].tolist() == list(expected)
    assert len(clients.examples.columns["row"]) <= 400  # the table is there once, or in slices


def test_a_federated_dataset(hf, tmp_path):
    flwr = pytest.importorskip("flwr_datasets")
    for split in ("train", "test"):
        rows = "".join(f"{i},{i % 3}\n" for i in range(30))
        (tmp_path / f"{split}.csv").write_text("x,label\n" + rows)
    files = {"data_files": {s: str(tmp_path / f"{s}.csv") for s in ("train", "test")}}
    fds = flwr.FederatedDataset(
        dataset="csv", partitioners={"train": 3, "test": 2}, cache_dir=str(tmp_path / "c"), **files
    )
    with pytest.raises(MixflError, match="name one of the splits train, test"):
        mixfl.ClientData.from_flower(fds)
    assert len(mixfl.ClientData.from_flower(fds, split="train")) == 3
    assert mixfl.ClientData.from_flower(fds, split="test").sizes().tolist() == [15, 15]


# PyTorch


class Items:
    """A map-style data set."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_data_sets_of_pytorch(torch):
    x, y = torch.arange(12.0).reshape(6, 2) // 2, torch.arange(6)
    whole = torch.utils.data.TensorDataset(x, y)
    plain = Items(*((x[i], int(y[i])) for i in range(6)))
    dicts = Items(*({"x": x[i], "y": y[i], "user": USERS[i]} for i in range(6)))
    lists = Items(*({"tokens": torch.tensor(TOKENS[i]), "y": i} for i in range(6)))
    shifted = torch.utils.data.Subset(whole, [0, 1, 2, 3, 4, 5])
    for data in (whole, plain, shifted):
        assert_expected(mixfl.ClientData.from_torch(data, client=USERS), "x", "y")
    assert_expected(mixfl.ClientData.from_torch(dicts, client="user"), "x", "y")
    assert_expected(mixfl.ClientData.from_torch(dicts, client="user", columns=["y"]), "y")
    assert_expected(mixfl.ClientData.from_torch(lists, client=USERS), "tokens", "y")
    parts = {c: torch.utils.data.Subset(plain, [i for i in range(6) if USERS[i] == c])
             for c in ("al", "bo", "cy")}  # fmt: skip
    assert_expected(mixfl.ClientData.from_torch(parts), "x", "y")
    tensors = [torch.utils.data.TensorDataset(x[:2], y[:2]), Items(),
               torch.utils.data.TensorDataset(x[2:], y[2:])]  # fmt: skip
    data = mixfl.ClientData.from_torch(tensors, columns=("x", "y"))
    assert (held(data, "y"), data.dropped) == ({0: [0, 1], 2: [2, 3, 4, 5]}, 1)


def test_images_and_single_values():
    data = Items(*(Image.new("L", (3, 2), i) for i in range(4)))
    found = mixfl.ClientData.from_torch(data, client=[0, 0, 1, 1]).examples.all()["x"]
    assert found.shape == (4, 2, 3)
    assert found[:, 0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("data", "given", "words"),
    [(Items((1, 2)), {}, "name each item's client"), (iter([1]), {"client": [0]}, "got list_iter"),
     (Items((1, 2, 3)), {"client": [0]}, "items have 3 fields: name them"),
     (Items((1, 2), (1,)), {"client": [0, 0]}, "different numbers of fields"),
     ([Items((1, 2))], {"client": [0]}, "there is a data set for each client"),
     (Items({"x": 1}), {"client": "user"}, "unknown field of the items 'user'"),
     (Items({"x": 1}, {"y": 1}), {"client": [0, 0]}, "unknown field of the items 'x'"),
     (Items(("text", 1)), {"client": [0]}, "Turn text and categories")],
)  # fmt: skip
def test_bad_items(data, given, words):
    with pytest.raises(MixflError, match=words):
        mixfl.ClientData.from_torch(data, **given)

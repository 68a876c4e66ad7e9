"""Partitions in memory: every row once, with the skew that was asked for; and their picture."""

import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import mixfl
from mixfl.cli.data import data as data_command
from mixfl.data.picture import picture
from mixfl.data.prepare import prepare
from mixfl.errors import MixflError

N = 1200
LABELS = np.random.default_rng(0).integers(0, 6, N)
DATA = {"row": np.arange(N), "y": LABELS}
HOW = ["iid:20", "dirichlet:0.5:20", "shards:2:20", "labels:2:20", "lognormal:1:20", "sizes:0.7:20"]


def held(clients):
    """[clients, labels]"""
    labels = [clients.examples.take(clients.rows(i))["y"] for i in range(len(clients))]
    return np.array([np.bincount(y, minlength=6) for y in labels])


@pytest.mark.parametrize("how", HOW)
def test_every_row_has_one_client_and_the_seed_decides(how):
    clients = mixfl.partition(DATA, how, label="y", seed=3, least=1)
    assert len(clients) == 20
    assert sorted(clients.examples.all()["row"].tolist()) == list(range(N))
    same = [mixfl.partition(DATA, how, label="y", seed=s, least=1) for s in (3, 4)]
    rows = [c.examples.all()["row"].tolist() for c in (clients, *same)]
    assert rows[0] == rows[1] != rows[2]
    # Whatever the data is in: a store's rows are not copied.
    again = mixfl.partition(clients.examples.subset(np.argsort(rows[0])), how, seed=3, least=1)
    assert again.examples.all()["row"].tolist() == rows[0]
    assert again.examples.columns["row"] is clients.examples.columns["row"]


def test_the_skew_is_what_was_asked_for():
    one = {how.split(":")[0]: mixfl.partition(DATA, how, seed=0, least=1) for how in HOW}
    assert one["iid"].sizes().tolist() == [60] * 20
    assert (held(one["iid"]) > 0).all()
    assert one["shards"].sizes().tolist() == [60] * 20
    assert ((held(one["shards"]) > 0).sum(1) <= 4).all()  # a shard may span two labels
    assert ((held(one["labels"]) > 0).sum(1) == 2).all()
    holders = (held(one["labels"]) > 0).sum(0)
    assert holders.min() >= 6
    assert holders.sum() == 40
    assert np.log(one["lognormal"].sizes()).std() == pytest.approx(1, abs=0.4)
    assert one["sizes"].sizes().std() > 30
    overall = np.bincount(LABELS) / N
    large = one["lognormal"].sizes().argmax()
    share = held(one["lognormal"])[large] / one["lognormal"].sizes()[large]
    assert np.abs(share - overall).max() < 0.1


def test_dirichlet_s_alpha():
    """E[share^2] = (alpha + 1) / (n alpha + 1) / n for a symmetric Dirichlet over n clients."""
    many = {"y": np.repeat(np.arange(40), 1000)}
    for alpha in (0.2, 5.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clients = mixfl.partition(many, f"dirichlet:{alpha}:10")
        shares = np.array([
            np.bincount(clients.examples.take(clients.rows(i))["y"], minlength=40) / 1000
            for i in range(len(clients))
        ])  # fmt: skip
        expected = (alpha + 1) / (10 * alpha + 1)
        assert (shares**2).sum(0).mean() == pytest.approx(expected, rel=0.15)


def test_empty_clients_are_said():
    with pytest.warns(UserWarning, match=r"left (\d+) of 400 clients without an example") as found:
        clients = mixfl.partition(DATA, "dirichlet:0.05:400")
    assert "least=1" in str(found[0].message)
    assert found[0].filename == __file__
    assert clients.dropped == 400 - len(clients) > 0
    assert f"left {clients.dropped} of 400" in str(found[0].message)
    assert (clients.sizes() > 0).all()
    assert mixfl.Federated(len, clients).clients.dropped == clients.dropped
    with pytest.raises(MixflError, match="fewer than 1 of 1,200 rows in each of 200 draws"):
        mixfl.partition(DATA, "dirichlet:0.05:400", least=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mixfl.partition(DATA, "dirichlet:1:30", least=5).sizes().min() >= 5


def test_prepare_says_how_many_clients_are_empty(tmp_path):
    rows = "".join(f"{i},{i % 2}\n" for i in range(30))
    (tmp_path / "t.csv").write_text("x,label\n" + rows)
    done = prepare("table", tmp_path / "t.csv", tmp_path / "s",
                   options={"partition": "dirichlet:0.1:50"})  # fmt: skip
    left = len(mixfl.ClientData.open(tmp_path / "s"))
    assert (
        f"skipped: {50 - left} clients that the partition left without an example" in done.lines()
    )
    assert any("Use a larger parameter" in line for line in done.lines())
    full = prepare("table", tmp_path / "t.csv", tmp_path / "f", options={"partition": "iid:5"})
    assert len(full.lines()) == 1


def test_by_a_column():
    clients = mixfl.partition({"x": np.arange(5), "region": [7, 3, 7, 9, 3]}, "column:region")
    assert list(clients.ids) == [3, 7, 9]
    assert clients.examples.all()["x"].tolist() == [1, 4, 0, 2, 3]


@pytest.mark.parametrize(
    ("how", "words"),
    [("iid", "expected iid:CLIENTS"), ("iid:0", "expected iid:CLIENTS"),
     ("dirichlet:100", "expected dirichlet:PARAMETER:CLIENTS"), ("dirichlet:-1:9", "positive"),
     ("shards:1.5:9", "positive"), ("dirichlt:1:9", "Did you mean 'dirichlet'"),
     ("shards:700:2", "1,400 shards need as many rows"), ("labels:7:9", "can't share 6 labels"),
     ("labels:1:5", "can't share 6 labels"), ("column:no", "no is among row, y")],
)  # fmt: skip
def test_bad_partitions(how, words):
    with pytest.raises(MixflError, match=words):
        mixfl.partition(DATA, how)


def test_labels_are_needed():
    with pytest.raises(MixflError, match="none is among row: name it with label"):
        mixfl.partition({"row": np.arange(9)}, "dirichlet:1:3")
    with pytest.raises(MixflError, match=r"'x' has the shape \[2\]"):
        mixfl.partition({"x": np.zeros((9, 2))}, "shards:1:3", label="x")


# The picture


def drawn(figure):
    """The axes' names for x."""
    return [a.get_xlabel() for a in figure.axes]


def test_few_clients_have_a_bar_each():
    clients = mixfl.partition(DATA, "labels:2:20", least=1)
    axes = picture(clients).axes[0]
    heights = np.zeros(20)
    for bar in axes.patches:
        heights[round(bar.get_x() + bar.get_width() / 2)] += bar.get_height()
    assert heights.tolist() == clients.sizes().tolist()
    assert len(axes.get_legend().get_texts()) == 6


def test_many_clients_are_a_heat_map():
    clients = mixfl.partition(DATA, "iid:600")
    figure = picture(clients, label="y")
    assert "most frequent label" in drawn(figure)[0]
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (6, 480)
    assert image.sum() == pytest.approx(480)  # shares of a client add up to 1
    totals = next(a for a in figure.axes if a.get_xlabel() == "examples")
    assert [bar.get_width() for bar in totals.patches] == np.bincount(LABELS).tolist()


def test_rare_labels_are_drawn_together():
    clients = mixfl.ClientData.from_arrays({"y": np.arange(900) % 90}, client=np.arange(900) // 9)
    ticks = [t.get_text() for t in picture(clients).axes[0].get_yticklabels()]
    assert len(ticks) == 24
    assert ticks[-1] == "67 others"


def test_without_labels_sizes_are_drawn():
    clients = mixfl.ClientData.from_arrays({"x": np.arange(60.0)}, client=np.arange(60) // 3)
    assert drawn(picture(clients)) == ["examples of a client"]
    for label, words in (("x", "expected one whole number"), ("z", "no column 'z'")):
        with pytest.raises(MixflError, match=words):
            picture(clients, label=label)


def test_info_draws(tmp_path):
    clients = mixfl.partition({"label": LABELS}, "dirichlet:0.5:50", least=1)
    clients.write(tmp_path / "store")
    words = ["info", str(tmp_path / "store"), "--plot", str(tmp_path / "who.png")]
    done = CliRunner().invoke(data_command, words)
    assert done.exit_code == 0, done.output
    assert done.output.endswith(f"drawn: {tmp_path / 'who.png'}\n")
    with Image.open(tmp_path / "who.png") as image:
        assert image.size == (1500, 840)
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50
    for bad in ("who.xyz", "no/who.png"):
        with pytest.raises(MixflError, match="could not be written"):
            picture(clients, tmp_path / bad)

"""Trained models in other formats: what is written predicts the same. Predictions and cards."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_problem
from run_folders import TINY, cli

import mixfl
from mixfl.errors import MixflError
from mixfl.export import formats
from mixfl.export.card import card
from mixfl.export.tables import read_columns, write_columns
from mixfl.export.trained import Trained, trained

FILE = """
import dataclasses
import jax
import tiny_problem

def predict(params, batch):
    return {"p": jax.nn.sigmoid(batch["x"] @ params["w"] + params["b"])}

problem = dataclasses.replace(tiny_problem.problem, predict=predict)
none = dataclasses.replace(tiny_problem.problem)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of a user's own file, whose problem predicts."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        words = ["run", f"{folder}/own.py:problem", "--algorithm", "fedavg", "--rounds", 2]
        assert cli(patch, *words, "--out", folder / "run") == 0
    return folder


def by_hand(run, x):
    params = mixfl.load(run).params
    return 1 / (1 + np.exp(-(x @ params["w"] + params["b"])))


X = np.random.default_rng(0).normal(size=(2500, 4)).astype(np.float32)


# Predictions


@pytest.mark.parametrize("ending", [".npz", ".parquet", ".jsonl", ".csv"])
def test_predict_writes_all_rows(ending, made, tmp_path, monkeypatch):
    rows = tmp_path / "x.npz"
    np.savez(rows, x=X, other=np.zeros(len(X)))
    out = tmp_path / f"y{ending}"
    assert cli(monkeypatch, "predict", made / "run", "--data", rows, "--out", out) == 0
    found = read_columns(out)
    assert list(found) == ["p"]
    np.testing.assert_allclose(found["p"], by_hand(made / "run", X), atol=1e-6)


@pytest.mark.parametrize("ending", [".npz", ".parquet", ".jsonl"])
def test_predict_reads_what_it_writes(ending, made, tmp_path, monkeypatch, capsys):
    rows = tmp_path / f"x{ending}"
    write_columns({"x": X[:12]}, rows)
    np.testing.assert_array_equal(read_columns(rows)["x"], X[:12])
    assert cli(monkeypatch, "predict", made / "run", "--data", rows) == 0
    said = capsys.readouterr().out
    assert f"{by_hand(made / 'run', X[:1])[0]:.4g}"[:5] in said
    assert "2 more rows" in said


def test_predict_reads_a_store(made, tmp_path):
    store = tmp_path / "store"
    mixfl.ClientData.from_arrays({"x": X[:6]}, client=np.arange(6) // 2).write(store)
    assert read_columns(store)["x"].shape == (6, 4)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.npz", None, "there is no file"),
        ("x.txt", b"1", "expected a client store"),
        ("x.npz", b"no", "can't be read"),
        ("x.csv", b"x,y\n1,\n", "the column y has 1 empty cells"),
        ("x.jsonl", b'{"x": [1]}\n{"x": [1, 2]}\n', "pad its rows"),
        ("x.csv", b"z\n1\n", "needs the column 'x'; the data has z"),
    ],
)
def test_bad_data(name, content, words, made, tmp_path, monkeypatch, capsys):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli(monkeypatch, "predict", made / "run", "--data", tmp_path / name) == 2
    assert words in capsys.readouterr().err


def test_pickles_are_not_read(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.array([{}], dtype=object))
    with pytest.raises(MixflError, match="can't be read"):
        read_columns(tmp_path / "x.npz")


def test_a_problem_without_predict_is_told_what_to_add(made, tmp_path, monkeypatch, capsys):
    np.savez(tmp_path / "x.npz", x=X)
    words = ["predict", made / "run", "--data", tmp_path / "x.npz"]
    assert cli(monkeypatch, *words, "--problem", f"{made}/own.py:none") == 2
    assert "predict=predict" in capsys.readouterr().err
    out = tmp_path / "m.onnx"
    given = ["--to", "onnx", "--out", out, "--problem", f"{made}/own.py:none"]
    assert cli(monkeypatch, "export", made / "run", *given) == 2
    assert not out.exists()


def test_a_run_without_a_model_and_one_of_a_program(tmp_path, monkeypatch, capsys):
    np.savez(tmp_path / "x.npz", x=X)
    made = dataclasses.replace(tiny_problem.problem)
    mixfl.train(made, "fedavg", rounds=1, out=tmp_path / "run")
    words = ["predict", tmp_path / "run", "--data", tmp_path / "x.npz"]
    assert cli(monkeypatch, *words) == 2
    assert "--problem path.py:problem" in capsys.readouterr().err
    (tmp_path / "run/model.safetensors").unlink()
    assert cli(monkeypatch, *words, "--problem", f"{TINY}:problem") == 2
    assert "has no model" in capsys.readouterr().err


def test_outputs_must_have_a_row_per_example():
    broken = dataclasses.replace(tiny_problem.problem, predict=lambda p, b: jnp.sum(b["x"]))
    model = Trained(None, {}, broken, tiny_problem.init(jax.random.key(0)), [])
    with pytest.raises(MixflError, match="a row per example"):
        model.outputs({"x": X})
    with pytest.raises(MixflError, match="no row"):
        model.outputs({"x": X[:0]})
    with pytest.raises(MixflError, match="expected a function"):
        dataclasses.replace(tiny_problem.problem, predict=1)


def test_predict_takes_state_and_frozen():
    def loss(params, batch, state, frozen):
        return (batch["x"] @ params["w"] * frozen["a"] - batch["y"]) ** 2, state

    def predict(params, batch, state, frozen):
        return batch["x"] @ params["w"] * frozen["a"] + state["m"]

    clients = mixfl.ClientData.from_arrays({"x": X[:8], "y": X[:8, 0]}, client=np.arange(8) // 2)
    problem = mixfl.Problem(
        lambda key: {"w": jnp.ones(4)}, [mixfl.Federated(loss, clients)],
        frozen={"a": np.float32(3)}, state={"m": np.float32(5)}, predict=predict,
    )  # fmt: skip
    model = Trained(None, {}, problem, problem.init(jax.random.key(0)), [])
    found = model.outputs({"x": X[:8]})["output"]
    np.testing.assert_allclose(found, 3 * X[:8].sum(1) + 5, rtol=1e-5)


# Formats


ONNX = pytest.param("onnx", marks=pytest.mark.system)  # imports for seconds


@pytest.mark.parametrize("to", ["torch", ONNX, "jax-export", "safetensors"])
def test_what_is_exported_predicts_the_same(to, made, tmp_path, monkeypatch, capsys):
    pytest.importorskip({"torch": "torch", "onnx": "jax2onnx"}.get(to, "jax"))
    out = tmp_path / f"m{formats.ENDINGS[to]}"
    assert cli(monkeypatch, "export", made / "run", "--to", to, "--out", out) == 0
    assert "Checked: the outputs for 8 examples agree" in capsys.readouterr().out
    assert "## Metrics" in (tmp_path / f"{out.name}.md").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {out.name, f"{out.name}.md"}
    expected = by_hand(made / "run", X[:5])
    if to == "torch":
        import torch

        read = torch.load(out, weights_only=True)
        found = torch.sigmoid(torch.tensor(X[:5]) @ read["w"] + read["b"]).numpy()
    elif to == "safetensors":
        from safetensors.numpy import load_file

        read = load_file(out)
        found = 1 / (1 + np.exp(-(X[:5] @ read["w"] + read["b"])))
    elif to == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(out))
        (found,) = session.run(["p"], {"x": X[:5]})  # 5 rows; it was checked with 8
    else:
        program = jax.export.deserialize(bytearray(out.read_bytes()))
        found = program.call({"x": X[:5]})["p"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("factor", "words"),
    [(1.01, r"differ from the model's by 0\.01"), (np.nan, "not finite"), (np.inf, "not finite")],
)
def test_what_does_not_agree_is_not_written(factor, words, made, tmp_path, monkeypatch):
    model = trained(made / "run")

    def wrong(model, path, columns):
        path.write_bytes(b"x")
        return lambda batch: {"p": factor * model.outputs(batch)["p"]}

    monkeypatch.setitem(formats.WRITERS, "torch", wrong)
    with pytest.raises(MixflError, match=words):
        formats.export(model, "torch", tmp_path / "m.pt")
    with pytest.raises(MixflError, match="there is no folder"):
        formats.export(model, "torch", tmp_path / "none" / "m.pt")
    assert list(tmp_path.iterdir()) == []


def test_arrays_that_were_not_written_as_they_are(made, tmp_path):
    model = trained(made / "run")
    arrays = {k: np.array(a) for k, a in formats._arrays(model.model).items()}
    arrays["w"][0] += 1
    with pytest.raises(MixflError, match="w was not written"):
        formats._same(model, arrays, tmp_path)


def test_the_runs_own_model_is_not_overwritten(made, monkeypatch, capsys):
    before = (made / "run/model.safetensors").read_bytes()
    words = ["export", made / "run", "--to", "safetensors", "--out", made / "run/model.safetensors"]
    assert cli(monkeypatch, *words) == 2
    assert (made / "run/model.safetensors").read_bytes() == before


def test_a_batch_of_one_size_only_is_refused(made, tmp_path):
    def predict(params, batch):
        return batch["x"].reshape(len(batch["x"]), -1) @ params["w"]

    own = dataclasses.replace(tiny_problem.problem, predict=predict)
    model = dataclasses.replace(trained(made / "run"), problem=own)
    with pytest.raises(MixflError, match=r"x\.shape\[0\], not len\(x\)"):
        formats.export(model, "jax-export", tmp_path / "m")


def test_a_pytorch_model(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("mixfl.pytorch")
    model = mixfl.pytorch.Model(lambda: torch.nn.Sequential(torch.nn.Linear(4, 1)))
    loss = model.loss(lambda m, b: (m(b["x"])[:, 0] - b["y"]) ** 2)
    predict = model.predict(lambda m, b: {"y": m(b["x"])[:, 0]})
    clients = mixfl.ClientData.from_arrays({"x": X[:8], "y": X[:8, 0]}, client=np.arange(8) // 2)
    problem = mixfl.Problem(model.init, [mixfl.Federated(loss, clients)], predict=predict)
    params = {k: np.asarray(v) for k, v in model.init(jax.random.key(1)).items()}
    made = Trained(tmp_path, {}, problem, params, [])
    checked = formats.export(made, "torch", tmp_path / "m.pt")
    assert checked.rows == 8
    again = torch.nn.Sequential(torch.nn.Linear(4, 1))
    again.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    with torch.no_grad():
        found = again(torch.tensor(X[:8]))[:, 0].numpy()
    np.testing.assert_allclose(found, made.outputs({"x": X[:8]})["y"], rtol=1e-6)
    with pytest.raises(MixflError, match="in PyTorch"):
        formats.export(made, "onnx", tmp_path / "m.onnx")


@pytest.mark.system
@pytest.mark.parametrize(
    ("task", "options", "output"),
    [
        ("smile", ["image_size=8", "clients=10", "per_client=6"], "smiling"),
        ("text", ["clients=5", "per_client=4", "articles=30", "length=12"], "log_probs"),
        ("movie", ["users=20", "movies=50", "per_user=20"], "scores"),
    ],
)
def test_the_tasks(task, options, output, tmp_path, monkeypatch):
    given = [w for o in [*options, "cohort_size=2"] for w in ("--set", o)]
    words = ["run", task, "--algorithm", "fedavg", "--rounds", 1, *given]
    assert cli(monkeypatch, *words, "--out", tmp_path / "run") == 0
    model = trained(tmp_path / "run")
    outputs = model.outputs(model.some(5))[output]
    assert len(outputs) == 5
    if task == "smile":
        assert ((outputs > 0) & (outputs < 1)).all()
    elif task == "text":
        np.testing.assert_allclose(np.exp(outputs).sum(1), 1, rtol=1e-5)
        ids = model.some(5)["text"]
        assert model.outputs({"text": np.pad(ids, ((0, 0), (0, 3)))})[output] == pytest.approx(
            outputs, abs=1e-5
        )  # padding does not count
    else:
        assert outputs.max() <= 1 + 1e-6
    for to in ("jax-export", "onnx"):
        if to == "onnx":
            pytest.importorskip("jax2onnx")
        assert formats.export(model, to, tmp_path / to).rows == 8


def test_not_installed(made, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(MixflError, match=r"pip install 'mixfl\[onnx\]'"):
        formats.export(trained(made / "run"), "onnx", tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(MixflError, match=r"--to jax-export: .*pip install flatbuffers"):
        formats.export(trained(made / "run"), "jax-export", tmp_path / "m")


# Cards


def test_a_card(made, tmp_path, monkeypatch):
    assert cli(monkeypatch, "card", made / "run", "--out", tmp_path / "c.md") == 0
    text = (tmp_path / "c.md").read_text()
    last = json.loads((made / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert text == card(made / "run")
    assert f"{last['eval/loss']:.6g}" in text
    assert "finished after round 2 of 2" in text
    assert "FedAvg" in text
    assert "| federated | 12 | 72 | x float32\\[4\\], y float32\\[\\] |" in text
    assert "the data that `own.py:problem` reads or makes" in text
    assert "| client\\_lr | 0.2 |" in text or "| client_lr | 0.2 |" in text
    assert "without differential privacy" in text


def test_the_card_of_the_best_model_tells_of_its_round(made, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    words = ["run", f"{made}/own.py:problem", "--algorithm", "fedavg", "--rounds", 3, "--out", run]
    words += ["--set", "eval_every=1", "--set", "checkpoint_every=1", "--set", "client_lr=60"]
    assert cli(monkeypatch, *words) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = min(rows, key=lambda row: row["eval/loss"])
    assert best["round"] < 3  # it overshoots
    out = tmp_path / "m.safetensors"
    assert cli(monkeypatch, "export", run, "--to", "safetensors", "--best", "--out", out) == 0
    assert f"the best one, of round {best['round']}" in capsys.readouterr().out
    text = (tmp_path / "m.safetensors.md").read_text()
    assert f"the best that was saved, of round {best['round']}." in text
    assert f"after round {best['round']}\n" in text
    assert f"{best['eval/loss']:.6g}" in text
    assert f"{rows[-1]['eval/loss']:.6g}" not in text
    capsys.readouterr()
    assert cli(monkeypatch, "card", run, "--best") == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('task = "smile"', "the synthetic data of mixfl's task `smile`"),
        ('task = "smile"\ndata = "a_b/[x]"', "the prepared data in `a_b/[x]`."),
        ('task = "smile"\ndata = "a`b"', "in `` a`b ``."),
        ('task = "python:own"', "the problem `own`, given by a Python program"),
        ('task = "smile"\nlinger = 0', "stayed at its node"),
    ],
)
def test_a_card_says_where_the_data_came_from(keys, said, tmp_path):
    (tmp_path / "config.toml").write_text(f'{keys}\nalgorithm = "my_own"\n')
    (tmp_path / "metrics.jsonl").write_text('{"round": 3, "eval/loss": 0.5}\n')
    text = card(tmp_path)
    assert said in text
    assert "Algorithm: `my_own`." in text


def test_a_card_says_what_was_spent(made, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text('task = "smile"\nalgorithm = "fedavg"\ndp_epsilon = 4.0\n')
    row = {"round": 3, "eval/loss": 0.5, "privacy/epsilon": 3.5, "privacy/delta": 1e-6}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    text = card(run)
    assert "epsilon 3.5 at delta 1e-06" in text
    assert "4.0" in text
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(MixflError, match="no metrics"):
        card(run)

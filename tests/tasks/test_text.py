"""The text task: model, vocabulary, evaluation, synthetic text, samples, and the paper's effect."""

import itertools
import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import mixfl
from mixfl.data.examples import ClientData, Examples
from mixfl.data.formats.text import windows
from mixfl.data.synthetic.text import texts
from mixfl.errors import MixflError
from mixfl.runs.plan import plan
from mixfl.runs.sinks.terminal import Quiet
from mixfl.runs.training import run
from mixfl.studies.compare import compare
from mixfl.tasks import text
from mixfl.tasks.text import char_model
from mixfl.tasks.text.sample import generate
from mixfl.tasks.text.sample import sample as sample_from
from mixfl.tasks.text.vocabulary import TFF, UNKNOWN, Vocabulary

SMALL = dict(embedding=6, hidden=8, clients=6, per_client=8, articles=60, length=20, held_out=0.4)
SHORT = SMALL | dict(rounds=3, cohort_size=2, client_batch=4, local_steps=2, eval_every=1)


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def slow_losses(p, ids):
    """-log p of every character but the first of one sequence, by a GRU in plain NumPy; and
    the likeliest ones."""
    h, losses, best = np.zeros(p["gru"]["u"].shape[0]), [], []
    for i, target in itertools.pairwise(ids):
        x = np.split(p["embedding"][i] @ p["gru"]["w"] + p["gru"]["b"], 3)
        a = np.split(h @ p["gru"]["u"] + p["gru"]["b_u"], 3)
        z, r = sigmoid(x[0] + a[0]), sigmoid(x[1] + a[1])
        h = z * h + (1 - z) * np.tanh(x[2] + r * a[2])
        logits = h @ p["dense"]["w"] + p["dense"]["b"]
        losses.append(np.log(np.exp(logits).sum()) - logits[target])
        best.append(int(logits.argmax()))
    return np.array(losses), best


def random_model(vocabulary, embedding=4, hidden=5, seed=0):
    """Biases are not zero here, so that one that is used in the wrong place shows."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(
        lambda: char_model.init(jax.random.key(0), vocabulary, embedding, hidden, 1.0)
    )
    return jax.tree.map(lambda a: rng.normal(size=a.shape), shapes)


def points(*lines, length=12):
    return np.concatenate([windows(line, length) for line in lines])


def jit_loss(v):
    return jax.jit(partial(char_model.loss, table=v.table))


def single(p):
    return jax.tree.map(lambda a: np.asarray(a, np.float32), p)


@pytest.fixture(params=["plain", "turned"])
def layout(request, monkeypatch):
    """Of the states: small batches of many units are turned, few would be too."""
    if request.param == "turned":
        monkeypatch.setattr(char_model, "WIDE", 1)
    called, states = [], char_model._states
    monkeypatch.setattr(char_model, "_states", lambda *a: called.append(a[-1]) or states(*a))
    yield
    assert set(called) == {0 if request.param == "turned" else 1}


def test_loss_is_that_of_a_plain_gru_averaged_over_a_sequences_characters(layout):
    v = Vocabulary(tuple("abc "))
    p = random_model(len(v))
    batch = points("abcab", "ca", "cab ab cab ba", "aXa")
    losses = jit_loss(v)(single(p), {"text": batch})
    for row, value in zip(batch, losses, strict=True):
        ids = v.encode("".join(map(chr, row[row > 0])))
        assert value == pytest.approx(slow_losses(p, ids)[0].mean(), rel=1e-5)


def test_gradient_is_that_of_finite_differences(layout):
    v = Vocabulary(tuple("abc "))
    p = random_model(len(v))
    batch = points("abcab", "cab ab cab ba")[:2]

    def slow(p):
        rows = [v.encode("".join(map(chr, row[row > 0]))) for row in batch]
        return sum(slow_losses(p, ids)[0].mean() for ids in rows)

    fast = jax.jit(jax.grad(lambda p: jit_loss(v)(p, {"text": batch}).sum()))(single(p))
    leaves, structure = jax.tree.flatten(p)
    rng = np.random.default_rng(1)
    for i, (leaf, gradient) in enumerate(zip(leaves, jax.tree.leaves(fast), strict=True)):
        for _ in range(3):  # directions
            d = rng.normal(size=leaf.shape)
            moved = [
                slow(jax.tree.unflatten(structure, [*leaves[:i], leaf + h * d, *leaves[i + 1 :]]))
                for h in (1e-5, -1e-5)
            ]
            assert (moved[0] - moved[1]) / 2e-5 == pytest.approx(
                float((gradient * d).sum()), rel=1e-3
            )


def test_padding_changes_nothing(layout):
    v = Vocabulary(tuple("abc "))
    p = single(random_model(len(v)))
    batch = points("abcab", "bca c", length=6)
    longer = np.pad(batch, ((0, 0), (0, 9)))

    def value(batch):
        return jax.jit(jax.value_and_grad(lambda p: jit_loss(v)(p, {"text": batch}).sum()))(p)

    for a, b in zip(jax.tree.leaves(value(batch)), jax.tree.leaves(value(longer)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    nothing = jit_loss(v)(p, {"text": np.zeros((1, 7), np.int32)})
    assert nothing.tolist() == [0]


def stores(folder, federated, central):
    for name, people in (("federated", federated), ("central", central)):
        ClientData.from_clients({c: {"text": points(*t)} for c, t in people.items()}).write(
            folder / name
        )
    return folder


def test_a_character_that_only_clients_use_is_unknown(tmp_path):
    people = {f"user{i}": ["aabbé aab", "ab ab"] for i in range(4)}
    articles = {f"article{i}": ["Ab, ab\U0001f600 ab.", "ba"] for i in range(4)}
    p = text.problem(data=stores(tmp_path, people, articles))
    v = Vocabulary(tuple(json.loads(p.files["vocabulary.json"])["characters"]))
    assert set(v.characters) == set("Ab, ab\U0001f600.")
    assert v.encode("é")[0] == v.encode("\U0001f601")[0] == UNKNOWN
    on_device = char_model.encoded(points("aé\U0001f600\U0001f601,"), v.table)[:6, 0]
    by_hand = [2 + v.characters.index(c) for c in "a\U0001f600,"]
    assert on_device.tolist() == [by_hand[0], UNKNOWN, by_hand[1], UNKNOWN, by_hand[2], 0]


def test_vocabulary_has_the_most_frequent_characters_and_survives_json(tmp_path):
    rows = points("aaabbbccdX", "Yeaab", length=20)
    rows[rows == ord("X")], rows[rows == ord("Y")] = 0xD800, 0xDC00  # halves of one character
    examples = Examples.from_arrays({"text": rows})
    assert Vocabulary.of(examples, 3, 0).characters == ("a", "b", "c")
    v = Vocabulary.of(examples, 100, 0)
    assert set(v.characters) == set("abcde\ud800\udc00")
    (tmp_path / "v.json").write_text(v.to_json())
    assert Vocabulary.read(tmp_path / "v.json") == v
    assert v.decode(v.encode("bad")) == "bad"
    assert len(TFF) == len(set(TFF)) == 86
    with pytest.raises(MixflError, match="not a Unicode code point"):
        Vocabulary.of(Examples.from_arrays({"text": np.array([[1, 2**21]])}), 3, 0)


def test_evaluation_counts_characters(monkeypatch, tmp_path):
    """Against a loop over characters; a prediction of the unknown symbol is never right."""
    monkeypatch.setattr(text, "EVAL_CHUNK", 4)
    people = {f"user{i}": ["ab éa", "abba aé bébé ab", "a b"] for i in range(5)}
    articles = {f"article{i}": ["Ab ba. ab", "Ba"] for i in range(7)}
    o = text.Options(embedding=4, hidden=5, held_out=0.5)
    p = text.problem(o, stores(tmp_path, people, articles))
    v = Vocabulary(tuple(json.loads(p.files["vocabulary.json"])["characters"]))
    x = random_model(len(v))
    x["dense"]["b"][UNKNOWN] += 1.0  # it is predicted now and then
    metrics = p.evaluate(single(x))
    predicted_unknown = 0
    for name, share in (("federated", 0.73), ("central", 0.27)):
        losses, right = [], []
        for row in p.evaluate.splits[name].all()["text"]:
            ids = v.encode("".join(map(chr, row[row > 0])))
            one, best = slow_losses(x, ids)
            losses += one.tolist()
            right += [b == t and t != UNKNOWN for b, t in zip(best, ids[1:], strict=True)]
            predicted_unknown += sum(b == t == UNKNOWN for b, t in zip(best, ids[1:], strict=True))
        assert metrics[f"{name}/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert metrics[f"{name}/accuracy"] == pytest.approx(np.mean(right))
        metrics["loss"] -= share * np.mean(losses)
        metrics["accuracy"] -= share * np.mean(right)
    assert metrics["loss"] == pytest.approx(0, abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(0, abs=1e-6)
    assert predicted_unknown  # or the rule was not tested


@pytest.mark.parametrize(
    ("mixture", "central"), [("documents", 0.27), ("sequences", 0.25), (0.9, 0.9), (0, 0.0)]
)
def test_the_mixture_that_is_evaluated_is_a_key(mixture, central):
    splits = {
        name: Examples.from_arrays({"text": np.zeros((n, 2), np.int32)})
        for name, n in (("federated", 30), ("central", 10))
    }
    judge = text.Evaluation(splits, Vocabulary(("a",)), most=5, seed=0, mixture=mixture)
    assert judge.weights["central"] == pytest.approx(central)
    assert sum(judge.weights.values()) == pytest.approx(1)


def test_of_equal_logits_one_is_drawn_by_lot():
    """A model that knows nothing is as accurate as a guess, not always right or always wrong."""
    table = np.arange(6, dtype=np.int32)
    x = jax.tree.map(np.zeros_like, char_model.init(jax.random.key(0), 6, 3, 4, 1.0))
    _, right, count = text.sums(x, np.array([[2, 3, 4, UNKNOWN, 5, 0]], np.uint8), table)
    assert (float(right), float(count)) == (pytest.approx(3 / 6), 4)


def test_held_out_clients_and_articles_are_not_trained_on():
    p = text.problem(text.Options(**SMALL))
    for term, name in zip(p.terms, ("federated", "central"), strict=True):
        seen = {row.tobytes() for row in term.examples.all()["text"] if row[-1]}
        assert not seen & {row.tobytes() for row in p.evaluate.splits[name].all()["text"]}


def test_stores_that_are_split_already_are_used_as_they_are(tmp_path):
    people = {"one": ["some words"], "two": ["other words"]}
    for part in ("train", "test"):
        stores(tmp_path / part, people if part == "train" else {"three": ["held out"]}, people)
        (tmp_path / "federated").mkdir(exist_ok=True)
        (tmp_path / part / "federated").rename(tmp_path / "federated" / part)
    (tmp_path / "train" / "central").rename(tmp_path / "central")
    p = text.problem(data=tmp_path)
    assert len(p.populations[0].clients) == 2
    assert (p.evaluate.splits["federated"].all()["text"] == points("held out")).all()
    assert len(p.central[0].examples) == 1


def test_bad_data_and_options_are_named(tmp_path):
    with pytest.raises(MixflError, match="no folder 'federated'"):
        text.problem(data=tmp_path)
    (tmp_path / "federated").mkdir()
    with pytest.raises(MixflError, match="not a client store"):
        text.problem(data=tmp_path)
    (tmp_path / "federated").rmdir()
    people = {"a": ["some words"], "b": ["more words"]}
    stores(tmp_path, people, people | {"c": ["text"]})
    for columns, message in (
        ({"x": np.zeros((3, 5), np.int32)}, "no column 'text'"),
        ({"text": np.zeros((3, 5), np.float32)}, "whole numbers"),
        ({"text": np.zeros(3, np.int32)}, "whole numbers"),
        ({"text": np.zeros((3, 5), np.int32)}, "no character"),
    ):
        other = tmp_path / f"{columns}"[:40]
        stores(other, people, people)
        (other / "central").rename(other / "unused")
        ClientData.from_arrays(columns, client=np.arange(3)).write(other / "central")
        with pytest.raises(MixflError, match=message):
            text.problem(data=other)
    stores(tmp_path / "one", {"a": ["some words"]}, people)
    with pytest.raises(MixflError, match=r"federated: a split by client.*, and the data has 1:"):
        text.problem(data=tmp_path / "one")
    with pytest.raises(MixflError, match="Did you mean 'central'"):
        text.Options(vocabulary="centrl")
    with pytest.raises(MixflError, match="hidden = 0"):
        text.Options(hidden=0)


def test_synthetic_text_is_a_function_of_the_seed():
    one, two, other = (texts(4, 5, 30, length=30, seed=seed) for seed in (3, 3, 4))
    for a, b in zip(one, two, strict=True):
        assert all((a[k] == b[k]).all() for k in a)
    assert not np.array_equal(one[1]["text"], other[1]["text"])
    assert len(one[1]["text"]) == 30
    assert len(np.unique(one[0]["client"])) == 4
    letters = [set("".join(map(chr, d["text"][d["text"] > 0]))) for d in one]
    assert not any(c.isupper() or c.isdigit() for c in letters[0])
    assert any(c.isupper() for c in letters[1])
    assert "<" not in letters[1]


def test_difficulty_makes_synthetic_text_harder_to_predict():
    """By the entropy of a character given the two before it, the best that a table can do."""

    def entropy(difficulty):
        rows = texts(20, 40, 800, difficulty=difficulty, seed=0)[0]["text"]
        n = 2**7
        three = (rows[:, :-2] * n + rows[:, 1:-1]) * n + rows[:, 2:]
        counts = np.bincount(three[rows[:, 2:] > 0], minlength=n**3).reshape(n * n, n)
        counts = counts[counts.sum(1) > 0].astype(float)
        share = counts / counts.sum(1, keepdims=True)
        terms = np.where(counts > 0, -counts * np.log2(np.maximum(share, 1e-9)), 0)
        return terms.sum() / counts.sum()

    assert entropy(0.0) + 0.2 < entropy(0.5)
    assert entropy(0.5) + 0.2 < entropy(1.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("text") / "run"
    run(plan("text", "2wgt", given=SHORT), out, False, Quiet())
    return out


def test_a_run_keeps_its_vocabulary_and_goes_on_only_with_the_same(trained, tmp_path):
    planned = plan("text", "2wgt", given=SHORT)
    kept = (trained / "vocabulary.json").read_text()
    assert kept == planned.problem.files["vocabulary.json"]
    run(planned, trained, True, Quiet())  # finished, and the same
    other = replace(planned, problem=replace(planned.problem, files={"vocabulary.json": "{}"}))
    with pytest.raises(MixflError, match=r"vocabulary.json is not what this run would write"):
        run(other, trained, True, Quiet())
    # Killed between the two files: no run yet, and no obstacle.
    (tmp_path / "vocabulary.json").write_text("half a run")
    run(planned, tmp_path, False, Quiet())
    assert (tmp_path / "vocabulary.json").read_text() == kept
    (tmp_path / "vocabulary.json").unlink()
    with pytest.raises(MixflError, match=r"vocabulary.json is not"):
        run(planned, tmp_path, True, Quiet())


def sample(folder, *arguments, **more):
    run = mixfl.load(folder)
    return sample_from(folder, run.config, run.params, *arguments, **more)


def test_sample_is_reproducible_and_never_writes_the_unknown(trained):
    one = sample(trained, "Ab", length=200, seed=1)
    assert one == sample(trained, "Ab", length=200, seed=1)
    assert one != sample(trained, "Ab", length=200, seed=2)
    assert len(one.text) == 200
    assert sample(trained, "a<b<é").unknown == "<é"
    likeliest = sample(trained, "Ab", 50, temperature=0, seed=1)
    assert likeliest == sample(trained, "Ab", 50, temperature=0, seed=2)


def test_sample_draws_what_the_model_says(trained):
    """The likeliest continuation, by the plain GRU; and at temperature 1 its frequencies."""
    v = Vocabulary.read(trained / "vocabulary.json")
    p = jax.tree.map(np.float64, mixfl.load(trained).params)
    p["dense"]["b"][:2] = -1e9  # never the padding, never the unknown
    written = "Ab"
    for _ in range(10):
        best = slow_losses(p, [*v.encode(written), 0])[1][-1]
        written += v.decode([best])
    assert written == "Ab" + sample(trained, "Ab", 10, temperature=0).text
    model, prompt = mixfl.load(trained).params, v.encode("Ab").astype(np.int32)
    many = [v.decode(generate(model, prompt, 1, 1.0, seed)) for seed in range(200)]
    for c in set(many):
        share = np.exp(-slow_losses(p, v.encode("Ab" + c))[0][-1])
        assert many.count(c) / 200 == pytest.approx(share, abs=4 * np.sqrt(share / 200) + 0.01)


def test_sample_says_what_is_wrong(trained, tmp_path):
    with pytest.raises(MixflError, match="holds no run"):
        sample(tmp_path)
    for bad in (dict(length=0), dict(temperature=-1.0), dict(temperature=np.nan), dict(seed=-1)):
        with pytest.raises(MixflError, match="expected a"):
            sample(trained, **bad)
    config = (trained / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(config)
    with pytest.raises(MixflError, match="no model yet"):
        sample(tmp_path)
    model = (trained / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(model)
    with pytest.raises(MixflError, match=r"there is no .*vocabulary.json"):
        sample(tmp_path)
    (tmp_path / "vocabulary.json").write_text('{"characters": ["a", "b"]}')
    with pytest.raises(MixflError, match="expected"):
        sample(tmp_path)
    (tmp_path / "vocabulary.json").write_text('{"characters": ["a", "a"]}')
    with pytest.raises(MixflError, match="damaged"):
        sample(tmp_path)
    (tmp_path / "config.toml").write_text(config.replace('task = "text"', 'task = "smile"'))
    with pytest.raises(MixflError, match="a run of smile"):
        sample(tmp_path)


@pytest.mark.slow
def test_preset_cpu_shows_the_papers_effect(tmp_path):
    """FL alone knows posts only, mixed FL is as good as the oracle, pretraining is forgotten."""
    ids, problems = ["fedavg", "pt", "1wgt", "2wgt", "oracle", "pretrain"], {}
    plans = [plan("text", a, preset="cpu", problems=problems) for a in ids]
    outcomes = {o.algorithm: o for o in compare(plans, tmp_path, 1, False, Quiet())}
    mixture = {a: o.final("eval/accuracy")[0] for a, o in outcomes.items()}
    central = {a: o.final("eval/central/accuracy")[0] for a, o in outcomes.items()}
    for mixed in ("pt", "1wgt", "2wgt"):
        assert abs(mixture[mixed] - mixture["oracle"]) <= 0.01, mixture
        assert central["fedavg"] <= central[mixed] - 0.05, central
        assert central["pretrain"] < central[mixed], central
    curve = {row["round"]: row["eval/central/accuracy"] for row in outcomes["pretrain"].trials[0]}
    assert central["pretrain"] < curve[max(curve) // 2] - 0.05, curve

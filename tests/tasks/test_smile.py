"""The smile task, and the paper's effect in the demo."""

import numpy as np
import pytest

import mixfl
from mixfl.data.synthetic.faces import faces
from mixfl.runs.plan import plan
from mixfl.runs.sinks.terminal import Quiet
from mixfl.studies.compare import Outcome, compare, rows
from mixfl.tasks import smile
from mixfl.theory.intervals import half_width


def test_auc_counts_ties_half():
    assert smile.auc(np.array([1.0, 2, 3, 4]), np.array([0, 0, 1, 1])) == 1
    assert smile.auc(np.array([1.0, 2, 3, 4]), np.array([1, 1, 0, 0])) == 0
    assert smile.auc(np.zeros(4), np.array([0, 1, 0, 1])) == 0.5
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 6, 60).astype(float), rng.integers(0, 2, 60)
    pairs = [(a, b) for a in scores[labels == 1] for b in scores[labels == 0]]
    by_hand = np.mean([float(a > b) + 0.5 * (a == b) for a, b in pairs])
    assert smile.auc(scores, labels) == pytest.approx(by_hand)


def test_federated_smile_central_do_not_and_evaluation_has_both_on_other_clients():
    p = smile.problem(smile.Options(image_size=12, clients=20, per_client=8))
    federated, central = p.populations[0].examples.all(), p.central[0].examples.all()
    assert (federated["smiling"] == 1).all()
    assert (central["smiling"] == 0).all()
    assert set(p.evaluate.examples.all()["smiling"]) == {0, 1}
    seen = {image.tobytes() for image in np.concatenate([federated["image"], central["image"]])}
    assert not seen & {image.tobytes() for image in p.evaluate.examples.all()["image"]}


def test_evaluation_in_chunks_is_evaluation_at_once(monkeypatch):
    p = smile.problem(smile.Options(image_size=12, clients=20, per_client=8))
    x = p.init(__import__("jax").random.key(0))
    at_once = p.evaluate(x)
    monkeypatch.setattr(smile, "EVAL_CHUNK", 7)
    assert p.evaluate(x) == pytest.approx(at_once, rel=1e-5)


def test_faces_are_a_function_of_the_seed():
    one, two = (faces(3, 4, size=16, seed=5) for _ in range(2))
    other = faces(3, 4, size=16, seed=6)
    assert all((one[k] == two[k]).all() for k in one)
    assert one["image"].shape != other["image"].shape or (one["image"] != other["image"]).any()


def test_difficulty_makes_the_faces_harder_to_tell_apart():
    def auc(difficulty):
        o = smile.Options(image_size=16, clients=60, per_client=20, difficulty=difficulty)
        kw = dict(rounds=25, cohort_size=30, client_batch=10, local_steps=4, client_lr=0.05)
        result = mixfl.train(smile.problem(o), "oracle", eval_every=25, **kw)
        return result.metrics[-1]["eval/auc"]

    assert auc(0.0) > auc(0.5) + 0.01 > auc(1.0) + 0.03


@pytest.mark.slow
def test_the_demo_shows_the_papers_effect(tmp_path):
    """`make demo`'s own comparison: FL alone fails, mixed FL reaches the oracle."""
    ids, problems = ["fedavg", "pt", "1wgt", "2wgt", "oracle"], {}
    plans = [plan("smile", a, preset="demo", problems=problems) for a in ids]
    outcomes = {o.algorithm: o for o in compare(plans, tmp_path, 1, False, Quiet())}
    auc = {a: o.final("eval/auc")[0] for a, o in outcomes.items()}
    assert auc["oracle"] > 0.95
    assert auc["fedavg"] <= 0.75
    for mixed in ("pt", "1wgt", "2wgt"):
        assert abs(auc[mixed] - auc["oracle"]) <= 0.01, auc


@pytest.mark.slow
def test_preset_cpu_shows_the_papers_effect_and_the_bias_of_parallel_training(tmp_path):
    ids, problems = ["fedavg", "pt", "1wgt", "2wgt", "oracle"], {}
    plans = [plan("smile", a, preset="cpu", problems=problems) for a in ids]
    outcomes = {o.algorithm: o for o in compare(plans, tmp_path, 1, False, Quiet())}
    auc = {a: o.final("eval/auc")[0] for a, o in outcomes.items()}
    # Over the curve after its first rounds: a single evaluation differs by as much from noise.
    loss = {
        a: np.mean([m["eval/loss"] for m in o.trials[0] if m["round"] >= 50])
        for a, o in outcomes.items()
    }
    assert auc["fedavg"] <= 0.75
    for mixed in ("pt", "1wgt", "2wgt"):
        assert abs(auc[mixed] - auc["oracle"]) <= 0.01, auc
    assert loss["pt"] > max(loss["1wgt"], loss["2wgt"]), loss


def test_data_that_is_split_already_is_used_as_it_is(tmp_path):
    for part, seed in (("train", 1), ("test", 2)):
        drawn = faces(6, 5, size=8, seed=seed)
        client = drawn.pop("client")
        mixfl.ClientData.from_arrays(drawn, client=client).write(tmp_path / part)
    split = smile.problem(smile.Options(), tmp_path)
    train, test = (mixfl.ClientData.open(tmp_path / part) for part in ("train", "test"))
    assert sum(len(t.examples) for t in split.terms) == len(train.examples)
    np.testing.assert_array_equal(
        split.evaluate.examples.all()["image"], test.examples.all()["image"]
    )


def test_inputs_by_the_statistics_that_each_setting_allows():
    """Each pixel has mean 0 and deviation 1, over both halves or over the central one."""

    def inputs(kind):
        o = smile.Options(image_size=12, clients=60, per_client=20, inputs=kind)
        p = smile.problem(o)
        mean, scale = (p.terms[0].loss.keywords[k] for k in ("mean", "scale"))
        halves = [t.all()["image"] for t in (p.populations[0].examples, p.central[0].examples)]
        return [(x.reshape(len(x), -1) - mean) * scale for x in halves]

    federated, central = inputs("standardized")
    assert np.abs(federated.mean(0) + central.mean(0)).max() < 1e-4
    federated, central = inputs("central")
    assert np.abs(central.mean(0)).max() < 1e-4
    assert np.abs(central.std(0) - 1).max() < 0.2  # scaled by 1 / (deviation + 1 of 255)
    assert np.abs(federated.mean(0)).max() > 0.1  # the clients' own mean is not taken away
    federated, central = inputs("unit")
    assert min(federated.min(), central.min()) >= 0
    assert max(federated.max(), central.max()) <= 1


@pytest.mark.parametrize("inputs", ["unit", "standardized"])
def test_shrunk_faces_train_like_faces_of_that_size(tmp_path, inputs):
    """Squares of pixels that are all alike have the mean that each of them has."""
    drawn = faces(20, 6, size=8, seed=1)
    client = drawn.pop("client")
    wide = {**drawn, "image": drawn["image"].repeat(3, axis=1).repeat(3, axis=2)}
    models = []
    for name, columns, shrink in (("small", drawn, 1), ("wide", wide, 3)):
        mixfl.ClientData.from_arrays(columns, client=client).write(tmp_path / name)
        o = smile.Options(inputs=inputs, shrink=shrink, hidden=4)
        p = smile.problem(o, tmp_path / name)
        models.append(mixfl.train(p, "pt", rounds=3, cohort_size=4, client_lr=0.1))
    small, wide = models
    assert wide.params["hidden"]["w"].shape == (8 * 8 * 3, 4)
    np.testing.assert_allclose(wide.params["hidden"]["w"], small.params["hidden"]["w"], atol=1e-6)
    assert wide.metrics[-1]["eval/loss"] == pytest.approx(small.metrics[-1]["eval/loss"], abs=1e-6)


def test_faces_that_do_not_divide_are_refused():
    with pytest.raises(mixfl.MixflError, match="images of 10 x 10 x 3 can't be divided into squ"):
        smile.problem(smile.Options(image_size=10, clients=6, shrink=3))


@pytest.mark.parametrize(
    ("task", "key", "value"),
    [("smile", "image_size", 28), ("text", "length", 50), ("movie", "users", 99)],
)
def test_keys_of_synthetic_data_are_refused_with_real_data(task, key, value, tmp_path):
    with pytest.raises(mixfl.MixflError, match=f"{key}: only for the synthetic data of the task"):
        plan(task, "pt", data=str(tmp_path), given={key: value})


def test_compare_pairs_trials_and_reports_divergence(tmp_path):
    plans = [
        plan("smile", a, given=dict(
            image_size=10, clients=12, per_client=6, rounds=4, cohort_size=5, client_batch=2,
            **(dict(central_batch=8) if a == "pt" else {}),
            local_steps=2, client_lr=0.01, client_opt=opt, eval_every=2,
        ))
        for a, opt in (("pt", "sgd"), ("fedavg", "sgd"))
    ]  # fmt: skip
    outcomes = compare(plans, tmp_path, 3, False, Quiet())
    assert [len(o.trials) for o in outcomes] == [3, 3]
    finals = outcomes[0].final("eval/loss")
    assert len(set(finals)) == 3  # another seed each
    header, cells = rows(outcomes)
    assert header[:3] == ["algorithm", "loss", "auc"]
    assert f"{finals.mean():.4f} ± {half_width(finals):.4f}" == cells[0][1]
    assert rows([Outcome("pt", [], [12])])[1][0][0] == "pt"


def test_interval_covers_the_mean_in_95_percent_of_cases():
    rng = np.random.default_rng(0)
    samples = rng.normal(3.0, 2.0, (4000, 5))
    covered = np.mean([abs(v.mean() - 3.0) <= half_width(v) for v in samples])
    assert covered == pytest.approx(0.95, abs=0.015)

"""The movie task: losses, recall, split, synthetic ratings, recommendations, and the effect."""

import itertools
import json

import click.testing
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mixfl
from mixfl.cli import cli
from mixfl.data.synthetic.ratings import ratings
from mixfl.errors import MixflError
from mixfl.runs.plan import plan
from mixfl.runs.sinks.terminal import Quiet
from mixfl.studies.compare import compare
from mixfl.tasks import movie
from mixfl.tasks.movie.recommendation import recommend

SMALL = dict(users=60, movies=80, per_user=30, spreadout=0.01)


def unit(v):
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def small():
    return movie.problem(movie.Options(**SMALL))


def model(movies=80, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "movies": rng.normal(size=(movies + 2, 16)).astype(np.float32),
        "context": {
            "w": rng.normal(size=(16, 16)).astype(np.float32),
            "b": rng.normal(size=16).astype(np.float32),
        },
    }


def test_the_hinge_loss_is_that_of_numpy(small):
    x, batch = model(), small.populations[0].examples.take(np.arange(40))
    assert (batch["length"] < 10).any()
    assert (batch["length"] == 10).any()
    losses = movie.hinge_loss(x, batch, margin=0.9)
    for i in range(40):
        seen = [m for m in batch["context"][i] if m]
        hidden = np.mean([x["movies"][m] for m in seen], axis=0) @ x["context"]["w"]
        left = unit(np.maximum(hidden + x["context"]["b"], 0))
        cosine = left @ unit(x["movies"][batch["movie"][i]])
        assert losses[i] == pytest.approx(max(0.9 - cosine, 0) ** 2, rel=1e-4)


def test_the_hinge_loss_uses_only_the_rows_that_the_data_names(small):
    """As a client sees it that holds its own rows only, renumbered."""
    x, batch = model(), small.populations[0].examples.take(np.arange(25))
    ids = np.unique(np.concatenate([batch["context"].ravel(), batch["movie"]]))[::-1]
    number = np.zeros(82, int)
    number[ids] = np.arange(len(ids))
    assert number[0] != 0  # the padding has moved
    own = {**x, "movies": x["movies"][ids]}
    renumbered = {**batch, "context": number[batch["context"]], "movie": number[batch["movie"]]}
    np.testing.assert_allclose(
        movie.hinge_loss(own, renumbered, 0.9), movie.hinge_loss(x, batch, 0.9), rtol=1e-6
    )


def test_the_product_has_the_slopes_of_an_ordinary_one():
    rng = np.random.default_rng(0)
    x, w, v = (rng.normal(size=s).astype(np.float32) for s in [(3, 5, 4), (3, 4, 2), (3, 4, 2)])

    def curvature(product):  # along v, for each of a group
        def value(x, w):
            return jnp.sum(jnp.sin(product(x, w)))

        def along(x, w, v):
            return jnp.vdot(jax.grad(value, argnums=1)(x, w), v)

        return jax.vmap(jax.value_and_grad(along, argnums=(0, 1)))(x, w, v)

    for ours, plain in zip(
        jax.tree.leaves(curvature(movie.product)), jax.tree.leaves(curvature(jnp.matmul)),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_spreadout_is_the_double_sum_over_all_pairs_of_movies():
    x = model(movies=30)
    u = unit(x["movies"][1:31])
    pairs = sum((u[i] @ u[j]) ** 2 for i, j in itertools.permutations(range(30), 2))
    assert movie.spreadout(x, 0.01) == pytest.approx(0.01 * np.sqrt(pairs), rel=1e-5)
    g = jax.grad(movie.spreadout)(x, 0.01)["movies"]
    assert (g[0] == 0).all()
    assert (g[-1] == 0).all()
    assert (np.abs(g[1:-1]).sum(1) > 0).all()


def test_no_gradient_is_nan_where_the_towers_give_zero():
    x = jax.tree.map(jnp.zeros_like, model(movies=5))
    batch = dict(context=np.zeros((2, 10), int), movie=np.array([1, 2]), length=np.array([0, 1]))
    for off in (x, {**model(movies=5), "context": {"w": jnp.zeros((16, 16)), "b": -jnp.ones(16)}}):
        loss, g = jax.value_and_grad(lambda x: movie.hinge_loss(x, batch, 0.9).sum())(off)
        assert loss == pytest.approx(2 * 0.81)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(g))
    g = jax.grad(movie.spreadout)(x, 1.0)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(g))


def chance(scores, target, context, count_context, rng, draws=4000):
    """Recall@10 of one example by sorting, ties broken by lot many times."""
    allowed = [
        m for m in range(1, len(scores))
        if count_context or m == target or m not in context
    ]  # fmt: skip
    above = sum(scores[m] > scores[target] for m in allowed)
    tied = [m for m in allowed if scores[m] == scores[target]]
    ranks = [above + list(rng.permutation(tied)).index(target) for _ in range(draws)]
    return np.mean(np.array(ranks) < 10)


@pytest.mark.parametrize("count_context", [True, False])
def test_recall_breaks_ties_by_lot(count_context):
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 5, (12, 41)).astype(np.float32)  # some eight movies share a score
    scores[:, 0] = -np.inf
    scores[0, 1:] = 3  # all alike
    context = np.sort(rng.integers(0, 41, (12, 10)))[:, ::-1].copy()
    target = rng.integers(1, 41, 12)
    target[1] = context[1, 0]  # seen before, and seen again
    chances = np.asarray(movie.hits(jnp.asarray(scores), target, context, count_context))
    by_lot = [
        chance(scores[i], target[i], set(context[i]), count_context, rng) for i in range(12)
    ]  # fmt: skip
    np.testing.assert_allclose(chances, by_lot, atol=0.03)
    assert chances[0] == pytest.approx(
        10 / (40 if count_context else len(set(range(1, 41)) - set(context[0]) | {target[0]}))
    )


@pytest.mark.parametrize("count_context", [True, False])
def test_evaluation_in_chunks_is_evaluation_by_sorting(monkeypatch, count_context):
    p = movie.problem(movie.Options(**SMALL, eval_examples=50, count_context=count_context))
    x, examples = model(), p.evaluate.examples
    assert len(examples["movie"]) == 50
    at_once = p.evaluate(x)
    monkeypatch.setattr(movie, "EVAL_CHUNK", 7)
    assert p.evaluate(x) == pytest.approx(at_once, rel=1e-5)
    left = movie.left_tower(x["context"], x["movies"][examples["context"]], examples["length"])
    scores = np.array(left @ unit(x["movies"][:-1]).T)
    if not count_context:
        scores[np.arange(50)[:, None], examples["context"]] = -np.inf
    best = 1 + np.argsort(-scores[:, 1:], axis=1)[:, :10]
    recall = (best == examples["movie"][:, None]).any(1).mean()
    assert at_once["recall@10"] == pytest.approx(recall)
    hinge = float(np.mean(movie.hinge_loss(x, examples, 0.9)))
    assert at_once["hinge"] == pytest.approx(hinge, rel=1e-5)
    assert at_once["loss"] == pytest.approx((hinge + float(movie.spreadout(x, 0.01))) / 2, rel=1e-5)


def test_popularity_is_recall_of_what_most_training_users_rated(small):
    train = small.populations[0].examples.all()["movie"]
    counts = np.bincount(train, minlength=81)[1:]
    target = small.evaluate.examples["movie"] - 1
    rank = (counts[None] > counts[target, None]).sum(1)
    tied = (counts[None] == counts[target, None]).sum(1)
    expected = np.clip((10 - rank) / tied, 0, 1).mean()
    assert small.evaluate(model())["popularity/recall@10"] == pytest.approx(expected)


def test_the_strength_of_the_regularizer_follows_the_number_of_movies():
    assert movie.Options().strength(3952) == pytest.approx(0.01, rel=0.02)
    assert movie.Options().strength(500) == pytest.approx(0.08)
    assert movie.Options(spreadout=0.02).strength(500) == 0.02


def test_users_are_split_as_in_the_paper():
    parts = movie.split(6040, movie.Options())
    sizes = {k: len(v) for k, v in parts.items()}
    assert sizes == dict(train=3865, validation=483, test=483, datacenter=1209)
    assert len(set(np.concatenate(list(parts.values())))) == 6040
    other = movie.split(6040, movie.Options(data_seed=1))
    assert (other["test"] != parts["test"]).any()
    assert all(len(v) for v in movie.split(13, movie.Options()).values())


def test_a_store_is_read_and_what_is_wrong_with_it_said(tmp_path):
    drawn = ratings(20, 60, 25)
    user = drawn.pop("user")
    mixfl.ClientData.from_arrays(drawn, user).write(tmp_path / "good")
    largest = max(drawn["context"].max(), drawn["movie"].max())
    p = movie.problem(movie.Options(), tmp_path / "good")
    assert p.init(jax.random.key(0))["movies"].shape == (largest + 2, 16)
    p = movie.problem(movie.Options(largest_id=3952), tmp_path / "good")
    assert p.init(jax.random.key(0))["movies"].shape == (3954, 16)
    with pytest.raises(MixflError, match="largest_id = 3, but the data has a movie"):
        movie.problem(movie.Options(largest_id=3), tmp_path / "good")

    mixfl.ClientData.from_arrays({"x": drawn["movie"]}, user).write(tmp_path / "other")
    with pytest.raises(MixflError, match="is no data of the movie task"):
        movie.problem(movie.Options(), tmp_path / "other")
    drawn["context"][5, 0] = 0
    mixfl.ClientData.from_arrays(drawn, user).write(tmp_path / "hole")
    with pytest.raises(MixflError, match="a 0 before a movie"):
        movie.problem(movie.Options(), tmp_path / "hole")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(split="train"), "unknown value of split"),
        (dict(count_context=1), "expected true or false"),
        (dict(users=12), "users = 12: expected a whole number from 13"),
        (dict(largest_id=0), "largest_id = 0"),
        (dict(spreadout=-1), "spreadout = -1"),
    ],
)
def test_options_are_checked(wrong, message):
    with pytest.raises(MixflError, match=message):
        movie.Options(**wrong)


def test_ratings_are_a_function_of_the_seed_and_look_like_movielens():
    one, two, other = ratings(30, 100, 30), ratings(30, 100, 30), ratings(30, 100, 30, seed=1)
    assert all((one[k] == two[k]).all() for k in one)
    assert one["movie"].shape != other["movie"].shape or (one["movie"] != other["movie"]).any()
    for user in range(30):
        mine = one["user"] == user
        context, next_movie = one["context"][mine], one["movie"][mine]
        history = [context[0, 0], *next_movie]
        assert 20 <= len(history) <= 50
        assert len(set(history)) == len(history)  # nothing is rated twice
        assert 1 <= min(history) <= max(history) <= 100
        for i in range(len(next_movie)):
            before = history[max(0, i - 9) : i + 1]
            assert list(context[i]) == before + [0] * (10 - len(before))


def test_difficulty_makes_the_next_movie_harder_to_tell():
    """By a model that knows which movie tends to follow which."""

    def recall(difficulty):
        drawn = ratings(600, 80, 40, difficulty=difficulty)
        last = drawn["context"][np.arange(len(drawn["movie"])), (drawn["context"] > 0).sum(1) - 1]
        follows = np.zeros((81, 81))
        fit = drawn["user"] < 500
        np.add.at(follows, (last[fit], drawn["movie"][fit]), 1)
        best = np.argsort(-follows[last[~fit]], axis=1)[:, :10]
        return (best == drawn["movie"][~fit][:, None]).any(1).mean()

    assert recall(0.0) > recall(0.5) + 0.01 > recall(1.0) + 0.05


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a store with titles."""
    from mixfl.runs.training import run

    folder = tmp_path_factory.mktemp("movie")
    drawn = ratings(60, 80, 30)
    user = drawn.pop("user")
    mixfl.ClientData.from_arrays(drawn, user).write(folder / "store")
    titles = {i: f"Film {i}, The ({1920 + i})" for i in range(1, 80)}
    titles |= {7: "Toy Story (1995)", 8: "Toy Story 2 (1999)", 9: "Café: Noir (1950)"}
    (folder / "store/titles.json").write_text(json.dumps(titles))
    lines = [f"{i}::{title}::Drama\n" for i, title in titles.items()]
    (folder / "movies.dat").write_text("".join(lines), encoding="latin-1")
    given = dict(rounds=3, cohort_size=5, local_steps=2, client_lr=0.5)
    run(plan("movie", "1wgt", data=str(folder / "store"), given=given), folder / "run", False,
        Quiet())  # fmt: skip
    return folder


def test_recommend_gives_the_best_movies_that_were_not_seen(trained):
    run = mixfl.load(trained / "run")
    history = list(range(1, 14))  # longer than a context: the last ten count
    seen, recommended = recommend(run.config, run.params, ",".join(map(str, history)), top=5)
    assert [m.movie for m in seen] == history
    x = run.params
    hidden = x["movies"][history[-10:]].mean(0) @ x["context"]["w"] + x["context"]["b"]
    scores = unit(x["movies"]) @ unit(np.maximum(hidden, 0))
    best = sorted(set(range(1, 80)) - set(history), key=lambda m: -scores[m])[:5]
    assert [m.movie for m in recommended] == best
    assert [m.score for m in recommended] == pytest.approx(scores[best], abs=1e-5)
    everything = recommend(run.config, run.params, "1", top=1000)[1]
    assert sorted(m.movie for m in everything) == list(range(2, 80))  # 80 has no title


def test_recommend_takes_titles(trained):
    run = mixfl.load(trained / "run")
    for titles in (None, trained / "movies.dat", trained):
        seen, _ = recommend(run.config, run.params, "toy story, film 33, Café: Noir, 5", 3, titles)
        assert [m.movie for m in seen] == [7, 33, 9, 5]
        assert seen[2].title == "Café: Noir (1950)"


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ("81", "there is no movie 81: this model knows 1 to 80"),
        ("80", "there is no movie 80: it has no title"),
        ("Toy", "may be one of 7 Toy Story .1995.; 8 Toy Story 2 .1999.: give its number"),
        ("film", "and 66 more"),
        ("nothing like it", "no title contains"),
        (" , ", "the history is empty"),
    ],
)
def test_recommend_says_what_is_wrong_with_a_history(trained, history, message):
    run = mixfl.load(trained / "run")
    with pytest.raises(MixflError, match=message):
        recommend(run.config, run.params, history)


def test_recommend_says_what_is_wrong_with_a_run(trained, tmp_path):
    run = mixfl.load(trained / "run")
    with pytest.raises(MixflError, match="a run of the task smile, not of movie"):
        recommend({"task": "smile"}, run.params, "1")
    with pytest.raises(MixflError, match="no model yet"):
        recommend(run.config, None, "1")
    untitled = {k: v for k, v in run.config.items() if k != "data"}
    assert recommend(untitled, run.params, "1")[1][0].title == ""
    with pytest.raises(MixflError, match="titles are not known here"):
        recommend(untitled, run.params, "Toy Story")
    with pytest.raises(MixflError, match="can't be read"):
        recommend(untitled, run.params, "1", listed=tmp_path / "movies.dat")
    (tmp_path / "movies.dat").write_text("1::A::B\nnonsense\n")
    with pytest.raises(MixflError, match="line 2: found 'nonsense'"):
        recommend(untitled, run.params, "1", listed=tmp_path)


def test_titles_with_commas_stay_whole(trained):
    run = mixfl.load(trained / "run")
    seen, _ = recommend(run.config, run.params, "Film 3, The (1923), 7,film 4, the (1924)")
    assert [m.movie for m in seen] == [3, 7, 4]
    with pytest.raises(MixflError, match="there is no movie 1111"):
        recommend(run.config, run.params, "1" * 5000)


def test_data_that_is_split_already_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(MixflError, match="prepared with --split"):
        movie.problem(movie.Options(), tmp_path)


def test_recommend_on_the_command_line(trained):
    call = click.testing.CliRunner().invoke
    said = call(cli, ["recommend", str(trained / "run"), "--history", "Toy Story,3", "--top", "2"])
    assert said.exit_code == 0, said.output
    assert "seen: 7 Toy Story (1995); 3 Film 3, The (1923)" in said.output
    assert said.output.count("Film") == 3
    wrong = call(cli, ["recommend", str(trained / "store"), "--history", "1"])
    assert isinstance(wrong.exception, MixflError)
    assert "holds no run" in str(wrong.exception)


@pytest.mark.slow
def test_preset_cpu_shows_the_papers_effect(tmp_path):
    """Mixed FL is on a par with the expensive baseline; the hinge loss alone collapses."""
    ids, problems = ["fedavg", "pt", "1wgt", "2wgt", "baseline"], {}
    plans = [plan("movie", a, preset="cpu", problems=problems) for a in ids]
    outcomes = compare(plans, tmp_path, 1, False, Quiet())
    recall = {o.algorithm: o.final("eval/recall@10")[0] for o in outcomes}
    popularity = outcomes[0].final("eval/popularity/recall@10")[0]
    assert recall["baseline"] > 2 * popularity
    assert recall["fedavg"] < popularity
    for mixed in ("pt", "1wgt", "2wgt"):
        assert recall[mixed] >= 0.95 * recall["baseline"], recall

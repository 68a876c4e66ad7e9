"""Algorithms of users: from files and packages, with settings, marks and fields of their own."""

import json
import sys
import textwrap
import tomllib
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import layer_problem
import numpy as np
import pytest
import tiny_problem
from problems import flat, problem, settings
from run_folders import TINY, assert_same, cli

import mixfl
from mixfl.algorithms import algorithm, fed_avg, key, recipe
from mixfl.algorithms.contract import CLIENT_KEYS
from mixfl.algorithms.marks import own_loss_only
from mixfl.algorithms.steps import add, client_update, difference, gradient, scale, weighted_summand
from mixfl.engine import Simulator
from mixfl.engine.source import source
from mixfl.tasks import user_file
from mixfl.validation import NotNegative

FILE = """
    from mixfl.algorithms import CLIENT_KEYS, algorithm, fed_avg, key
    from mixfl.algorithms.steps import add, client_update, difference, gradient, scale
    from mixfl.validation import NotNegative

    TWICE = 2.0
    MU = {"mu": key(0.1, "pull towards the server's model", NotNegative)}


    @algorithm("fedprox", CLIENT_KEYS, settings=MU)
    def fed_prox(problem, s):
        def client(term, broadcast, feed):
            def grad(x, step):
                loss, g = gradient(term, x, step.batches)
                return loss, add(g, scale(TWICE * s.own.mu, difference(x, broadcast.x)))

            return client_update(term, s, broadcast, feed, grad)

        return fed_avg.build(problem, s)._replace(client=client)
"""
ROUNDS = dict(rounds=4, eval_every=2, checkpoint_every=2)


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(FILE))
    return path


def train(algorithm, **given):
    return mixfl.train(tiny_problem.problem, algorithm, **(ROUNDS | given))


def config(out):
    return tomllib.loads((out / "config.toml").read_text())


# Settings -----------------------------------------------------------------------------------------


def test_its_settings_are_set_like_all_others(mine, tmp_path):
    name = f"{mine}:fed_prox"
    default, strong = train(name), train(name, mu=5.0, out=tmp_path / "strong")
    assert np.abs(flat(default.params) - flat(strong.params)).max() > 1e-3
    assert_same_params(strong, train(recipe(name)(mu=5)))
    assert_same_params(train(name, mu=0.0), train("fedavg"), 1e-6)
    assert (default.config["mu"], strong.config["mu"]) == (0.1, 5.0)
    written = config(tmp_path / "strong")
    assert (written["algorithm"], written["mu"]) == ("fedprox", 5.0)
    assert written["algorithm_from"] == name
    assert (tmp_path / "strong" / "algorithm.py").read_text() == mine.read_text()


def assert_same_params(a, b, tolerance=0.0):
    np.testing.assert_allclose(flat(a.params), flat(b.params), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(mu=-1.0), "mu = -1.0: expected a finite number of at least 0 (pull towards"),
        (dict(mu="much"), "mu = 'much': expected a finite number"),
        (dict(mmu=1.0), "unknown key 'mmu'. Did you mean 'mu'?"),
    ],
)
def test_wrong_settings_are_refused(mine, given, says):
    with pytest.raises(mixfl.MixflError) as error:
        train(f"{mine}:fed_prox", **given)
    assert says in str(error.value)


def test_other_algorithms_do_not_have_them():
    with pytest.raises(mixfl.MixflError, match="unknown key 'mu'"):
        train("fedavg", mu=0.1)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"client_lr": key(1.0, "rate")}, "'client_lr' is a key of every run"),
        ({"algorithm": key("x", "name")}, "'algorithm' is a key of every run"),
        ({"mu": 0.1}, 'expected mu = key(default, "its meaning"), got 0.1'),
        ({"mu": key([0.1], "pulls")}, "the default of 'mu' is [0.1]: give its type"),
        ({"mu": key(-0.1, "pull", NotNegative)}, "mu = -0.1: expected"),
    ],
)
def test_wrong_declarations_are_refused(declared, says):
    with pytest.raises(mixfl.MixflError) as error:
        algorithm("mine", CLIENT_KEYS, settings=declared)
    assert says in str(error.value)


# Files and packages -------------------------------------------------------------------------------


def test_commands_take_it_and_repeat_it(mine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    name, first = f"{mine}:fed_prox", tmp_path / "first"
    words = ["--rounds", "2", "--set", "mu=0.7", "--out", first]
    assert cli(monkeypatch, "run", f"{TINY}:problem", "--algorithm", name, *words) == 0
    assert config(first)["mu"] == 0.7
    assert cli(monkeypatch, "run", "--config", first / "config.toml", "--out", tmp_path / "b") == 0
    assert_same(first, tmp_path / "b")
    # The file has changed since: the copy in the run folder is what the run was made with.
    mine.write_text(mine.read_text().replace("TWICE = 2.0", "TWICE = 200.0"))
    assert cli(monkeypatch, "run", "--config", first / "config.toml", "--out", tmp_path / "c") == 0
    assert_same(first, tmp_path / "c")
    capsys.readouterr()
    assert cli(monkeypatch, "keys", "--algorithm", name) == 0
    shown = capsys.readouterr().out
    assert "pull towards the server's model" in shown
    assert "central_lr" not in shown
    both = ["--algorithms", f"fedavg,{name}", "--jobs", "1", "--rounds", "2", "--set", "mu=0.5"]
    compared = tmp_path / "compared"
    assert cli(monkeypatch, "compare", f"{TINY}:problem", *both, "--out", compared) == 0
    assert config(compared / "fedprox")["mu"] == 0.5
    assert "mu" not in config(compared / "fedavg")
    assert "fedprox" in (compared / "report.html").read_text()


@pytest.mark.system
def test_its_settings_are_swept(mine, tmp_path, monkeypatch):
    words = ["--over", "mu=0.01,5", "--trials", "1", "--rounds", "2", "--out", tmp_path / "sweep"]
    name = f"{mine}:fed_prox"
    assert cli(monkeypatch, "sweep", f"{TINY}:problem", "--algorithm", name, *words) == 0
    rows = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["settings"]
    assert [(r["algorithm"], r["keys"]["mu"]) for r in rows] == [("fedprox", 0.01), ("fedprox", 5)]
    losses = [r["metrics"]["eval/loss"]["mean"] for r in rows]
    assert losses[0] != losses[1]


def test_check_looks_at_an_algorithm(mine, monkeypatch, capsys):
    words = ["--set", "client_batch=2"]
    name = f"{mine}:fed_prox"
    assert cli(monkeypatch, "check", f"{TINY}:problem", "--algorithm", name, *words) == 0
    assert "clients one at a time: the same model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("{mine}:fed_prx", "it has no 'fed_prx'. It has: fed_avg, fed_prox."),
        ("{mine}", "which algorithm of the file?"),
        ("{mine}:TWICE", "is float: expected an algorithm"),
        ("nowhere.py:fed_prox", "there is no file nowhere.py"),
        ("fedprx", "unknown algorithm 'fedprx'"),
    ],
)
def test_what_is_not_there_is_said(mine, name, says):
    with pytest.raises(mixfl.MixflError) as error:
        recipe(name.format(mine=mine))
    assert says in str(error.value)


def test_an_id_of_mixfls_own_is_refused(mine):
    mine.write_text(mine.read_text().replace('"fedprox"', '"fedavg"'))
    with pytest.raises(mixfl.MixflError, match="has the id of mixfl's 'fedavg'"):
        recipe(f"{mine}:fed_prox")


def test_packages_offer_algorithms(mine, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(mine.parent), *sys.path])
    point = EntryPoint("fedprox", "mine:fed_prox", user_file.GROUP)
    monkeypatch.setattr(user_file, "entry_points", lambda group: [point])
    found = recipe("fedprox")
    assert (found.id, found.name) == ("fedprox", "fedprox")
    assert_same_params(train("fedprox"), train(found))
    with pytest.raises(mixfl.MixflError, match="Did you mean 'fedprox'"):
        recipe("fedprx")
    other = EntryPoint("prox", "mine:fed_prox", user_file.GROUP)
    monkeypatch.setattr(user_file, "entry_points", lambda group: [other])
    with pytest.raises(mixfl.MixflError, match="both names must be the same"):
        recipe("prox")


# Going on -----------------------------------------------------------------------------------------


def test_a_run_goes_on_only_with_the_same_settings_and_code(mine, tmp_path):
    name, out = f"{mine}:fed_prox", tmp_path / "run"
    train(name, rounds=2, out=out)
    (out / "model.safetensors").unlink()  # as if it had been stopped
    with pytest.raises(mixfl.MixflError, match=r"mu was 0.1, now 50.0"):
        train(name, rounds=2, mu=50, out=out, resume=True)
    text = mine.read_text()
    mine.write_text(text.replace("TWICE = 2.0", "TWICE = 3.0"))
    with pytest.raises(mixfl.MixflError, match=r"fed_prox TWICE was 2.0, now 3.0"):
        train(name, rounds=2, out=out, resume=True)
    mine.write_text(text.replace("scale(TWICE * ", "scale(TWICE + "))
    with pytest.raises(mixfl.MixflError, match=r"fed_prox: other code"):
        train(name, rounds=2, out=out, resume=True)
    mine.write_text(text.replace("TWICE = 2.0", "TWICE = 2.0  # of FedProx's 1/2"))
    train(name, rounds=2, out=out, resume=True)


def made(mu):
    """A recipe whose hyperparameter is in a closure."""

    @algorithm("closed", CLIENT_KEYS)
    def closed(problem, s):
        def client(term, broadcast, feed):
            def grad(x, step):
                loss, g = gradient(term, x, step.batches)
                return loss, add(g, scale(mu, difference(x, broadcast.x)))

            return client_update(term, s, broadcast, feed, grad)

        return fed_avg.build(problem, s)._replace(client=client)

    return closed


def test_a_hyperparameter_in_a_closure_is_noticed(tmp_path):
    out = tmp_path / "run"
    train(made(0.1), rounds=2, out=out)
    (out / "model.safetensors").unlink()
    with pytest.raises(mixfl.MixflError, match=r"closed mu was 0.1, now 50.0"):
        train(made(50.0), rounds=2, out=out, resume=True)
    with pytest.raises(mixfl.MixflError, match="was defined in a Python program"):
        user_input_config(out)
    assert source(fed_avg) == {}


def user_input_config(out):
    from mixfl.runs.user_input import read_config

    return read_config(out / "config.toml")


# Forms --------------------------------------------------------------------------------------------


def shrinking(mark, summand=None):
    """FedAvg with g + 0.05 x in every step, which is no low-rank form's."""

    @algorithm("shrinking", CLIENT_KEYS)
    def recipe(problem, s):
        @mark
        def client(term, broadcast, feed):
            def grad(x, step):
                loss, g = gradient(term, x, step.batches)
                return loss, add(g, scale(0.05, x))

            return client_update(term, s, broadcast, feed, grad)

        return fed_avg.build(problem, s)._replace(client=client)

    return recipe


def last(recipe, **given):
    p, s = layer_problem.problem(), settings(rounds=2, **given)
    simulator = Simulator(p, recipe.build(p, s), s)
    *_, result = simulator.rounds(simulator.init(), 0, 2)
    return simulator, flat(result.state.x)


def test_without_a_mark_no_form_is_used():
    found, x = last(shrinking(lambda f: f))
    assert not found.forms.low_rank
    np.testing.assert_array_equal(x, last(shrinking(lambda f: f), first_layer="plain")[1])
    with pytest.raises(mixfl.MixflError, match="not plain SGD on their own loss"):
        last(shrinking(lambda f: f), first_layer="low-rank")


def test_a_wrong_mark_is_refused():
    with pytest.raises(mixfl.MixflError, match="marked with own_loss_only, but"):
        last(shrinking(own_loss_only), first_layer="low-rank")


def halved(mark):
    """FedAvg at half of the rate, at the client."""

    @algorithm("halved", CLIENT_KEYS)
    def recipe(problem, s):
        @mark
        def client(term, broadcast, feed):
            def grad(x, step):
                loss, g = gradient(term, x, step.batches)
                return loss, scale(0.5, g)

            return client_update(term, s, broadcast, feed, grad)

        return fed_avg.build(problem, s)._replace(client=client)

    return recipe


def test_a_right_mark_is_accepted():
    found, x = last(halved(own_loss_only), first_layer="low-rank")
    assert found.forms.low_rank
    np.testing.assert_allclose(x, last(halved(lambda f: f))[1], rtol=1e-4, atol=1e-6)


def signs(mark):
    """FedAvg with the signs of each client's change: nothing that a low-rank change has."""

    @algorithm("signs", CLIENT_KEYS)
    def recipe(problem, s):
        @mark
        def summand(upload):
            return weighted_summand(s, upload._replace(own=jax.tree.map(jnp.sign, upload.own)))

        return fed_avg.build(problem, s)._replace(summand=summand)

    return recipe


def test_a_summand_of_the_users_own_gets_whole_changes():
    found, x = last(signs(lambda f: f), server_lr=0.01)
    assert not found.forms.low_rank
    np.testing.assert_array_equal(
        x, last(signs(lambda f: f), server_lr=0.01, first_layer="plain")[1]
    )
    with pytest.raises(mixfl.MixflError, match="marked with own_loss_only, but"):
        last(signs(own_loss_only), first_layer="low-rank")


# Fields of their own ------------------------------------------------------------------------------


@algorithm("counting", CLIENT_KEYS)
def counting(problem, s):
    """FedAvg whose clients get a number and a table, and send them back times their examples."""
    base = fed_avg.build(problem, s)

    def broadcast(state, drawn):
        extra = {"number": jnp.float32(3.0), "pair": (jnp.arange(2.0), jnp.ones((2, 2)))}
        return [sent._replace(extra=extra) for sent in base.broadcast(state, drawn)]

    def client(term, broadcast, feed):
        upload = base.client(term, broadcast, feed)
        return upload._replace(extra=scale(upload.weight, broadcast.extra))

    def update(state, broadcasts, sums, central):
        state, info = base.update(state, broadcasts, sums, central)
        more = {
            "got/number": sums[0].extra["number"] / sums[0].weight,
            "got/pair": jnp.sum(sums[0].extra["pair"][0]) / sums[0].weight,
        }
        return state, {**info, **more}

    return base._replace(broadcast=broadcast, client=client, update=update)


@pytest.mark.parametrize("way", [{}, dict(cohort_chunk=2), dict(devices=2), dict(clip=0.01)])
def test_own_fields_are_sent_and_added_up(way):
    p, s = problem(), settings(**way)
    simulator = Simulator(p, counting.build(p, s), s)
    (result,) = simulator.rounds(simulator.init(), 0, 1)
    assert float(result.info["got/number"]) == pytest.approx(3.0)
    assert float(result.info["got/pair"]) == pytest.approx(1.0)
    plain = Simulator(p, fed_avg.build(p, s), s).round_bytes(0)
    sent = simulator.round_bytes(0)
    assert (sent.down - plain.down, sent.up - plain.up) == (4 * 7, 4 * 7)


def test_centers_refuse_own_fields():
    p, s = problem(), settings(aggregation="median")
    simulator = Simulator(p, counting.build(p, s), s)
    with pytest.raises(mixfl.MixflError, match="send fields of its own too"):
        list(simulator.rounds(simulator.init(), 0, 1))

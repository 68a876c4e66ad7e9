"""A search: judged on validation data, pruned, resumed where it stopped, its best run repeated."""

import dataclasses
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
import tiny_problem

import mixfl
from mixfl.errors import Interrupted, MixflError
from mixfl.studies import search as searching
from mixfl.studies import tune as tuning
from mixfl.studies.space import Range, Values, parse_space

MIXFL = Path(sys.executable).with_name("mixfl")
OVER = {"client_lr": (1e-5, 1.0, "log"), "local_steps": [1, 2]}
KEYS: dict = dict(rounds=10, eval_every=1, checkpoint_every=2)


def validate(params):
    """The opposite of the test data: the model must not move."""
    return {"loss": jnp.sum(jnp.square(params["w"])) + jnp.square(params["b"])}


problem = dataclasses.replace(tiny_problem.problem, validate=validate)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("tune") / "search"
    return mixfl.tune(problem, OVER, ["pt", "2wgt"], out=out, trials=16, **KEYS)


def test_runs_are_judged_by_validation_data(found):
    assert found.metric == "valid/loss"
    assert found.validated
    finished = [f for f in found.found if f.state == "finished"]
    last = {f.folder: f.rows[-1] for f in finished}
    assert all(f.value == last[f.folder]["valid/loss"] for f in finished)
    assert found.best.value == min(row["valid/loss"] for row in last.values())
    # On the test data, it is not the best one.
    assert last[found.best.folder]["eval/loss"] > min(row["eval/loss"] for row in last.values())


def test_runs_that_are_not_promising_are_pruned(found):
    pruned = [f for f in found.found if f.state == "pruned"]
    assert pruned
    worst = max(f.value for f in found.found if f.state == "finished")
    for f in pruned:
        status = json.loads((found.out / f.folder / "status.json").read_text())
        assert status["status"] == "finished"
        assert status["stopped"].startswith("pruned: valid/loss")
        assert KEYS["rounds"] // 5 <= f.rows[-1]["round"] < KEYS["rounds"]
    assert max(f.value for f in pruned) <= worst * 10


def test_its_folders_are_those_of_a_sweep(found):
    from mixfl.report.from_runs import document

    assert len(document([found.out]).trials()) == len(found.found)
    content = json.loads((found.out / tuning.RESULTS).read_text())
    assert content["best"]["folder"] == found.best.folder
    assert content["best"]["folder"].startswith(f"{found.best.algorithm}/client_lr=")
    assert {run["algorithm"] for run in content["runs"]} == {"pt", "2wgt"}
    header, rows = tuning.table(found)
    assert header == ["setting", "", "valid loss", "test loss"]
    assert rows[0][0].startswith("* ")


def test_a_picture_of_it(found, tmp_path):
    from mixfl.report import tuning as picture

    picture.draw(found.found, found.metric, True, {"client_lr": True, "local_steps": False},
                 tmp_path / "tune.png")  # fmt: skip
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")


def test_a_search_that_was_stopped_goes_on_with_the_run_under_way(tmp_path, monkeypatch):
    made: list = []
    run = tuning.run

    def stopped(plan, folder, *more, callbacks):
        made.append(folder)

        def stop(event):
            if len(made) == 3 and event.round == 5:
                signal.raise_signal(signal.SIGINT)  # as Ctrl-C does

        return run(plan, folder, *more, callbacks=[*callbacks, stop])

    monkeypatch.setattr(tuning, "run", stopped)
    given = {**KEYS, "out": tmp_path / "s", "trials": 5, "prune": "none"}
    with pytest.raises(Interrupted):
        mixfl.tune(problem, OVER, ["pt"], **given)
    with pytest.raises(MixflError, match="holds a search already: --resume"):
        mixfl.tune(problem, OVER, ["pt"], **given)
    with pytest.raises(MixflError, match=r"another search .*over was"):
        mixfl.tune(problem, {"client_lr": (0.1, 1)}, ["pt"], resume=True, **given)
    ended = mixfl.tune(problem, OVER, ["pt"], resume=True, **given)
    assert made[3] == made[2]  # first, the one that was under way
    assert len(made) == 6
    states = [t.state.name for t in searching.Search(ended.asked, tmp_path / "s", 5).study.trials]
    assert states == ["COMPLETE"] * 5
    rounds = [row["round"] for row in mixfl.load(made[2]).metrics]
    assert rounds == list(range(1, 11))
    # More trials continue it; as many as before make none.
    mixfl.tune(problem, OVER, ["pt"], resume=True, **given)
    assert len(made) == 6
    mixfl.tune(problem, OVER, ["pt"], resume=True, **{**given, "trials": 6})
    assert len(made) == 7


def test_without_validation_data_it_says_so(tmp_path):
    ended = mixfl.tune(
        tiny_problem.problem, {"client_lr": [0.1, 3e38]}, ["pt"], out=tmp_path / "s", trials=4,
        prune="none", **KEYS,
    )  # fmt: skip
    assert (ended.metric, ended.validated) == ("eval/loss", False)
    words = "\n".join(tuning.verdict(ended))
    assert "no validation data" in words
    assert "the test data chose it" in words
    assert {f.state for f in ended.found} <= {"finished", "diverged"}
    assert ended.settings["client_lr"] == 0.1


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "what to search over"),
        (["client_lr=1:0.1"], "low < high"),
        (["client_lr=0:1:log"], "both above 0"),
        (["client_lr=a:b"], "expected numbers"),
        (["client_lr=1:2:cubic"], "low:high:log"),
        (["client_lr=1:2", "client_lr=3"], "given twice"),
        (["seed=1:9"], "one seed"),
        (["client_lr"], "expected key=v1,v2"),
    ],
)
def test_what_is_wrong_with_a_range_is_said(texts, words):
    with pytest.raises(MixflError, match=words):
        parse_space(texts)


def test_ranges_and_values():
    space = parse_space(["client_lr=1:10", "local_steps=1:8:log", "server_opt=sgd,adam"])
    assert space == {
        "client_lr": Range(1, 10),
        "local_steps": Range(1, 8, log=True, integer=True),
        "server_opt": Values(("sgd", "adam")),
    }


@pytest.mark.parametrize(
    ("over", "keys", "words"),
    [
        ({"client_rl": [1]}, {}, "unknown key 'client_rl'. Did you mean 'client_lr'"),
        ({"merge_lr": [1.0]}, {}, "merge_lr has no effect on fedavg"),
        ({"client_lr": [0.1]}, {"client_lr": 0.2}, "both searched"),
        ({"client_lr": (-1.0, 1.0)}, {}, "client_lr"),
        ({"client_lr": 0.1}, {}, "expected a list of values, or a range"),
    ],
)
def test_mistakes_show_before_the_first_run(over, keys, words, tmp_path):
    with pytest.raises(MixflError) as error:
        mixfl.tune(tiny_problem.problem, over, ["fedavg"], out=tmp_path / "s", **keys)
    assert words in str(error.value)
    assert not (tmp_path / "s").exists()


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MixflError, match=r"pip install 'mixfl\[tune\]'"):
        mixfl.tune(problem, OVER, ["pt"], out=tmp_path / "s", **KEYS)


@pytest.mark.system
@pytest.mark.parametrize("on", [[], ["--on", "slurm", "--on-option", "cluster=local"]])
def test_the_command_searches_with_two_workers_and_repeats_the_best(on, tmp_path):
    out, task = tmp_path / "s", f"{tiny_problem.__file__}:problem"
    ended = subprocess.run(
        [str(MIXFL), "tune", task, "--algorithms", "pt,2wgt", "--over", "client_lr=1e-3:1:log",
         "--over", "merge_lr=0.3,0.5", "--trials", "6", "--rounds", "4", "--jobs", "2", "--out",
         str(out), *on], capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    content = json.loads((out / tuning.RESULTS).read_text())
    assert "the test data chose it" in ended.stdout
    assert content["command"] in ended.stdout
    assert {p.name for p in out.iterdir()} >= {"tune.png", "report.html", "tune.journal"}
    best = out / content["best"]["folder"]
    program, *words = shlex.split(content["command"])
    assert program == "mixfl"
    again = subprocess.run(
        [str(MIXFL), *words, "--set", "devices=1", "--out", str(tmp_path / "again")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    model = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert model == (best / "model.safetensors").read_bytes()

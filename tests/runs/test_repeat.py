"""A run of a Python program: repeated from its config.toml, interrupted, and what it tells."""

import dataclasses
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib

import numpy as np
import pytest
import tiny_problem
from run_folders import TINY, after_round, assert_same, cli, lines, timeless, train

import mixfl
from mixfl.errors import Interrupted
from mixfl.runs.folder import differences
from mixfl.runs.found_again import task_of

SCRIPT = """
    import mixfl
    import tiny_problem

    problem = mixfl.Problem(
        tiny_problem.init, tiny_problem.problem.terms, tiny_problem.evaluate, tiny_problem.settings
    )
    mixfl.train(problem, mixfl.two_way_gt(client_lr=0.3), out="first", rounds=3, seed=4)
    raise SystemExit("only its problem is needed")
"""


def task(out):
    return tomllib.loads((out / "config.toml").read_text())["task"]


def test_script_is_repeated_to_the_same_bits(tmp_path, monkeypatch):
    shutil.copy(TINY, tmp_path)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    made = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=os.environ, capture_output=True, text=True
    )
    assert made.stderr.strip() == "only its problem is needed"
    assert task(tmp_path / "first") == f"{script}:problem"
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = tmp_path / "first" / "config.toml"
    assert cli(monkeypatch, "run", "--config", config, "--out", tmp_path / "again") == 0
    assert_same(tmp_path / "first", tmp_path / "again")
    assert (tmp_path / "again" / "config.toml").read_bytes() == config.read_bytes()


def test_problem_of_a_module_is_repeated(tmp_path, monkeypatch):
    train("pt", tmp_path / "first", rounds=2)
    assert task(tmp_path / "first") == f"{TINY}:problem"
    config = tmp_path / "first" / "config.toml"
    assert cli(monkeypatch, "run", "--config", config, "--out", tmp_path / "again") == 0
    assert_same(tmp_path / "first", tmp_path / "again")


def test_other_problems_say_what_to_do(tmp_path, monkeypatch, capsys):
    own = dataclasses.replace(tiny_problem.problem, name="mine")
    train("pt", tmp_path / "first", own, rounds=2)
    assert task(tmp_path / "first") == "python:mine"
    config = tmp_path / "first" / "config.toml"
    assert cli(monkeypatch, "run", "--config", config, "--out", tmp_path / "again") == 2
    said = capsys.readouterr().err
    assert "python:mine" in said
    assert "mixfl run path.py:problem --config" in said
    assert not (tmp_path / "again").exists()
    given = ("run", f"{TINY}:problem", "--config", config, "--out", tmp_path / "again")
    assert cli(monkeypatch, *given) == 0
    assert_same(tmp_path / "first", tmp_path / "again")


def test_other_data_is_said(tmp_path, monkeypatch, capsys):
    clients = mixfl.ClientData.from_arrays(
        tiny_problem.examples(9, 30, 0.0), client=np.arange(30) % 6
    )
    federated = dataclasses.replace(tiny_problem.federated, clients=clients)
    central = tiny_problem.problem.central[0]
    train("pt", tmp_path / "first", tiny_problem.problem.with_terms([federated, central]), rounds=1)
    given = ("--config", tmp_path / "first" / "config.toml", "--out", tmp_path / "again")
    assert cli(monkeypatch, "run", f"{TINY}:problem", *given) == 0
    assert "its data is not the same (federated clients was 6, now 12" in capsys.readouterr().err


FOUND = {
    "plain": ("problem = PROBLEM", True),
    "annotated": ("problem: object = PROBLEM", True),
    "one of several": ("other, problem = 1, PROBLEM", True),
    "a function has its own": ("problem = PROBLEM\ndef f():\n    problem = 1", True),
    "only when run": ("if __name__ != '':\n    problem = PROBLEM", False),
    "in a loop": ("for _ in range(2):\n    problem = PROBLEM", False),
    "twice": ("problem = PROBLEM\nproblem = PROBLEM", False),
    "loop variable": ("problem = PROBLEM\nfor problem in [PROBLEM]: pass", False),
    "by a function": ("def f():\n    global problem\n    problem = PROBLEM\nf()", False),
    "imported": ("from unknown import PROBLEM as problem", False),
}


@pytest.mark.parametrize("how", FOUND)
def test_problem_is_found_again_only_where_an_import_makes_it(how, tmp_path, monkeypatch):
    text, found = FOUND[how]
    problem = dataclasses.replace(tiny_problem.problem)
    file = tmp_path / "own.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("own_problems", file)
    module = importlib.util.module_from_spec(spec)
    module.PROBLEM = problem
    if how == "imported":
        module.problem = problem
    else:
        exec(compile(text, str(file), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "own_problems", module)
    assert module.problem is problem
    assert task_of(problem) == (f"{file}:problem" if found else "python:problem")


@pytest.mark.parametrize(
    ("earlier", "now", "same"),
    [
        ("problem", "/a/x.py:problem", True),  # earlier releases wrote the name alone
        ("python:problem", "/a/x.py:problem", True),
        ("/a/x.py:problem", "/b/x.py:problem", True),
        ("mine", "python:mine", True),
        ("smile", "python:smile", True),
        ("/a/x.py:problem", "/a/y.py:problem", False),
        ("mine", "python:other", False),
        ("smile", "/a/x.py:problem", False),
        ("smile", "text", False),
    ],
)
def test_which_tasks_may_be_the_same(earlier, now, same):
    assert (differences({"task": earlier}, {"task": now}) == []) is same


@pytest.mark.parametrize("kept", [True, False])
def test_interrupt_has_the_result(kept, tmp_path, monkeypatch):
    out = tmp_path / "run" if kept else None
    whole = train("2wgt", None, rounds=4)
    with monkeypatch.context() as patch:
        after_round(patch, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted, match="after round 4") as stopped:
            train("2wgt", out, rounds=9)
    result = stopped.value.result
    assert timeless(result.metrics) == timeless(whole.metrics)
    assert result.config["rounds"] == 9
    for name, array in whole.params.items():
        assert result.params[name].tobytes() == array.tobytes()
    if kept:
        assert lines(out) == result.metrics


def test_notes_are_logged_where_no_terminal_shows_them(caplog, capfd):
    clients = mixfl.ClientData.from_clients(
        {"full": tiny_problem.examples(1, 4, 0.0), "empty": tiny_problem.examples(1, 0, 0.0)}
    )
    federated = dataclasses.replace(tiny_problem.federated, clients=clients)
    problem = mixfl.Problem(tiny_problem.init, [federated], tiny_problem.evaluate)
    for progress in (None, False):
        caplog.clear()
        mixfl.train(problem, "fedavg", rounds=1, cohort_size=1, progress=progress)
        own = [r for r in caplog.records if (r.name, r.levelno) == ("mixfl", logging.WARNING)]
        assert sum("1 clients of 'federated' have no example" in r.message for r in own) == 1
    assert capfd.readouterr().out == ""

"""Every public name has a docstring with an example that runs; the keys have types."""

import doctest
import importlib
import inspect
import shutil
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_problem
import typed_keys

import mixfl
from mixfl.algorithms.contract import Recipe
from mixfl.typed_keys import Keys

CONSTANTS = ("ALGORITHMS", "__version__")  # have no docstring of their own


def names(module):
    return [n for n in importlib.import_module(module).__all__ if n not in CONSTANTS]


NAMES = [f"{m}.{n}" for m in ("mixfl", "mixfl.flower") for n in names(m)]


def check(name, tmp_path, monkeypatch, **more):
    """Runs the examples in the docstring of a name, in an empty folder."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    text = (thing.make if isinstance(thing, Recipe) else thing).__doc__ or ""
    given = {
        "mixfl": mixfl, "np": np, "jax": jax, "jnp": jnp, "loss": tiny_problem.loss,
        "clients": tiny_problem.clients, "problem": tiny_problem.problem, "init": tiny_problem.init,
        "central": tiny_problem.examples(2, 40, -0.5), "test": tiny_problem.test, **more,
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestParser().get_doctest(text, given, name, None, None)
    assert found.examples, f"{name} has no example: add one to its docstring, after >>>"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(found).failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_example(name, tmp_path, monkeypatch):
    importlib.import_module("mixfl.flower")
    check(name, tmp_path, monkeypatch)


def test_examples_of_pytorch(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    for name in names("mixfl.pytorch"):
        check(f"mixfl.pytorch.{name}", tmp_path, monkeypatch, torch=torch)


def test_every_method_says_what_it_does():
    """Then it is in the reference, too (website/reference.py)."""
    silent = []
    for module in ("mixfl", "mixfl.flower", "mixfl.pytorch"):
        for name in names(module):
            thing = getattr(importlib.import_module(module), name)
            members = vars(thing).items() if inspect.isclass(thing) else ()
            public = [(n, m) for n, m in members if not n.startswith("_")]
            kinds = (classmethod, staticmethod, property)
            silent += [
                f"{module}.{name}.{n}" for n, m in public
                if (inspect.isfunction(m) or isinstance(m, kinds)) and not m.__doc__
            ]  # fmt: skip
    assert silent == []


# Types


def test_keys_have_the_types_of_the_settings():
    said = "the keys have changed: run `python tests/support/typed_keys.py`, and commit the file"
    assert typed_keys.FILE.read_text() == typed_keys.content(), said


USE = """
from typing import Any, Unpack

from typed_keys import Keys

def train(problem: Any, **settings: Unpack[Keys]) -> None: ...

train(1, rounds=10, client_lr="cosine(0.1, 500)", clip=1, keep_best=True)
train(1, rounds="10")
train(1, cleint_lr=0.1)
train(1, weighting="example")
"""


def test_mypy_checks_the_keys(tmp_path):
    """Without the rest of mixfl, which takes mypy a minute."""
    from mypy import api

    (tmp_path / "use.py").write_text(USE)
    shutil.copy(typed_keys.FILE, tmp_path)
    cache = f"--cache-dir={tmp_path / 'cache'}"
    said, _, _ = api.run([str(tmp_path / "use.py"), str(tmp_path / "typed_keys.py"), cache])
    wrong = [line for line in said.splitlines() if "error:" in line]
    assert [int(line.split(":")[1]) for line in wrong] == [9, 10, 11], said
    assert 'did you mean "client_lr"' in wrong[1]
    assert inspect.signature(mixfl.train).parameters["settings"].annotation == Unpack[Keys]

"""Every block of code in README and docs is run, here or by the test of its page; and every command
there exists, with its options."""

import re
import shlex
import textwrap
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_problem

import mixfl
from mixfl.cli import cli

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(
    r"(?:^ *<!-- ([\w -]+?(?: [\w.]+)?) -->\n)?^( *)```python\n(.*?)^\2```", re.M | re.S
)
# Blocks with a mark, and the test that runs them.
RUN_BY = {
    "README.md": "project/test_quickstart.py",
    "algorithms.md": "project/test_algorithms_page.py",
    "architecture.md": "project/test_architecture.py",
    "data.md": "data/test_data_page.py",
    "experiments.md": "project/test_optuna.py",
    "export.md": "project/test_pages.py",
    "getting_started.md": "project/test_getting_started.py",
    "models.md": "project/test_pages.py project/test_rates_page.py",
    "participation.md": "project/test_pages.py",
    "privacy.md": "project/test_pages.py",
    "randomness.md": "project/test_pages.py",
}
HERE = {"index.md": ("train",), "mathematics.md": ("fixed point",)}


def blocks(page: Path) -> list[tuple[str, str]]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(mark, textwrap.dedent(code)) for mark, _, code in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_marked_blocks_are_run_by_the_test_of_their_page(page):
    for mark, _ in blocks(page):
        if mark and mark not in HERE.get(page.name, ()):
            files = [TESTS / name for name in RUN_BY[page.name].split()]
            tests = "".join(file.read_text(encoding="utf-8") for file in files)
            assert page.name in tests, page
            every = "<!-- ([" in tests or "<!-- file (" in tests  # it runs all marked blocks
            assert every or mark.split()[0] in tests, (page, mark)


def given() -> dict:
    """What the blocks without a mark take for granted."""
    rows = {"x": np.ones((4, 8), np.float32), "y": np.array([0, 1, 0, 1])}
    regions = {"x": np.ones((4, 4)), "y": np.ones(4), "region": np.array([0, 0, 1, 1])}
    return {
        "jax": jax, "jnp": jnp, "np": np, "optax": optax, "mixfl": mixfl, "loss": tiny_problem.loss,
        "metric": tiny_problem.loss, "init": tiny_problem.init, "evaluate": tiny_problem.evaluate,
        "clients": mixfl.ClientData.from_arrays(regions, client=[0, 0, 1, 1]),
        "phones": tiny_problem.clients, "tablets": tiny_problem.clients,
        "datacenter": tiny_problem.examples(2, 40, -0.5), "terms": tiny_problem.problem.terms,
        "own_examples": lambda node: rows, "central_examples": lambda: rows, "x": rows["x"],
        **dict.fromkeys(("seed", "round", "population", "client", "step", "position"), 1),
        "problem": mixfl.Problem(
            tiny_problem.init, tiny_problem.problem.terms, tiny_problem.evaluate,
            settings=dict(rounds=1, cohort_size=2, local_steps=1),
        ),
    }  # fmt: skip


def with_pytorch(names: dict) -> None:
    torch = pytest.importorskip("torch")
    from mixfl import pytorch

    names |= {"pytorch": pytorch, "nn": torch.nn, "F": torch.nn.functional}


def with_flax(names: dict) -> None:
    from flax import linen

    class Classifier(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(x)

    names["Classifier"] = Classifier


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: page.stem)
def test_other_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.name == "flower.md":
        pytest.importorskip("mixfl.flower")
    for mark, code in blocks(page):
        if mark and mark not in HERE.get(page.name, ()):
            continue
        names = given()
        if "nn." in code:
            with_pytorch(names)
        if "Classifier()" in code:
            with_flax(names)
        if "runs/mine" in code:
            mixfl.train(names["problem"], "fedavg", out="runs/mine")
        if page.name == "index.md":
            code = code.replace("rounds=100", "rounds=1, cohort_size=2")
            assert "rounds=1," in code
        exec(compile(code, page.name, "exec"), names)


def test_the_mathematics_says_what_it_computes(capsys):
    ((_, code),) = blocks(ROOT / "docs" / "mathematics.md")
    exec(code, {})
    assert capsys.readouterr().out == "minimum 0.200, Parallel Training 0.310, 1-way 0.200\n"


# Commands


def commands(page: Path) -> list[str]:
    """Lines of code that begin with mixfl, make or python, and such words between backquotes."""
    text = page.read_text(encoding="utf-8")
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^(?: {4,}|\$ )((?:mixfl|make|python) .*)$", joined, re.M)
    for fence in re.findall(r"^ *```(?:sh|console)\n(.*?)^ *```", joined, re.M | re.S):
        lines += re.findall(r"^\s*(?:\$ )?((?:mixfl|make|python) .*)$", fence, re.M)
    inline = re.findall(r"`((?:mixfl|make|python) [^`]+)`", " ".join(text.split()))
    return [part.strip() for line in lines + inline for part in re.split(r"&&|;|\|\s", line)]


def options_of(command: click.Command) -> dict[str, bool]:
    """Each option: does it take a value?"""
    found = {"--help": False, "-h": False, "--version": False}
    for parameter in command.params:
        flag = getattr(parameter, "is_flag", False) or getattr(parameter, "count", False)
        found |= dict.fromkeys((*parameter.opts, *parameter.secondary_opts), not flag)
    return found


def check_mixfl(words: list[str]) -> None:
    command, path, value = cli, "mixfl", False
    for word in (word.strip("[].,") for word in words):
        if value:  # of the option before it
            value = False
        elif word.startswith("-") and word not in ("-", "--"):
            known = options_of(command)
            assert word.partition("=")[0] in known, f"{path} has no option {word}"
            value = known[word.partition("=")[0]] and "=" not in word
        elif isinstance(command, click.Group) and not word.isupper():
            assert word in command.commands, f"{path} has no command {word}"
            command, path = command.commands[word], f"{path} {word}"


TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page):
    for line in commands(page):
        if not line.startswith(("mixfl ", "make ", "python ")):
            continue
        try:
            program, *words = shlex.split(line, comments=True)
        except ValueError:  # the rest of the line is in another place
            program, *words = line.split()
        if program == "mixfl":
            check_mixfl(words)
        elif program == "make":
            assert words[0] in TARGETS or "=" in words[0], line
        elif words[:1] == ["-m"] and words[1].startswith("benchmarks"):
            path = ROOT / words[1].replace(".", "/")
            assert path.with_suffix(".py").exists() or path.is_dir(), line
        elif words[0].endswith(".py") and "/" in words[0]:
            assert (ROOT / words[0]).exists(), line


def test_a_command_that_is_not_there_is_noticed():
    for wrong in (["rum", "smile"], ["run", "smile", "--algoritm", "pt"], ["flower", "down"]):
        with pytest.raises(AssertionError):
            check_mixfl(wrong)
    check_mixfl(["flower", "up", "all", "--run"])

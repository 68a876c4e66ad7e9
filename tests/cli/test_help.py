"""Help, examples, completion, and the nearest word for a wrong one."""

import os
import shlex
import shutil
import subprocess
import sys

import click
import pytest
from run_folders import cli as run_cli

from mixfl.cli import ALGORITHMS, cli
from mixfl.cli.groups import EXAMPLES, SECTIONS


def commands(command, name=""):
    if name:
        yield name, command
    for inner, of in getattr(command, "commands", {}).items():
        yield from commands(of, f"{name} {inner}".strip())


ALL = dict(commands(cli))


def test_every_command_is_in_one_section_of_the_help(monkeypatch, capsys):
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(cli.commands)
    assert run_cli(monkeypatch, "--help") == 0
    said = capsys.readouterr().out
    places = [said.index(f"\n{title}:") for title in SECTIONS]
    assert places == sorted(places)
    assert said.index("\n  run ") > places[0]


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_examples_that_are_understood(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()  # an example needs it
    command = ALL[name]
    assert (
        "Examples:" in click.Context(command, info_name=name).get_help()
        or name == "flower superexec"
    )
    for example in EXAMPLES[name]:
        words, group = shlex.split(example), cli
        while isinstance(group, click.Group) and words and words[0] in group.commands:
            group, words = group.commands[words[0]], words[1:]
        group.make_context(example, words)  # parses; an error would be raised
    assert {*EXAMPLES} == {*ALL}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("rnu", "'run'"), ("exprot", "'export'"), ("data inof", "'info'"),
        ("flower nwe x", "'new'"), ("run smlie --algorithm pt", "'smile'"),
        ("run smile --algorithm 2wgy", "'2wgt'"), ("run smile --algoritm pt", "--algorithm"),
        ("run smile --algorithm pt --track wandbb", "'wandb'"),
        ("export x --to onxn", "'onnx'"),
        ("run smile --algorithm pt --set client_lrr=1", "'client_lr'"),
        ("run smile --algorithm pt --preset demoo", "'demo'"),
    ],
)  # fmt: skip
def test_errors_name_the_nearest_word(words, hint, monkeypatch, capsys):
    assert run_cli(monkeypatch, *words.split()) == 2
    said = capsys.readouterr().err
    assert "Did you mean" in said
    assert hint in said


def completed(words, tmp_path):
    """What bash would be given after `mixfl words`."""
    env = os.environ | {
        "COMP_WORDS": f"mixfl {words}", "COMP_CWORD": str(len(f"mixfl {words}".split(" ")) - 1),
        "_MIXFL_COMPLETE": "bash_complete",
    }  # fmt: skip
    code = "import sys; sys.argv = ['mixfl']; from mixfl.cli import main; main(); "
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    return {line.partition(",")[2] for line in found.stdout.splitlines()}


def test_completion_knows_commands_tasks_algorithms_and_options(tmp_path):
    assert completed("wat", tmp_path) == {"watch"}
    assert completed("run sm", tmp_path) == {"smile"}
    assert completed("run smile --algorithm 2", tmp_path) == {"2wgt"}
    assert {"--rounds", "--resume"} <= completed("run smile --r", tmp_path)
    assert {a for a in ALGORITHMS if a.startswith("p")} == completed(
        "run smile --algorithm p", tmp_path
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_those_of_the_shell(shell, monkeypatch, capsys, tmp_path):
    assert run_cli(monkeypatch, "completion", shell) == 0
    script = capsys.readouterr().out
    assert "_MIXFL_COMPLETE" in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)

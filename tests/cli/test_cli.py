"""The command line as a program: start-up, the cache of compiled programs, tables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mixfl import cli
from mixfl.process.compilation_cache import trim

TINY = Path(__file__).parents[1] / "support" / "tiny_problem.py"


def mixfl(*words, env=None, cwd=None):
    command = [sys.executable, "-c", "from mixfl.cli import main; main()", *map(str, words)]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment | (env or {})
    )


LOADED = """
import sys
from mixfl.cli import main
try:
    main()
finally:
    print("loaded", sorted({"jax", "optax", "orbax", "matplotlib"} & set(sys.modules)))
"""
EARLY = {
    "--help": 0, "--version": 0, "run --help": 0, "compare --help": 0, "data prepare --help": 0,
    "keys": 0, "run smlie --algorithm pt": 2, "run smile --algorithm pd": 2, "run smile": 2,
    "run nowhere.py:problem --algorithm pt": 2, "compare smlie": 2, "check smlie": 2,
    "compare smile --algorithms pt,pd": 2, "run smile --algorithm pt --set lr": 2,
    "run --config nowhere.toml": 2, "nonsense": 2,
}  # fmt: skip


@pytest.mark.parametrize("words", EARLY)
def test_help_and_mistakes_do_not_wait_for_jax(words, tmp_path):
    command = [sys.executable, "-c", LOADED, *words.split()]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == EARLY[words], found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout.splitlines()[-1] == "loaded []"


def test_reproduce_writes_to_no_file(tmp_path):
    (tmp_path / "file").write_text("kept")
    command = [sys.executable, "-c", LOADED, "reproduce", "--out", "file"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr == "mixfl: --out file is a file: give a folder.\n"
    assert found.stdout == "loaded []\n"
    assert (tmp_path / "file").read_text() == "kept"


def test_the_names_of_the_algorithms_are_known_without_jax():
    from mixfl.algorithms import ALGORITHMS

    assert list(cli.ALGORITHMS) == list(ALGORITHMS)


def test_python_m_mixfl_is_the_command(tmp_path):
    words = ["run", "smlie", "--algorithm", "pt"]
    command = [sys.executable, "-m", "mixfl", *words]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr == mixfl(*words, cwd=tmp_path).stderr
    assert "Did you mean 'smile'" in found.stderr


def test_help_names_the_commands():
    shown = mixfl("--help").stdout
    assert all(command in shown for command in ("run", "compare", "check", "keys"))


FIRST_ROUND = """
import os, sys
from mixfl.cli import main
from mixfl.runs.sinks.terminal import Plain

def advance(self, done):
    slow = {"jax", "orbax", "matplotlib", "scipy", "pyarrow", "PIL", "mlflow"}
    print(done, sorted(slow & set(sys.modules)))
    sys.stdout.flush()
    os._exit(0)

Plain.advance = advance
main()
"""


def test_the_first_round_waits_for_no_module_that_it_does_not_need(tmp_path):
    words = ["compare", f"{TINY}:problem", "--rounds", "2", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-c", FIRST_ROUND, *words, "--jobs", "1"]  # in this process
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout == "1 ['jax']\n", found.stderr


RUN = ("run", f"{TINY}:problem", "--algorithm", "pt", "--rounds", "2", "--out")


def programs(cache):
    return {p.name: p.read_bytes() for p in (cache / "mixfl").glob("*-cache")}


def test_a_second_run_compiles_nothing(tmp_path):
    """Everything that is compiled is written to the cache, also the smallest program."""
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert mixfl(*RUN, tmp_path / "a", env=env).returncode == 0
    first = programs(tmp_path)
    assert any(name.startswith("jit__whole-") for name in first)
    assert len(first) > 5
    assert mixfl(*RUN, tmp_path / "b", env=env).returncode == 0
    assert programs(tmp_path) == first


@pytest.mark.system
def test_damaged_programs_are_replaced_without_a_word(tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    first = mixfl(*RUN, tmp_path / "a", env=env)
    assert first.returncode == 0, first.stderr
    entries = programs(tmp_path)
    damaged = sorted(entries)[::2]
    for name in damaged:
        (tmp_path / "mixfl" / name).write_bytes(entries[name][:100])
    second = mixfl(*RUN, tmp_path / "b", env=env)
    assert second.returncode == 0, second.stderr
    assert "Warning" not in second.stderr
    again = programs(tmp_path)
    assert not any(len(content) == 100 for content in again.values())
    assert again.keys() <= entries.keys()
    model = "model.safetensors"
    assert (tmp_path / "a" / model).read_bytes() == (tmp_path / "b" / model).read_bytes()


def test_the_programs_not_used_for_longest_are_removed(tmp_path):
    for i in range(10):
        (tmp_path / f"p{i}-cache").write_bytes(bytes(100))
        os.utime(tmp_path / f"p{i}-cache", (1000 + i, 1000))
    (tmp_path / "other").write_bytes(bytes(10_000))
    trim(tmp_path, 1000)
    assert len(list(tmp_path.iterdir())) == 11
    trim(tmp_path, 999)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other"] + [
        f"p{i}-cache" for i in range(6, 10)
    ]
    trim(tmp_path / "not yet there", 999)


def test_keys_lists_every_key_and_the_tasks_own():
    shown = mixfl("keys", "smile").stdout
    from mixfl.settings import KEYS

    assert all(key in shown for key in KEYS)
    assert "difficulty" in shown
    assert "presets: cpu, demo, paper" in shown


def test_data_prepare_and_info(tmp_path):
    source = tmp_path / "rows.csv"
    source.write_text("user,x,y\n" + "".join(f"u{i % 3},{i},{i % 2}\n" for i in range(9)))
    words = ("data", "prepare", "table", "--client", "user", "--from", source, "--to")
    made = mixfl(*words, tmp_path / "store")
    assert made.returncode == 0, made.stderr
    assert "3 clients, 9 examples" in made.stdout
    shown = mixfl("data", "info", tmp_path / "store")
    assert "clients    3" in shown.stdout
    again = mixfl(*words, tmp_path / "store")
    assert again.returncode == 2
    assert "already exists" in again.stderr


def test_a_long_round_shows_its_progress_without_a_terminal(monkeypatch, capsys):
    from mixfl.engine.base import Progress
    from mixfl.runs.sinks import terminal
    from mixfl.runs.sinks.base import Start

    monkeypatch.setattr(terminal, "WITHIN_SECONDS", 0)
    report = terminal.Plain()
    report.begin(Start("2wgt", "problem", {}, rounds=10))
    report.within(Progress(3, 0.4, "40 of 100 clients"))
    assert capsys.readouterr().out == "2wgt: round 4/10: 40 of 100 clients\n"

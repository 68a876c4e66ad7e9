"""The command line as a program: start-up, the cache of compiled programs, tables."""

import os
import subprocess
import sys
from pathlib import Path

TINY = Path(__file__).parent / "tiny_problem.py"


def mixfl(*words, env=None, cwd=None):
    command = [sys.executable, "-c", "from mixfl.cli import main; main()", *map(str, words)]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment | (env or {})
    )


def test_help_does_not_wait_for_jax():
    probe = "import sys, mixfl.cli; print(sorted({'jax', 'numpy', 'optax'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
    shown = mixfl("--help").stdout
    assert all(command in shown for command in ("run", "compare", "check", "keys"))


def test_a_damaged_program_cache_is_emptied_without_a_word(tmp_path):
    run = ("run", f"{TINY}:problem", "--algorithm", "pt", "--rounds", "2", "--out")
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    first = mixfl(*run, tmp_path / "a", env=env)
    entries = list((tmp_path / "mixfl").glob("*-cache"))
    assert first.returncode == 0, first.stderr
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:100])
    second = mixfl(*run, tmp_path / "b", env=env)
    assert second.returncode == 0, second.stderr
    assert "Warning" not in second.stderr
    assert not any(e.exists() and e.stat().st_size == 100 for e in entries)
    model = "model.safetensors"
    assert (tmp_path / "a" / model).read_bytes() == (tmp_path / "b" / model).read_bytes()


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
    assert "exists already" in again.stderr


def test_a_long_round_shows_its_progress_without_a_terminal(monkeypatch, capsys):
    from mixfl.runs import progress

    monkeypatch.setattr(progress, "WITHIN_SECONDS", 0)
    report = progress.Plain()
    report.start("2wgt", 0, 10)
    report.within(3, 0.4, "40 of 100 clients")
    assert capsys.readouterr().out == "2wgt: round 4/10: 40 of 100 clients\n"

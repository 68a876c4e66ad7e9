"""The README's quickstart, run as it is written there."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def quickstart() -> str:
    found = re.search(r"<!-- quickstart -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    return found[1]


def test_the_first_screen_has_the_picture_the_install_line_and_25_lines():
    assert 10 < len(quickstart().strip().splitlines()) <= 25
    first = README.read_text().partition("\n## ")[0]
    order = [first.index(part) for part in ("docs/demo.png", "pip install", quickstart())]
    assert order == sorted(order)
    assert len(first[: order[-1]].splitlines()) < 20


def test_mixed_fl_learns_what_fl_alone_cannot(capsys):
    names: dict = {"__name__": "__main__"}
    exec(quickstart(), names)
    shown = capsys.readouterr().out
    assert float(re.search(r"'eval/accuracy': ([0-9.]+)", shown)[1]) > 0.9
    import mixfl

    alone = mixfl.train(names["problem"], mixfl.fed_avg())
    assert alone.metrics[-1]["eval/accuracy"] == pytest.approx(0.5, abs=0.1)


def test_every_command_of_the_readme_takes_the_saved_file(tmp_path, monkeypatch, capsys):
    from mixfl.cli import cli

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(quickstart())
    commands = re.findall(r"^    mixfl (.*mine\.py.*?)(?:#.*)?$", README.read_text(), re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        shorter = {"check": [], "diagnose": ["--budget", "1"]}
        short = shorter.get(command.split()[0], ["--rounds", "2"])
        words = command.replace("--trials 5", "").split() + short
        try:
            cli(words, standalone_mode=False)
        except SystemExit as end:
            assert end.code == 0, words
    assert Path("runs/diagnose-mine/diagnosis.html").exists()
    assert Path("runs/mine/model.safetensors").exists()
    assert Path("runs/compare-mine/comparison.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "All" in shown
    for words in ("Use ", "Why", "central_batch", "downloads", "What would change this"):
        assert words in shown  # diagnose's

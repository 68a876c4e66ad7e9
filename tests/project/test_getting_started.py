"""docs/getting_started.md, followed word by word, with fewer rounds."""

import re
from pathlib import Path

import pytest

import mixfl
from mixfl.cli import cli

PAGE = (Path(__file__).parents[2] / "docs" / "getting_started.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, code in FILES.items():
        Path(name).write_text(code)
    exec(compile(FILES["make_data.py"], "make_data.py", "exec"), {})


def test_the_page_has_three_files():
    assert [*FILES] == ["make_data.py", "mine.py", "use.py"]


@pytest.mark.usefixtures("folder")
def test_mixed_fl_is_right_nearly_always_and_fl_alone_is_not():
    names: dict = {}
    exec(compile(FILES["mine.py"], "mine.py", "exec"), names)
    right = {
        algorithm: mixfl.train(names["problem"], algorithm).metrics[-1]["eval/accuracy"]
        for algorithm in ("fedavg", "2wgt")
    }
    assert 0.45 < right["fedavg"] < 0.7
    assert right["2wgt"] > 0.9


@pytest.mark.system
@pytest.mark.usefixtures("folder")
def test_every_command_of_the_page_works(capsys, monkeypatch):
    commands = re.findall(r"^    mixfl (.*)$", PAGE, re.MULTILINE)
    shorter = {
        "run": ["--rounds", "2"],
        "compare": ["--rounds", "2"],
        "diagnose": ["--budget", "1"],
    }
    assert [c.split()[0] for c in commands] == [
        "--version", "check", "run", "compare", "diagnose", "predict", "export", "card", "watch"
    ]  # fmt: skip
    monkeypatch.setattr("mixfl.watch.server.Server.serve_forever", lambda *_, **__: None)
    for command in commands:
        try:
            cli([*command.split(), *shorter.get(command.split()[0], [])], standalone_mode=False)
        except SystemExit as end:
            assert end.code == 0, command
    assert Path("runs/compared/comparison.png").exists()
    assert Path("runs/compared/report.html").exists()
    predicted, given = (Path(n).read_text().splitlines() for n in ("predictions.csv", "server.csv"))
    assert predicted[0] == '"probability"'
    assert len(predicted) == len(given)
    said = capsys.readouterr().out
    assert "the outputs for 8 examples agree" in said
    assert "# mine.py:problem, trained with 2-way" in said
    assert "http://127.0.0.1:" in said
    exec(compile(FILES["use.py"], "use.py", "exec"), {})
    assert "'w'" in capsys.readouterr().out

"""Runs of a reproduction as one file: judged again elsewhere, with nothing made again."""

import json
import lzma

import pytest
import tomli_w
from click.testing import CliRunner

from benchmarks.archive import main, pack, unpack
from mixfl.studies import reproduce
from mixfl.studies.trials import done

STUDY = """
title = "One look"
task = "smile"

[quick]
preset = "demo"
trials = 3

[[series]]
algorithms = ["pt", "1wgt"]

[[claim]]
number = 1
says = "1-way is better"
checks = [{ kind = "better", metric = "eval/loss", of = "1wgt", than = "pt" }]
"""


@pytest.fixture(params=[False, True], ids=["synthetic", "real"])
def made(request, tmp_path):
    """A reproduction whose runs are written by hand: losses of pt are 2.x, of 1-way 1.x."""
    file, out = tmp_path / "mine.toml", tmp_path / "out"
    file.write_text(STUDY)
    data = tmp_path / "here" if request.param else None
    if data:
        (data / "celeba").mkdir(parents=True)
    reproduce.remember(out, [str(file)], "quick", data)
    (study,) = reproduce.chosen([str(file)], "quick", data)
    for i, trial in enumerate(study.trials()):
        folder = out / "runs" / trial.folder
        folder.mkdir(parents=True)
        loss = (2 if trial.algorithm == "pt" else 1) + i / 1234.56789
        rows = [{"round": r, "eval/loss": loss, "time/round_ms": 3.3} for r in (5, 10)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        (folder / "config.toml").write_text(tomli_w.dumps(trial.wanted() | {"format": 2}))
        (folder / "status.json").write_text('{"status": "finished", "round": 10}')
    return file, out, data


def test_what_is_unpacked_is_judged_alike_and_not_made_again(made, tmp_path):
    file, out, data = made
    packed = tmp_path / "runs.jsonl.xz"
    assert pack(out, packed) == 6
    assert str(tmp_path).encode() not in b"".join(map(bytes, reads(packed)))
    there = None
    if data:
        there = tmp_path / "there"  # the same data, elsewhere and by its other name
        (there / "smile").mkdir(parents=True)
    assert unpack(packed, tmp_path / "again", there) == 6
    assert unpack(packed, tmp_path / "again", there) == 0
    (study,) = reproduce.chosen([str(file)], "quick", there)
    assert all(done(t, tmp_path / "again" / "runs") for t in study.trials())
    first, again = reproduce.made([out]), reproduce.made([tmp_path / "again"])
    assert again.findings == first.findings
    assert first.findings[0].verdict == "agree"


def reads(packed):
    """Its lines, without the request, which names the user's own study file."""
    return lzma.decompress(packed.read_bytes()).splitlines()[1:]


def test_real_runs_need_their_data_and_others_none(made, tmp_path):
    _, out, data = made
    pack(out, tmp_path / "runs.jsonl.xz")
    wrong = [] if data else ["--data", str(tmp_path)]
    command = ["unpack", str(tmp_path / "runs.jsonl.xz"), str(tmp_path / "again"), *wrong]
    ended = CliRunner().invoke(main, command)
    assert ended.exit_code == 1
    assert ("give --data" if data else "leave out --data") in ended.output
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("made", [True], indirect=True, ids=["real"])
def test_without_the_data_of_a_task_nothing_is_written(made, tmp_path):
    _, out, _ = made
    pack(out, tmp_path / "runs.jsonl.xz")
    (tmp_path / "other" / "text").mkdir(parents=True)
    command = ["unpack", str(tmp_path / "runs.jsonl.xz"), str(tmp_path / "again")]
    ended = CliRunner().invoke(main, [*command, "--data", str(tmp_path / "other")])
    assert ended.exit_code == 1
    assert "has no data of the task smile" in ended.output
    assert not (tmp_path / "again").exists()


def test_a_run_that_is_not_over_is_left_out(made, tmp_path):
    _, out, _ = made
    first = next((out / "runs").glob("*/*/status.json"))
    first.write_text('{"status": "interrupted", "round": 5}')
    assert pack(out, tmp_path / "runs.jsonl.xz") == 5


@pytest.mark.parametrize(
    "content",
    [
        b"no archive",
        lzma.compress(b""),
        lzma.compress(b"{}\nno json"),
        lzma.compress(b'{}\n{"folder": "../../elsewhere"}'),
        lzma.compress(b'{}\n{"folder": "/tmp/elsewhere"}'),
        lzma.compress(b'{}\n{"status": {}}'),
        lzma.compress(b"[]\n[1]"),
    ],
)
def test_another_file_is_refused_and_nothing_is_written(content, tmp_path):
    (tmp_path / "other.xz").write_bytes(content)
    command = ["unpack", str(tmp_path / "other.xz"), str(tmp_path / "in" / "out")]
    ended = CliRunner().invoke(main, command)
    assert ended.exit_code == 1
    assert "is no archive of runs, or damaged" in ended.output
    assert [p.name for p in tmp_path.iterdir()] == ["other.xz"]

"""Files of older formats are read, those of newer ones are refused with what to do, and another
release of mixfl is no reason to refuse anything."""

import json
import tomllib

import numpy as np
import pyarrow as pa
import pytest
import tomli_w
from run_folders import TINY, assert_same, cli, lines, train, train_until

import mixfl
from mixfl.data.store import FORMAT
from mixfl.data.writer import StoreWriter
from mixfl.errors import MixflError
from mixfl.format_versions import CHECKPOINT, RUN_FOLDER, STORE, check_format
from mixfl.runs import manifest, origin
from mixfl.runs.best import rewind
from mixfl.studies.trials import Trial, done


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "2wgt"
    train("2wgt", out)
    return out


@pytest.fixture
def stopped(tmp_path):
    """A run that ended after round 6, with checkpoints of rounds 2, 4 and 6."""
    out = tmp_path / "run"
    train_until("2wgt", out, at=7)
    return out


def snapshot(out) -> dict:
    return {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}


# Client stores


@pytest.fixture
def store(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        for i in range(3):
            writer.add(i, {"x": np.full((i + 1, 2), i, np.float32)})
    return tmp_path / "store"


def schema(store) -> pa.Schema:
    return pa.ipc.open_file(store / "data.arrow").schema


def renumber_store(store, number) -> None:
    """As if it had been written with that format."""
    file = pa.ipc.open_file(pa.BufferReader((store / "data.arrow").read_bytes()))
    metadata = None if number is None else {FORMAT: number}
    schema = file.schema.with_metadata(metadata)
    with pa.ipc.new_file(str(store / "data.arrow"), schema) as writer:
        for i in range(file.num_record_batches):
            writer.write_batch(file.get_batch(i).replace_schema_metadata(metadata))


def test_a_store_says_its_format(store):
    assert schema(store).metadata[FORMAT.encode()] == str(STORE).encode()


def test_a_store_without_a_number_is_read(store):
    renumber_store(store, None)
    assert not schema(store).metadata
    clients = mixfl.ClientData.open(store)
    assert clients.offsets.tolist() == [0, 1, 3, 6]
    assert clients.examples.all()["x"].tolist() == [[i, i] for i in (0, 1, 1, 2, 2, 2)]


def test_a_newer_store_is_refused(store):
    renumber_store(store, str(STORE + 1))
    expected = (
        rf"store was made by a newer mixfl \(format {STORE + 1}, this one reads up to {STORE}\): "
    )
    with pytest.raises(MixflError, match=expected + "update mixfl, or prepare the data again"):
        mixfl.ClientData.open(store)


def test_a_store_with_a_damaged_number_is_damaged(store):
    renumber_store(store, "two")
    with pytest.raises(MixflError, match="is damaged"):
        mixfl.ClientData.open(store)


# Checkpoints


def renumber_checkpoint(folder, number) -> None:
    content = json.loads((folder / manifest.FILE).read_text())
    del content["digest"], content["format"]
    content |= {} if number is None else {"format": number}
    content["digest"] = manifest._own(content)
    (folder / manifest.FILE).write_text(json.dumps(content))


def test_a_checkpoint_says_its_format(stopped):
    for folder in (stopped / "checkpoints").iterdir():
        assert manifest.read(folder)["format"] == CHECKPOINT


def test_a_checkpoint_without_a_number_is_read(whole, stopped, capsys):
    for folder in (stopped / "checkpoints").iterdir():
        renumber_checkpoint(folder, None)
    train("2wgt", stopped, resume=True, progress=True)
    assert "going on from the checkpoint of round 6" in capsys.readouterr().err
    assert_same(stopped, whole)


def test_a_newer_checkpoint_is_refused_and_kept(stopped):
    """It is not damaged: the one before it is not taken instead."""
    renumber_checkpoint(stopped / "checkpoints" / "6", 3)
    before = snapshot(stopped / "checkpoints")
    message = r"checkpoints/6 was made by a newer mixfl \(format 3, .* update mixfl"
    with pytest.raises(MixflError, match=message):
        train("2wgt", stopped, resume=True)
    with pytest.raises(MixflError, match=message):
        mixfl.load(stopped, best=True)
    assert snapshot(stopped / "checkpoints") == before


# Run folders


def change_config(out, **changes) -> None:
    """A change of None removes the key."""
    config = tomllib.loads((out / "config.toml").read_text()) | changes
    content = tomli_w.dumps({k: v for k, v in config.items() if v is not None})
    (out / "config.toml").write_text(content)


def test_a_run_folder_says_its_format(whole):
    assert mixfl.load(whole).config["format"] == RUN_FOLDER


def test_a_run_folder_without_a_number_is_read_and_goes_on(whole, stopped):
    change_config(stopped, format=None)
    assert len(mixfl.load(stopped).metrics) == 6
    train("2wgt", stopped, resume=True)
    assert_same(stopped, whole)
    assert "format" not in mixfl.load(stopped).config  # it is still what it was


def test_a_newer_run_folder_is_refused(stopped, monkeypatch, capsys):
    change_config(stopped, format=RUN_FOLDER + 1)
    before = snapshot(stopped)
    message = rf"was made by a newer mixfl \(format {RUN_FOLDER + 1}, .* update mixfl, or make the"
    with pytest.raises(MixflError, match=message):
        mixfl.load(stopped)
    with pytest.raises(MixflError, match=message):
        train("2wgt", stopped, resume=True)
    with pytest.raises(MixflError, match=message):
        rewind(stopped, print)
    (stopped / "status.json").write_text('{"status": "finished", "round": 7}')
    with pytest.raises(MixflError, match=message):
        done(Trial(f"{TINY}:problem", "2wgt", "", "2wgt"), stopped)
    out = stopped.parent / "again"
    assert cli(monkeypatch, "run", "--config", stopped / "config.toml", "--out", out) == 2
    assert "was made by a newer mixfl" in capsys.readouterr().err
    assert not out.exists()
    assert {p: b for p, b in before.items() if p.name != "status.json"}.items() <= snapshot(
        stopped
    ).items()


@pytest.mark.parametrize("number", ["two", 0, 1.5, True])
def test_a_format_that_is_no_number(number, tmp_path):
    with pytest.raises(MixflError, match=r"expected a number from 1 to 2.*: make it again"):
        check_format(tmp_path, number, 2, "make it again")


# Another release


def test_a_run_of_another_release_goes_on(whole, stopped, capsys):
    change_config(stopped, version="0.0.9")
    entries = json.loads((stopped / origin.FILE).read_text())
    entries[0]["versions"]["mixfl"] = "0.0.9"
    (stopped / origin.FILE).write_text(json.dumps(entries))
    train("2wgt", stopped, resume=True, progress=True)
    assert f"mixfl was 0.0.9, now {mixfl.__version__}" in capsys.readouterr().err
    assert_same(stopped, whole)


def test_a_finished_trial_of_another_release_is_taken(tmp_path, monkeypatch):
    keys = {"rounds": 2, "seed": 0}
    words = ["run", f"{TINY}:problem", "--algorithm", "pt", "--rounds", 2, "--seed", 0]
    assert cli(monkeypatch, *words, "--out", tmp_path / "pt") == 0
    change_config(tmp_path / "pt", version="0.0.9", format=None)
    trial = Trial(f"{TINY}:problem", "pt", "pt", "pt", keys=keys)
    ended = done(trial, tmp_path)
    assert (ended.status, ended.round, ended.rows) == ("finished", 2, lines(tmp_path / "pt"))
    other = Trial(f"{TINY}:problem", "pt", "pt", "pt", keys=keys | {"seed": 1})
    with pytest.raises(MixflError, match="seed was 0, now 1"):
        done(other, tmp_path)

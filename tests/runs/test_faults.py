"""Whatever happens to a run, nothing is lost: what can't be read, damage, full disks, other data,
clients that are gone, a model that was spoiled."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import deployed
import flower_grid
import jax
import numpy as np
import pytest
import tiny_problem
from run_folders import (
    ROUNDS,
    after_round,
    array_files,
    assert_equal_trees,
    assert_same,
    cli,
    evaluating,
    events,
    expected_events,
    flip,
    kept,
    lines,
    timeless,
    train,
    train_until,
    truncate,
)

import mixfl
from mixfl.deploy.flower.engine import DeployedEngine
from mixfl.errors import MixflError
from mixfl.runs import checkpoint, manifest, orbax, origin
from mixfl.runs.alarm import jumped
from mixfl.runs.checkpoint import KEEP, Checkpoints
from mixfl.runs.folder import RunFolder
from mixfl.runs.reading import read_metrics

TINY = Path(tiny_problem.__file__)
ROOT = Path(__file__).parents[2]
TWO_DEVICES = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}  # as here
MIXFL = Path(sys.executable).with_name("mixfl")


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


def status(out) -> dict:
    return json.loads((out / "status.json").read_text())


def set_aside(out) -> set[str]:
    return {str(p.relative_to(out)) for p in out.glob("aside-*/**/*")}


# What can't be read is not damaged


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("where", ["a file", "Orbax", "the folder"])
def test_a_checkpoint_that_cannot_be_read_is_kept(code, where, whole, stopped, monkeypatch):
    before = kept(stopped)

    def failing(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        if where == "a file":
            patch.setattr(manifest, "_digest", failing)
        elif where == "Orbax":
            patch.setattr(orbax, "load", failing)
        else:
            patch.setattr(checkpoint.Path, "iterdir", failing)
        with pytest.raises(MixflError, match=f"{os.strerror(code)}. Nothing was changed"):
            train("2wgt", stopped, resume=True)
    assert kept(stopped) == before
    assert not set_aside(stopped)
    train("2wgt", stopped, resume=True)
    assert_same(stopped, whole)


FEW_FILES = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from run_folders import MixflError, kept, train

out, failed = Path(sys.argv[1]), 0
before = kept(out)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for more in range(1, 60, 3):
    highest = max(int(p.name) for p in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, hard))
    try:
        train("2wgt", out, resume=True)
        break
    except (MixflError, OSError):
        failed += 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    now = kept(out)  # and maybe more, where it got further
    assert all(now[p].startswith(content) for p, content in before.items())
print(failed)
"""


def test_nothing_is_lost_where_few_files_may_be_open(whole, stopped):
    """The system's own errors, wherever they come: at the lock, at the metrics, within Orbax."""
    code = [sys.executable, "-c", FEW_FILES, str(stopped), str(TINY.parent), str(ROOT)]
    ended = subprocess.run(code, capture_output=True, text=True, env=TWO_DEVICES)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0
    assert not set_aside(stopped)
    train("2wgt", stopped, resume=True)
    assert_same(stopped, whole)


def test_a_checkpoint_without_a_manifest_is_read_by_its_digest(whole, stopped, capsys):
    """As they were written before there were manifests."""
    for file in (stopped / "checkpoints").glob(f"*/{manifest.FILE}"):
        file.unlink()
    train("2wgt", stopped, resume=True, progress=True)
    assert "going on from the checkpoint of round 6" in capsys.readouterr().err
    assert_same(stopped, whole)


def test_without_a_manifest_an_error_is_no_damage(stopped):
    (stopped / "checkpoints" / "6" / manifest.FILE).unlink()
    truncate(array_files(stopped / "checkpoints" / "6")[0])
    before = kept(stopped)
    with pytest.raises(MixflError, match=r"checkpoints/6 can't be read.*move that folder away"):
        train("2wgt", stopped, resume=True)
    assert kept(stopped) == before


# Damage


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_what_is_damaged_is_moved_aside_with_the_rows_that_are_made_again(damage, whole, stopped):
    files = array_files(stopped / "checkpoints" / "6")
    rows = (stopped / "metrics.jsonl").read_bytes()
    damage(files[0])
    left = {p.name for p in (stopped / "checkpoints/6").rglob("*")}
    train("2wgt", stopped, resume=True)
    assert {p.name for p in (stopped / "aside-1/checkpoints/6").rglob("*")} == left
    assert (stopped / "aside-1/metrics.jsonl").read_bytes() == rows
    assert_same(stopped, whole)


def test_beginning_anew_is_asked_for(whole, stopped, capsys):
    for round in ("2", "4", "6"):
        truncate(array_files(stopped / "checkpoints" / round)[0])
    before = kept(stopped)
    for _ in range(2):
        with pytest.raises(MixflError, match=r"are damaged \(6: .*4: .*2: .*--restart"):
            train("2wgt", stopped, resume=True)
        assert kept(stopped) == before
    train("2wgt", stopped, restart=True)
    assert_same(stopped, whole)
    assert events(stopped) == expected_events(lines(stopped))
    aside = stopped / "aside-1"
    assert {p: (aside / p).read_bytes() for p in before} == before


def test_checkpoints_that_are_gone_are_missed(whole, stopped):
    for folder in (stopped / "checkpoints").iterdir():
        folder.rename(stopped.parent / folder.name)
    rows = (stopped / "metrics.jsonl").read_bytes()
    with pytest.raises(MixflError, match=r"had one at about round 6.*--restart"):
        train("2wgt", stopped, resume=True)
    assert (stopped / "metrics.jsonl").read_bytes() == rows
    train("2wgt", stopped, restart=True)
    assert_same(stopped, whole)


def test_restart_of_a_finished_run_and_in_a_new_folder(whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    run = ["run", f"{TINY}:problem", "--algorithm", "pt", "--rounds", 2, "--out", out, "--restart"]
    for n in range(3):
        assert cli(monkeypatch, *run) == 0
        assert len(list(out.glob("aside-*"))) == n
    assert (out / "aside-2/model.safetensors").read_bytes() == (
        out / "model.safetensors"
    ).read_bytes()
    assert cli(monkeypatch, *run, "--resume") == 2


# The best checkpoint, and the alarm


def spoiled(from_round, loss=28.0, algorithm="2wgt"):
    """The problem, whose loss jumps in a round. It is evaluated once before the first."""
    base, calls = tiny_problem.problem, iter(range(1000))

    def evaluate(params):
        n = next(calls)
        found = float(base.evaluate(params)["loss"])
        return {"loss": loss if n >= from_round else found - 0.01 * n}

    return dataclasses.replace(base, evaluate=evaluate)


LONG = dict(rounds=14, checkpoint_every=1, devices=1)


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    out = tmp_path / "run"
    result = train("2wgt", out, spoiled(8), **LONG)
    rounds = sorted(int(p.name) for p in (out / "checkpoints").iterdir())
    assert rounds == [7, 12, 13, 14]
    assert len(rounds) == KEEP + 1
    losses = [row["eval/loss"] for row in result.metrics]
    assert min(losses) == losses[6]
    best = mixfl.load(out, best=True)
    expected = mixfl.train(tiny_problem.problem, "2wgt", rounds=7, devices=1, **ADAPTIVE)
    assert_equal_trees(best.params, jax.tree.map(np.asarray, expected.params))
    like = tiny_problem.init(jax.random.key(0))
    assert_equal_trees(mixfl.load(out, like, best=True).params, best.params)


def test_the_best_checkpoint_is_not_removed_where_it_cannot_be_read(tmp_path, monkeypatch):
    """A read error while others are removed, or damage, does not make another one the best."""
    checkpoints = Checkpoints(tmp_path)
    x = np.zeros(3)
    for round, loss in enumerate([0.1, 0.5, 0.5, 0.5], start=1):
        checkpoints.save(round, [x + round], {}, manifest.Judged("eval/loss", loss))
    assert checkpoints.rounds() == [4, 3, 2, 1]
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "read", few_files)
        checkpoints.save(5, [x + 5], {}, manifest.Judged("eval/loss", 0.5))
        with pytest.raises(MixflError, match="can't be read"):
            checkpoints.best()
    assert checkpoints.rounds() == [5, 4, 3, 2, 1]
    checkpoints.save(6, [x + 6], {}, manifest.Judged("eval/loss", 0.5))
    assert checkpoints.rounds() == [6, 5, 4, 1]
    (tmp_path / "1" / manifest.FILE).write_text("{")
    checkpoints.save(7, [x + 7], {}, manifest.Judged("eval/loss", 0.5))
    assert 1 in checkpoints.rounds()


def few_files(_):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


ADAPTIVE = dict(
    client_opt="sgd(momentum=0.9)", server_opt="adam", server_lr=0.05, central_opt="adam",
    central_lr=0.02, merge_opt="sgd(momentum=0.5)",
)  # fmt: skip


def test_a_jump_is_told_counted_and_undone(tmp_path, capsys):
    out = tmp_path / "run"
    result = train("2wgt", out, spoiled(8), progress=True, **LONG)
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "jumped" in line)
    assert "to 28 in round 8" in said
    seventh = result.metrics[6]["eval/loss"]
    assert f"the best is of round 7, eval/loss {seventh:.4g}: --from-best goes on there" in said
    assert [row.get("alarms/loss", 0) for row in result.metrics] == [0] * 7 + [1] * 7
    assert status(out) == {"status": "finished", "round": 14, "alarms": 1}
    rows = (out / "metrics.jsonl").read_bytes()
    again = train("2wgt", out, from_best=True, progress=True, **LONG)
    assert "going back to the best checkpoint, of round 7" in capsys.readouterr().err
    expected = train("2wgt", tmp_path / "whole", **LONG)
    assert_equal_trees(again.params, expected.params)
    assert [row["round"] for row in lines(out)] == list(range(1, 15))
    assert (out / "aside-1/metrics.jsonl").read_bytes() == rows
    assert set_aside(out) >= {f"aside-1/checkpoints/{r}" for r in (12, 13, 14)}
    assert events(out) == expected_events(lines(out))


def test_the_best_checkpoint_survives_a_restart(tmp_path):
    out = tmp_path / "run"

    def problem(at):
        spoil = spoiled(3)
        calls = iter(range(1000))

        def evaluate(params):
            if next(calls) == at:
                raise MixflError("stopped")
            return spoil.evaluate(params)

        return dataclasses.replace(spoil, evaluate=evaluate)

    with pytest.raises(MixflError, match="stopped"):
        train("2wgt", out, problem(9), **LONG)
    first = mixfl.load(out, best=True).params
    train("2wgt", out, spoiled(0), resume=True, **LONG)
    assert sorted(int(p.name) for p in (out / "checkpoints").iterdir()) == [2, 12, 13, 14]
    assert_equal_trees(mixfl.load(out, best=True).params, first)


def test_rewind_is_for_runs_of_a_deployment(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    train("2wgt", out, spoiled(8), **LONG)
    assert cli(monkeypatch, "rewind", out) == 0
    assert "round 7" in capsys.readouterr().out
    assert not (out / "model.safetensors").exists()
    assert json.loads((out / "status.json").read_text())["status"] == "interrupted"
    assert sorted(int(p.name) for p in (out / "checkpoints").iterdir()) == [7]
    assert cli(monkeypatch, "rewind", tmp_path) == 2


def test_no_best_without_a_loss(tmp_path):
    problem = dataclasses.replace(tiny_problem.problem, evaluate=lambda params: {"auc": 1.0})
    train("2wgt", tmp_path / "run", problem)
    with pytest.raises(MixflError, match="no best model"):
        mixfl.load(tmp_path / "run", best=True)
    with pytest.raises(MixflError, match="no best checkpoint"):
        train("2wgt", tmp_path / "run", problem, from_best=True)


def alarms(curve) -> list[int]:
    return [n for n in range(1, len(curve)) if jumped(list(curve[: n + 1]))]


def falling(n, noise, seed):
    rng = np.random.default_rng(seed)
    return 0.5 + np.exp(-np.arange(n) / 10) + noise * rng.normal(size=n)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.05, 0.15])
def test_noise_is_no_jump(noise):
    for seed in range(50):
        assert alarms(falling(200, noise, seed)) == []


def test_jumps():
    curve = falling(60, 0.02, 1)
    curve[30:] += 27
    assert alarms(curve) == [30]  # once, though it stays
    once = falling(60, 0.02, 2)
    once[[20, 50]] += 5
    assert alarms(once) == [20, 50]
    assert alarms([0.9, 0.8, 0.7, 0.65, 0.6, 28.0]) == [5]
    assert alarms([-5.0, -5.1, -5.2, -5.1, -5.2, -1.0]) == [5]  # losses may be negative


def test_what_is_no_jump():
    assert alarms([1.0, 28.0, 30.0, 2.0, 50.0]) == []  # nothing is known yet
    assert alarms([1.0] * 20 + [1.2]) == []  # unusual, but small
    assert alarms(np.linspace(1, 10, 100)) == []  # steady
    assert alarms([0.0] * 9) == []


@pytest.mark.slow
@pytest.mark.parametrize("task", ["smile", "text", "movie"])
def test_the_demo_tasks_give_no_alarm(task, tmp_path):
    for algorithm in ("2wgt", "fedavg"):
        run = [str(MIXFL), "run", task, "--preset", "demo", "--algorithm", algorithm]
        out = tmp_path / algorithm
        subprocess.run([*run, "--out", str(out), "--set", "eval_every=2"], check=True)
        assert not any("alarms/loss" in row for row in lines(out))


# How it ended


@pytest.mark.parametrize(
    "error", [MemoryError(), KeyboardInterrupt(), RuntimeError("of XLA"), SystemExit(3), OSError()]
)
def test_a_run_that_dies_has_failed(error, whole, tmp_path, monkeypatch):
    out = tmp_path / "run"

    def die():
        raise error

    with monkeypatch.context() as patch:
        after_round(patch, 5, die)
        with pytest.raises(type(error)):
            train("2wgt", out, devices=1)
    found = status(out)
    assert (found["status"], found["saved"]) == ("failed", 4)
    assert type(error).__name__ in found["message"]
    assert not (out / "model.safetensors").exists()
    train("2wgt", out, resume=True, devices=1)
    assert status(out) == {"status": "finished", "round": ROUNDS}


def test_a_run_that_dies_at_its_beginning_has_failed(stopped, monkeypatch):
    (stopped / "status.json").write_text('{"status": "running", "round": 6, "saved": 6}')

    def failing(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(RunFolder, "keep_metrics", failing)
    with pytest.raises(RuntimeError):
        train("2wgt", stopped, resume=True)
    expected = {"status": "failed", "round": 6, "saved": 6, "message": "RuntimeError: no"}
    assert status(stopped) == expected


def gone(*rounds) -> dict:
    """Clients that hang in these rounds, counted from 1."""
    return {(str(t - 1), i): flower_grid.hang for t in rounds for i in range(4)}


def test_a_run_whose_last_rounds_were_skipped_has_failed_and_makes_them_again(tmp_path):
    keys = dict(rounds=12, checkpoint_every=5)
    out = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(MixflError, match=r"rounds 4 to 12 were skipped.*from round 3"):
            deployed.deploy(out=out, faults=gone(*range(4, 13)), **keys)
        assert (status(out)["status"], status(out)["round"]) == ("failed", 12)
        assert not (out / "model.safetensors").exists()
    _, _, said = deployed.deploy(out=out, **keys)
    assert "going on from the checkpoint of round 3" in said
    deployed.deploy(out=tmp_path / "whole", **keys)
    model = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() == model
    assert [row["round"] for row in lines(out)] == [r["round"] for r in lines(tmp_path / "whole")]


def test_a_run_that_failed_by_skipped_rounds_may_die_before_it_saves_again(tmp_path, monkeypatch):
    keys, out = dict(rounds=12, checkpoint_every=5), tmp_path / "run"
    for _ in range(2):
        with pytest.raises(MixflError, match=r"rounds 4 to 12 were skipped.*from round 3"):
            deployed.deploy(out=out, faults=gone(*range(4, 13)), **keys)
        with monkeypatch.context() as patched:
            patched.setattr(DeployedEngine, "_round", dies)
            with pytest.raises(RuntimeError):
                deployed.deploy(out=out, **keys)
        assert [p.name for p in (out / "checkpoints").iterdir()] == ["3"]
    _, _, said = deployed.deploy(out=out, **keys)
    assert "going on from the checkpoint of round 3" in said
    assert status(out)["status"] == "finished"


def dies(*_):
    raise RuntimeError("no")


def test_a_few_skipped_rounds_at_the_end_are_told(tmp_path):
    _, _, said = deployed.deploy(out=tmp_path / "run", rounds=5, faults=gone(4, 5))
    assert "rounds 4 to 5 were skipped: the model is that of round 3" in said
    assert status(tmp_path / "run")["status"] == "finished"


def test_a_run_of_nothing_but_skipped_rounds_has_failed(tmp_path):
    with pytest.raises(MixflError, match="round 1 was skipped"):
        deployed.deploy(out=tmp_path / "run", rounds=1, faults=gone(1))
    deployed.deploy(out=tmp_path / "run", rounds=1)
    assert status(tmp_path / "run")["status"] == "finished"


# Other data, another version


def with_data(change):
    """The problem, with something else about the clients' columns."""
    columns = tiny_problem.examples(1, sum(tiny_problem.SIZES), 0.3)
    owner = np.repeat(np.arange(len(tiny_problem.SIZES)), tiny_problem.SIZES)
    columns, owner = change(columns, owner)
    clients = mixfl.ClientData.from_arrays(columns, client=owner)
    federated = dataclasses.replace(tiny_problem.federated, clients=clients)
    terms = [federated, *tiny_problem.problem.terms[1:]]
    return dataclasses.replace(tiny_problem.problem, terms=terms)


def one_value(columns, owner):
    columns["x"][17, 2] += 1e-3
    return columns, owner


def one_less(columns, owner):
    return {k: a[:-1] for k, a in columns.items()}, owner[:-1]


def another_owner(columns, owner):
    owner[5] += 1  # an example of one client is another's
    return columns, owner


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (one_value, "federated: other values"),
        (one_less, "federated examples was 72, now 71"),
        (another_owner, "federated: other values"),
    ],
)
def test_other_data_is_noticed(change, words, stopped, capsys):
    before = kept(stopped)
    with pytest.raises(MixflError, match=rf"up to round 6 \(.*{words}.*--changed-data"):
        train("2wgt", stopped, with_data(change), resume=True)
    assert kept(stopped) == before
    train("2wgt", stopped, with_data(change), resume=True, changed_data=True, progress=True)
    assert "going on with other data from round 6 on" in capsys.readouterr().err
    told = json.loads((stopped / origin.FILE).read_text())
    assert [entry["round"] for entry in told] == [0, 6]


def test_another_version_is_told(whole, stopped, capsys):
    file = stopped / origin.FILE
    told = json.loads(file.read_text())
    told[0]["versions"]["jax"] = "0.9.1"
    file.write_text(json.dumps(told))
    train("2wgt", stopped, resume=True, progress=True)
    err = capsys.readouterr().err
    assert f"jax was 0.9.1, now {jax.__version__}: the last bits of its numbers may be" in err
    assert_same(stopped, whole)


def test_a_run_without_an_origin_goes_on_without_a_word(whole, stopped, capsys):
    (stopped / origin.FILE).unlink()
    train("2wgt", stopped, resume=True, progress=True)
    assert "last bits" not in capsys.readouterr().err
    assert_same(stopped, whole)


def test_of_large_data_a_part_is_looked_at(monkeypatch):
    monkeypatch.setattr(origin, "SOME_BYTES", 100)
    seen = []
    take = mixfl.Examples.take
    patched = lambda self, rows: (seen.append(len(rows)), take(self, rows))[1]  # noqa: E731
    monkeypatch.setattr(mixfl.Examples, "take", patched)
    problem = tiny_problem.problem
    first = origin.data(problem)
    assert max(seen) <= 100 // problem.terms[0].examples.example_bytes
    assert origin.data(problem) == first
    assert first.keys() == {"federated", "central"}
    assert origin.data(deployed.placed("two terms")[0]).keys() == {"central"}


# A full disk, a real one


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be mounted here: {getattr(error, 'stderr', error)}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk, leave=0):
    """To the last byte but `leave`."""
    room = os.statvfs(disk)
    size = room.f_bavail * room.f_bsize - leave
    with open(disk / "ballast", "wb") as file:
        file.write(b"x" * max(size, 0))


def resumed_equals(whole, out, disk):
    (disk / "ballast").unlink()
    train("2wgt", out, resume=True, devices=1)
    assert not [p for p in out.rglob("*") if p.name.endswith((".partial", "-tmp"))]
    assert timeless(lines(out)) == timeless(lines(whole))
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "2wgt"
    train("2wgt", out, devices=1)
    return out


@pytest.mark.parametrize("leave", [0, 4096, 16 << 10, 40 << 10])
@pytest.mark.parametrize("at", [1, 4, ROUNDS])
def test_a_disk_that_gets_full_during_a_run(at, leave, on_one, small_disk):
    """While a round is evaluated; then come its metrics, its events and maybe a checkpoint."""
    out = small_disk / "run"
    problem = evaluating("2wgt", lambda n: fill(small_disk, leave) if n == at else None)
    with pytest.raises(MixflError, match=r"could not be written.*No space left.*--resume"):
        train("2wgt", out, problem, devices=1)
    found = status(out)
    assert found["status"] == "failed"
    assert "No space left" in found["message"]
    rows = [row["round"] for row in read_metrics(out)]
    saved = Checkpoints(out / "checkpoints").rounds()
    assert rows == list(range(1, len(rows) + 1))
    assert len(rows) >= max(saved, default=0) >= at - 2
    resumed_equals(on_one, out, small_disk)


def test_a_disk_that_is_full_for_the_model(on_one, small_disk, monkeypatch):
    out, save = small_disk / "run", RunFolder.save_model

    def full(self, params):
        fill(small_disk)
        save(self, params)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_model", full)
        with pytest.raises(MixflError, match=r"model.safetensors could not be written.*No space"):
            train("2wgt", out, devices=1)
    assert status(out)["status"] == "failed"
    resumed_equals(on_one, out, small_disk)

"""Two real processes on loopback: the same bits as one, one folder, and none waits for ever."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import noisy_process
import numpy as np
import pytest
import several_processes
from problems import problem, settings
from safetensors.numpy import load_file

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine.feeding import Feeder
from mixfl.runs.plan import plan
from mixfl.runs.sinks.terminal import Quiet
from mixfl.runs.training import run

TASK = f"{Path(several_processes.__file__)}:problem"
CALL = [sys.executable, "-c", "from mixfl.cli import main; main()"]
NAMES = ["fedavg", "pt", "1wgt", "2wgt"]
HANGS = 600  # seconds: only against waiting for ever


def start(folder, *arguments, only=(0, 1), own=((), ()), env=None, program=None):
    """Starts processes of mixfl, or of a `program`, each in a folder of its own; process 1 first,
    process 0 may send to it. Returns by number: (exit code, stdout, stderr)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(mixfl.__file__).parents[1]
    running = {}
    for i in sorted(only, reverse=True):
        (folder / str(i)).mkdir(exist_ok=True)
        variables = os.environ | {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(i), "PYTHONPATH": str(root),
        } | (env or {})  # fmt: skip
        if i == 0 and "SIGNAL" in variables:
            variables["SIGNAL"] = f"{running[1].pid},{variables['SIGNAL']}"
        command = [*CALL, *arguments, *own[i], "--distributed"]
        running[i] = subprocess.Popen(
            [sys.executable, program] if program else command, cwd=folder / str(i), text=True,
            env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    try:
        ended = {i: (child.communicate(timeout=HANGS), child) for i, child in running.items()}
    finally:
        for child in running.values():
            child.kill()
    return {i: (child.returncode, out, err) for i, ((out, err), child) in ended.items()}


def rows(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in lines]


def same_run(one, two):
    for file in ("model.safetensors", "config.toml"):
        assert (one / file).read_bytes() == (two / file).read_bytes()
    assert rows(one) == rows(two)


def test_two_processes_equal_one(tmp_path):
    compare = ("compare", TASK, "--algorithms", ",".join(NAMES), "--set", "devices=2")
    ended = start(tmp_path, *compare, "--out", "runs")
    for code, _, err in ended.values():
        assert code == 0, err
    assert "after training" in ended[0][1]
    assert "after training" not in ended[1][1]
    assert not list((tmp_path / "1").iterdir())  # only process 0 writes
    for name in NAMES:
        two = tmp_path / "0" / "runs" / name
        run(plan(TASK, name, given={"devices": 2}), tmp_path / name, False, Quiet())
        same_run(tmp_path / name, two)
        one = mixfl.train(several_processes.problem, name, devices=1).params
        for leaf, array in load_file(two / "model.safetensors").items():
            np.testing.assert_allclose(array, one[leaf], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_ended_in_whatever_way_they_resume_to_the_same_bits(tmp_path):
    keys = {"devices": 2, "cohort_chunk": 5}
    setting = [text for k, v in keys.items() for text in ("--set", f"{k}={v}")]
    command = ("run", TASK, "--algorithm", "2wgt", *setting, "--out", "run", "--resume")
    out = tmp_path / "0" / "run"

    # One is killed; the other says so and ends.
    ended = start(tmp_path, *command, env={"SIGNAL": f"{int(signal.SIGKILL)},2"})
    assert ended[1][0] == -signal.SIGKILL
    assert ended[0][0] == 2, ended[0][2]
    assert "a sum over the processes failed" in ended[0][2]
    assert json.loads((out / "status.json").read_text())["status"] == "failed"

    # One is asked to stop; both do, after saving.
    ended = start(tmp_path, *command, env={"SIGNAL": f"{int(signal.SIGTERM)},1"})
    assert [code for code, *_ in ended.values()] == [130, 130], ended
    assert json.loads((out / "status.json").read_text())["status"] == "interrupted"

    ended = start(tmp_path, *command)
    assert [code for code, *_ in ended.values()] == [0, 0], ended
    assert "going on from the checkpoint" in ended[0][2]
    run(plan(TASK, "2wgt", given=keys), tmp_path / "one", False, Quiet())
    same_run(tmp_path / "one", out)


def test_other_settings_in_one_process_are_an_error_in_all(tmp_path):
    own = ((), ("--set", "client_lr=0.3"))
    ended = start(tmp_path, "run", TASK, "--algorithm", "fedavg", own=own)
    for code, _, err in ended.values():
        assert code == 2
        assert "client_lr: 0.3 and not 0.2" in err
        assert "Traceback" not in err
    assert not list(tmp_path.glob("*/runs"))


def test_noise_of_privacy_is_added_once_and_is_the_same_in_all_processes(tmp_path):
    ended = start(tmp_path, program=noisy_process.__file__)
    for code, _, err in ended.values():
        assert code == 0, err
    first, second = (np.load(tmp_path / str(i) / "tables.npz") for i in range(2))
    for name in ("seeded", "secret", "again"):
        np.testing.assert_array_equal(first[name], second[name])
    # As in one process. (The seed decides the cohort's order too, so the sums have the same bits.)
    np.testing.assert_allclose(first["seeded"], noisy_process.table(3), atol=1e-7)
    deviation = noisy_process.NOISE * noisy_process.CLIP / noisy_process.COHORT
    for part in (first["secret"][:50], first["secret"][50:]):  # rows of clients, and others
        error = 4 / np.sqrt(2 * part.size)
        assert np.std(part) == pytest.approx(deviation, rel=max(0.01, error))
    assert not np.any(first["secret"] == first["again"])  # each run has its own key


def test_a_missing_process_is_an_error(tmp_path):
    wait = {"MIXFL_WAIT_SECONDS": "2"}
    ended = start(tmp_path, "run", TASK, "--algorithm", "fedavg", only=[0], env=wait)
    code, _, err = ended[0]
    assert code == 2
    assert "did not come" in err
    assert not list(tmp_path.glob("*/runs"))


def test_distributed_without_others_says_how():
    lone = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI", "JAX_CO"))}
    done = subprocess.run(
        [*CALL, "run", TASK, "--algorithm", "fedavg", "--distributed"], env=lone, text=True,
        capture_output=True, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 2
    assert "JAX_COORDINATOR_ADDRESS" in done.stderr


# Without processes: what each of them reads.


@pytest.mark.parametrize("name", ["pt", "1wgt", "example-transfer", "oracle", "baseline"])
@pytest.mark.parametrize(("cohort", "chunk"), [(5, 8), (3, 2), (1, 1)])
def test_the_parts_of_the_processes_are_the_whole(name, cohort, chunk):
    p = problem("regularizer" if name == "baseline" else "two terms")
    s = settings(cohort_size=cohort, cohort_chunk=chunk, central_batch="auto", central_chunk=4)
    algorithm = ALGORITHMS[name].build(p, s)
    whole = list(Feeder(p, s, 4).pieces(algorithm, 3))
    parts = [list(Feeder(p, s, 4, own=(i, 2)).pieces(algorithm, 3)) for i in range(2)]
    assert len(whole) == len(parts[0]) == len(parts[1])
    for piece, *some in zip(whole, *parts, strict=True):
        joined = jax.tree.map(lambda *a: np.concatenate(a), *(b.clients for b in some))
        masks = jax.tree.map(np.array_equal, *(masked(c) for c in (joined, piece.clients)))
        assert all(jax.tree.leaves(masks))
        if piece.drawn is not None:
            joined = jax.tree.map(lambda *a: np.concatenate(a, 2), *(b.drawn for b in some))
            jax.tree.map(np.testing.assert_array_equal, joined, piece.drawn)


def masked(clients):
    """Without padding, which may differ."""

    def zero(feed):
        data = jax.tree.map(
            lambda a: a * feed.batches.mask.reshape(*feed.batches.mask.shape, *[1] * (a.ndim - 3)),
            feed.batches.data,
        )
        real = feed.batches.mask.any((1, 2))
        share = jax.tree.map(lambda a: a[real], feed.share)
        return feed._replace(batches=feed.batches._replace(data=data), share=share)

    return [zero(feed) for feeds in clients for feed in feeds]


def test_no_process_reads_another_ones_clients():
    p, s = problem(), settings(cohort_size=6, devices=2)
    algorithm = ALGORITHMS["fedavg"].build(p, s)
    read = []
    for i in range(2):
        feeder = Feeder(p, s, 2, own=(i, 2))
        (piece,) = feeder.pieces(algorithm, 0)
        data = piece.clients[0][0].batches.data["x"]
        assert len(data) == 3
        read.append({tuple(row) for row in data.reshape(-1, data.shape[-1]).tolist()})
    assert not read[0] & read[1]

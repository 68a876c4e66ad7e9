"""Runs that are really killed (SIGKILL) at random moments and resumed end with the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_problem

from mixfl.algorithms import ALGORITHMS
from mixfl.runs.directory import read_metrics

MIXFL = Path(sys.executable).with_name("mixfl")
TINY = Path(tiny_problem.__file__)
ROUNDS = 14
ATTEMPTS = 4  # at one kill: a run may end before it
# Optimizers with a state wherever the algorithm has one.
SETTINGS = {
    "rounds": ROUNDS, "checkpoint_every": 1, "client_opt": "sgd(momentum=0.9)",
    "server_opt": "adam", "server_lr": 0.05, "central_opt": "adam", "central_lr": 0.02,
    "merge_opt": "sgd(momentum=0.5)",
}  # fmt: skip


def settings(algorithms) -> list[str]:
    uses = set().union(*(ALGORITHMS[a].uses for a in algorithms))
    return [arg for k, v in SETTINGS.items() if k in uses for arg in ("--set", f"{k}={v}")]


def task(algorithm) -> str:
    return f"{TINY}:{'regularized' if algorithm == 'baseline' else 'problem'}"


def command(algorithm, out) -> list[str]:
    run = [str(MIXFL), "run", task(algorithm), "--algorithm", algorithm, "--out", str(out)]
    return [*run, "--resume", *settings([algorithm])]


def check(arguments, env) -> str:
    done = subprocess.run(arguments, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


QUICK = ("fedavg", "pt", "2wgt")


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """A compilation cache that all processes share, to start sooner."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.fixture
def whole(tmp_path_factory, env, algorithm):
    """The folder with an uninterrupted run of the algorithm."""
    out = tmp_path_factory.mktemp("whole")
    compare = [str(MIXFL), "compare", task(algorithm), "--algorithms", algorithm]
    check([*compare, "--jobs", "1", "--out", str(out), *settings([algorithm])], env)
    return out


# Moments to kill at: each gives a function that says whether its moment has come.


def starting(out, chance):
    return lambda: (out / "status.json").exists()


def after_some_lines(out, chance):
    enough = len(read_metrics(out)) + chance.randint(1, 4)
    return lambda: len(read_metrics(out)) >= enough


def while_writing_a_checkpoint(out, chance):
    which, seen = chance.randint(1, 4), set()

    def come():
        seen.update(p.name for p in (out / "checkpoints").glob("*.orbax-checkpoint-tmp"))
        return len(seen) >= which

    return come


def at_the_end(out, chance):
    return lambda: len(read_metrics(out)) == ROUNDS


MOMENTS = {
    starting: 0.5, after_some_lines: 0.03, while_writing_a_checkpoint: 0.03, at_the_end: 0.05
}  # and the longest delay after them, in seconds  # fmt: skip
PLAN = {
    "fedavg": [starting, while_writing_a_checkpoint],
    "pt": [after_some_lines, while_writing_a_checkpoint, at_the_end],
    "1wgt": [while_writing_a_checkpoint, while_writing_a_checkpoint],
    "2wgt": [while_writing_a_checkpoint, after_some_lines, while_writing_a_checkpoint],
    "example-transfer": [after_some_lines, while_writing_a_checkpoint],
    "oracle": [while_writing_a_checkpoint, at_the_end],
    "central": [starting, after_some_lines],
    "pretrain": [after_some_lines, while_writing_a_checkpoint, after_some_lines],
    "baseline": [while_writing_a_checkpoint, after_some_lines],
}


def killed(algorithm, out, moment, chance, env) -> bool:
    """Starts or resumes the run and kills it at the moment; False if it ended before."""
    come, delay = moment(out, chance), chance.uniform(0, MOMENTS[moment])
    null = subprocess.DEVNULL
    child = subprocess.Popen(command(algorithm, out), env=env, stdout=null, stderr=null)
    try:
        while not come() and child.poll() is None:
            time.sleep(0.001)
        time.sleep(delay)
    finally:
        child.kill()
    return child.wait() == -signal.SIGKILL


def timeless(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def test_there_are_at_least_twenty_kills_of_all_algorithms():
    assert PLAN.keys() == ALGORITHMS.keys()
    assert sum(map(len, PLAN.values())) >= 20


@pytest.mark.parametrize(
    "algorithm",
    [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in ALGORITHMS],
)
def test_killed_and_resumed_equals_uninterrupted(algorithm, whole, tmp_path, env):
    chance = random.Random(algorithm)
    outs = [tmp_path / "run0"]
    kills = 0
    for moment in PLAN[algorithm]:
        for _ in range(ATTEMPTS):
            if killed(algorithm, outs[-1], moment, chance, env):
                kills += 1
                break
            outs.append(tmp_path / f"run{len(outs)}")  # it was too fast: kill another one
    assert kills == len(PLAN[algorithm])
    for out in outs:
        err = check(command(algorithm, out), env)
        assert "damaged" not in err  # what is half-written does not count as a checkpoint
        model = (out / "model.safetensors").read_bytes()
        assert model == (whole / algorithm / "model.safetensors").read_bytes()
        assert timeless(out) == timeless(whole / algorithm)
        assert not [p for p in out.rglob("*") if p.name.endswith((".partial", "-tmp"))]

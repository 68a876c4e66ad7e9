"""Runs that are really killed (SIGKILL) at random moments and resumed end with the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_problem

from mixfl.algorithms import ALGORITHMS
from mixfl.runs.reading import read_metrics

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


QUICK = ("fedavg", "pt", "2wgt", "scaffold")


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


def writing(out) -> list[Path]:
    """The checkpoint that is half there."""
    return list((out / "checkpoints").glob(".partial/*"))


# Moments to kill at: each gives a function that says whether its moment has come.


def starting(out, chance):
    return lambda: (out / "status.json").exists()


def after_some_lines(out, chance):
    enough = len(read_metrics(out)) + chance.randint(1, 4)
    return lambda: len(read_metrics(out)) >= enough


def while_writing_a_checkpoint(out, chance):
    which, seen = chance.randint(1, 4), set()

    def come():
        seen.update(p.name for p in writing(out))
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
    "server-learning": [while_writing_a_checkpoint, after_some_lines],
    "fedclg": [after_some_lines, while_writing_a_checkpoint],
    "mimelite": [while_writing_a_checkpoint, at_the_end],
    "scaffold": [after_some_lines, while_writing_a_checkpoint, after_some_lines],
}


class Kill(NamedTuple):
    dead: bool  # or it ended before
    inside: bool  # of a checkpoint


def killed(algorithm, out, moment, chance, env) -> Kill:
    """Starts or resumes the run and kills it at the moment."""
    come, delay = moment(out, chance), chance.uniform(0, MOMENTS[moment])
    null = subprocess.DEVNULL
    child = subprocess.Popen(command(algorithm, out), env=env, stdout=null, stderr=null)
    try:
        while not come() and child.poll() is None:
            time.sleep(0.001)
        time.sleep(delay)
    finally:
        child.kill()
    return Kill(child.wait() == -signal.SIGKILL, bool(writing(out)))


def timeless(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.parametrize(
    "algorithm",
    [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in ALGORITHMS],
)
def test_killed_and_resumed_equals_uninterrupted(algorithm, whole, tmp_path, env):
    chance = random.Random(algorithm)
    outs = [tmp_path / "run0"]
    for moment in PLAN[algorithm]:
        for _ in range(ATTEMPTS):
            if killed(algorithm, outs[-1], moment, chance, env).dead:
                break
            outs.append(tmp_path / f"run{len(outs)}")  # it was too fast: kill another one
        else:
            pytest.fail(f"the run always ended before it could be killed: {moment.__name__}")
    for out in outs:
        assert_unharmed(algorithm, out, whole, env)


def assert_unharmed(algorithm, out, whole, env) -> None:
    err = check(command(algorithm, out), env)
    assert "damaged" not in err  # what is half-written does not count as a checkpoint
    model = (out / "model.safetensors").read_bytes()
    assert model == (whole / algorithm / "model.safetensors").read_bytes()
    assert timeless(out) == timeless(whole / algorithm)
    assert not [p for p in out.rglob("*") if p.name.endswith((".partial", "-tmp", ".old"))]
    assert not list(out.glob("aside-*"))


@pytest.mark.parametrize("algorithm", ["2wgt"])
@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_again_and_again(kills, algorithm, whole, tmp_path, env):
    """At random moments, among them inside a checkpoint; a run that is over is one more to look at,
    and another is begun."""
    chance, outs, dead, inside = random.Random(kills), [tmp_path / "run0"], 0, 0
    while dead < kills or inside < 1 + kills // 10:
        assert len(outs) <= kills
        moment = chance.choices(list(MOMENTS), [1, 3, 5, 1])[0]
        kill = killed(algorithm, outs[-1], moment, chance, env)
        dead, inside = dead + kill.dead, inside + (kill.dead and kill.inside)
        if not kill.dead or (outs[-1] / "model.safetensors").exists():
            outs.append(tmp_path / f"run{len(outs)}")
    print(f"{dead} kills, {inside} of them inside a checkpoint, {len(outs)} runs")
    for out in outs:
        assert_unharmed(algorithm, out, whole, env)

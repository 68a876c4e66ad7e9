"""Secure aggregation with real processes, of which some are killed at each stage."""

import jax
import pytest

import mixfl
from benchmarks.deployment import Deployment

pytestmark = pytest.mark.flower

# Appended to the project's app.py: a worker kills itself at its n-th message of a kind, once.
DEADLY = """
import collections
import os
import signal

from mixfl.deploy.flower import apps

seen = collections.Counter()


def deadly(problem, kind, content, context):
    number, stage, flag = os.environ.get("KILL_AT", "0 - -").split()
    seen.update(content.get("secure", {}))
    if seen[stage] == int(number) and not os.path.exists(flag) and stage in content["secure"]:
        open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return apps.answer(problem, kind, content, context)


client = mixfl.flower.client_app(problem, deadly)
"""
STAGES = {"node-2": "1 roster", "node-3": "2 boxes", "node-4": "3 survivors"}


@pytest.mark.slow  # a quarter of an hour with deadlines: make test-chaos
def test_workers_are_killed_at_each_stage(tmp_path):
    """Of four nodes, one each is killed when it should share, train and reveal, in the first, the
    second and the third round."""
    deployment = Deployment(tmp_path / "smile", nodes=4)
    app = deployment.folder / "app.py"
    app.write_text(app.read_text() + DEADLY)
    config = deployment.folder / "pyproject.toml"
    config.write_text(config.read_text().replace('clip = "quantile"', 'clip = "off"'))
    for name, at in STAGES.items():
        deployment.own[name] = {"KILL_AT": f"{at} {tmp_path / name}"}
    out = deployment.folder / "runs" / "secure"
    with deployment:
        run = deployment.run(rounds=5, out=str(out), secure=True, min_clients=4)
        assert deployment.finished(run, 1500) == "finished:completed", deployment.told(run)
    last = mixfl.load(out).metrics[-1]
    assert "rounds/failed" not in last
    assert last["round"] == 5
    assert last["clients/rejected"] >= 2  # who dies when it should reveal is in the sum
    assert last["replies/missing"] >= 1
    assert {p.name for p in tmp_path.glob("node-*")} == set(STAGES)


def test_a_secure_run_is_the_simulators(tmp_path):
    deployment = Deployment(tmp_path / "smile", nodes=3)
    config = deployment.folder / "pyproject.toml"
    text = config.read_text().replace('clip = "quantile"', 'clip = "off"')
    config.write_text(text.replace('cohorts = "secret"', 'cohorts = "seed"'))
    found = {}
    with deployment:
        for secure in (False, True):
            out = deployment.folder / "runs" / str(secure)
            run = deployment.run(rounds=3, out=str(out), secure=secure, linger=1)
            assert deployment.finished(run) == "finished:completed", deployment.told(run)
            found[secure] = mixfl.load(out)
    for a, b in zip(*(jax.tree.leaves(found[s].params) for s in (False, True)), strict=True):
        assert abs(a - b).max() < 1e-5

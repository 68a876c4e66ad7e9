"""Secure aggregation with real processes, of which some are killed at each stage."""

import pytest

import mixfl
from benchmarks.deployment import Deployment

pytestmark = pytest.mark.flower

# Appended to the project's app.py: a worker kills itself when it gets this part of this round.
DEADLY = """
import os
import signal

from mixfl.deploy.flower import apps


def deadly(problem, kind, content, context):
    record = content.get("secure", {})
    round, stage = os.environ.get("KILL_AT", "- -").split()
    now = str(record.get("boxes") is not None and content["train"]["round"])
    if stage in record and (stage != "boxes" or now == round):
        flag = f"killed-{context.node_config['partition-id']}"
        if not os.path.exists(flag):
            open(flag, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    return apps.answer(problem, kind, content, context)


client = mixfl.flower.client_app(problem, deadly)
"""


def test_workers_are_killed_at_each_stage(tmp_path):
    """Of seven nodes, one each is killed when it should share, train and reveal. Five must stay."""
    deployment = Deployment(tmp_path / "smile", nodes=7)
    app = deployment.folder / "app.py"
    app.write_text(app.read_text() + DEADLY)
    config = deployment.folder / "pyproject.toml"
    config.write_text(config.read_text().replace('clip = "quantile"', 'clip = "off"'))
    stages = {"node-2": "0 roster", "node-4": "1 boxes", "node-6": "1 survivors"}
    for name, at in stages.items():
        deployment.own[name] = {"KILL_AT": at}
    out = deployment.folder / "runs" / "secure"
    with deployment:
        run = deployment.run(
            rounds=4, out=str(out), secure=True, min_clients=7, algorithm="2wgt", round_deadline=150
        )
        assert deployment.finished(run, 1500) == "finished:completed", deployment.told(run)
    metrics = mixfl.load(out).metrics
    assert "rounds/failed" not in metrics[-1]
    assert metrics[-1]["clients/rejected"] >= 2  # who dies when it reveals is in the sum
    assert metrics[-1]["round"] == 4
    killed = [p.name for p in tmp_path.rglob("killed-*")]
    assert sorted(set(killed)) == ["killed-1", "killed-3", "killed-5"]


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
    for name, a in found[False].params.items():
        assert abs(a - found[True].params[name]).max() < 1e-5

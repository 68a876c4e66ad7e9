"""Secure aggregation with real processes, of which some are killed at each stage."""

import jax
import pytest

import mixfl
from benchmarks.deployment import Deployment

pytestmark = pytest.mark.flower

# Appended to the project's app.py. A worker kills itself once, at a message of its stage. The next
# one does so when the last one's node has taken part in a whole round again, however long that
# takes: two at once would be too many for four. The run stops after the last one.
DEADLY = """
import os
import signal
from pathlib import Path

from mixfl.deploy.flower import apps

FLAGS = Path(os.environ["FLAGS"])


def deadly(problem, kind, content, context):
    name, stage, after = os.environ.get("KILL_AT", "- - -").split()
    asked = content.get("secure", {})
    died = (FLAGS / f"{name} died").exists()
    if stage in asked and not died and (after == "-" or (FLAGS / f"{after} is back").exists()):
        (FLAGS / f"{name} died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if "survivors" in asked and died:
        (FLAGS / f"{name} is back").touch()
    return apps.answer(problem, kind, content, context)


class UntilAllAreBack:
    def on_round(self, event):
        if (FLAGS / "node-4 is back").exists():
            event.stop("everybody is back")


server = mixfl.flower.server_app(problem, [UntilAllAreBack()])
client = mixfl.flower.client_app(problem, deadly)
"""
# When it should share, train, and reveal. `-`: at once.
STAGES = {"node-2": "roster -", "node-3": "boxes node-2", "node-4": "survivors node-3"}


@pytest.mark.slow  # Flower takes a minute to notice a worker's death: make test-chaos
def test_workers_are_killed_at_each_stage(tmp_path):
    """Of four nodes, one after the other is killed, at another stage each. No round fails, and all
    take part again."""
    flags = tmp_path / "flags"
    flags.mkdir()
    deployment = Deployment(tmp_path / "smile", nodes=4, FLAGS=str(flags))
    app = deployment.folder / "app.py"
    app.write_text(app.read_text() + DEADLY)
    config = deployment.folder / "pyproject.toml"
    text = config.read_text().replace('clip = "quantile"', 'clip = "off"')
    config.write_text(text.replace("rounds = 50", "rounds = 60\ncohort_size = 4"))
    for name, at in STAGES.items():
        deployment.own[name] = {"KILL_AT": f"{name} {at}"}
    out = deployment.folder / "runs" / "secure"
    with deployment:
        run = deployment.run(out=str(out), secure=True, min_clients=4, round_deadline=240.0)
        assert deployment.finished(run, 1500) == "finished:completed", deployment.told(run)
    found = {f.name for f in flags.iterdir()}
    assert found == {f"{name} {what}" for name in STAGES for what in ("died", "is back")}
    last = mixfl.load(out).metrics[-1]
    assert "rounds/failed" not in last
    assert last["round"] >= 5
    assert last["clients/rejected"] >= 2  # who dies when it should reveal is in the sum
    assert last["replies/missing"] >= 1


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

"""Differential privacy on Flower: the simulator's rounds, and nothing told about nodes."""

import itertools
import shutil

import numpy as np
import pytest
from deployed import assert_same, deploy, simulate
from flower_grid import InProcess

from mixfl.deploy.flower.members import Members
from mixfl.errors import MixflError

PRIVATE = dict(
    dp_noise_multiplier=2.0, dp_delta=1e-2, dp_clip=0.1, dp_clients=4, dp_seed=5, cohort_size=4,
    rounds=3,
)  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "algorithm"), [("two terms", "2wgt"), ("tables", "1wgt"), ("two terms", "pretrain")]
)
def test_a_private_deployment_is_the_simulator(problem, algorithm):
    expected = simulate(problem, algorithm, **PRIVATE)
    found, _, _ = deploy(problem, algorithm=algorithm, **PRIVATE)
    assert_same(found.params, expected.params, 2e-5)
    told = {k for row in found.metrics for k in row}
    assert not {k for k in told if k.startswith(("clients/", "replies/"))} - {"clients/rejected"}
    assert not {k for k in told if k.startswith("train/federated")}
    assert found.metrics[-1]["privacy/epsilon"] == expected.metrics[-1]["privacy/epsilon"]


def test_a_server_that_starts_again_has_other_noise(tmp_path):
    """The round under way may have other nodes the second time."""
    secret = {**PRIVATE, "dp_noise_multiplier": 20.0, "rounds": 2}
    secret.pop("dp_seed")

    def stop(event):
        if event.round == 1:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        deploy(algorithm="fedavg", out=tmp_path / "a", callbacks=[stop], **secret)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a, b = (deploy(algorithm="fedavg", out=tmp_path / n, **secret)[0] for n in "ab")
    assert not np.allclose(a.params["w"], b.params["w"], atol=1e-3)


def test_nodes_wait_for_their_turn(monkeypatch):
    """With min_sep = 2, a node takes part in every second round at most."""
    asked, answer = [], InProcess._run

    def noted(self, message):
        if message.metadata.group_id.isdigit():
            asked.append((int(message.metadata.group_id), message.metadata.dst_node_id))
        answer(self, message)

    monkeypatch.setattr(InProcess, "_run", noted)
    # Turns come from the server's secret; the clients of a turn may be few, or none.
    monkeypatch.setattr(Members, "place", lambda self, who: sum(map(ord, who)))
    given = {**PRIVATE, "dp_min_sep": 2, "cohort_size": 1, "rounds": 6}
    deploy(algorithm="fedavg", **given)
    assert len({t for t, _ in asked}) > 2
    for node in {n for _, n in asked}:
        rounds = sorted(t for t, n in asked if n == node)
        assert all(b - a >= 2 for a, b in itertools.pairwise(rounds))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(dp_sampling="fixed"), "no credit for sampling"),
        (dict(checkpoint_every=5), "Leave it at 1"),
        (dict(dp_clients="auto"), "how many clients"),
        (dict(dp_delta=0.3), "below 1/clients"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(MixflError, match=message):
        deploy(algorithm="fedavg", **(PRIVATE | given))

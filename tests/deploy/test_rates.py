"""Learning rates that change from round to round, on Flower: they travel with the message."""

import jax
import numpy as np
import pytest
from deployed import SETTINGS, assert_same, deploy, placed, simulate
from flwr.app import MetricRecord

from mixfl.deploy.flower import messages
from mixfl.deploy.flower.client import Client
from mixfl.errors import MixflError

pytestmark = pytest.mark.system
SCHEDULED = dict(client_lr="cosine(0.4, 8)", server_lr="piecewise(1.0, {2: 0.5})")


@pytest.mark.parametrize(
    ("problem", "algorithm", "more"),
    [
        ("two terms", "2wgt", {}),
        ("two terms", "pretrain", {}),
        ("two terms", "1wgt", dict(client_opt="sgd(momentum=0.5)")),
        ("tables", "2wgt", dict(merge_lr="linear(0.6, 0.3)")),
    ],
)
def test_deployment_is_the_simulator(problem, algorithm, more):
    found, _, _ = deploy(problem, algorithm=algorithm, **SCHEDULED, **more)
    expected = simulate(problem, algorithm, **SCHEDULED, **more)
    assert_same(found.params, expected.params)
    constant = simulate(problem, algorithm, **more)
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (
        constant.params, expected.params)), strict=True)]  # fmt: skip
    assert max(moved) > 1e-2
    for f, e in zip(found.metrics, expected.metrics, strict=True):
        rates = {k: v for k, v in e.items() if k.startswith("rate/")}
        assert rates
        assert {k: f[k] for k in rates} == rates


def client_and_task(rates):
    there, nodes = placed("two terms")
    config = SETTINGS | SCHEDULED | dict(algorithm="fedavg")
    client = Client(there, config, {**nodes[2], "node-id": 0})
    x = there.init(jax.random.key(0))
    return client, messages.task(0, messages.Broadcast(x), {}, (), rates)


def test_a_client_uses_the_rate_of_the_message():
    changes = []
    for lr in (0.1, 0.2):
        client, task = client_and_task(dict(client_lr=lr, server_lr=1.0))
        feed, x = client.feed(0), client.x
        sent = messages.parsed_task(task, x, {}, rates=client.scheduled)
        upload = client.program(sent.broadcast, feed, sent.told, sent.rates)
        changes.append(np.concatenate([np.ravel(a) for a in jax.tree.leaves(upload.weighted)]))
    assert np.linalg.norm(changes[1]) > 1.5 * np.linalg.norm(changes[0])


WRONG = {
    "none": None, "other names": dict(lr=0.1), "zero": dict(client_lr=0.0, server_lr=1.0),
    "not finite": dict(client_lr=float("nan"), server_lr=1.0),
}  # fmt: skip


@pytest.mark.parametrize("given", WRONG)
def test_a_message_without_good_rates_is_refused(given):
    client, task = client_and_task({})
    assert set(client.scheduled) == {"client_lr", "server_lr"}
    if WRONG[given] is not None:
        task["rates"] = MetricRecord(WRONG[given])
    with pytest.raises(MixflError, match="the server's message is not of this problem"):
        client.train(task)


def test_rates_that_nobody_expects_are_refused():
    there, nodes = placed("two terms")
    client = Client(there, SETTINGS | dict(algorithm="fedavg"), {**nodes[2], "node-id": 0})
    x = there.init(jax.random.key(0))
    task = messages.task(0, messages.Broadcast(x), {}, (), dict(client_lr=0.1))
    with pytest.raises(MixflError, match="other numbers than expected"):
        client.train(task)

"""Training of PyTorch models: compiled as by hand in JAX, and the same in the simulator, deployed,
and called out of the program."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_problems
from click.testing import CliRunner
from deployed import Notes, assert_same, at_nodes
from flower_grid import InProcess
from torch import nn
from torch_problems import CASES, classify, numbers, problem

import mixfl
import mixfl.flower
from mixfl import pytorch
from mixfl.cli import cli
from mixfl.deploy.flower import server
from mixfl.deploy.flower.client import Client
from mixfl.measure.check import check
from mixfl.runs.plan import plan_of
from mixfl.runs.training import run

SETTINGS = dict(rounds=2, cohort_size=3, client_batch=3, local_steps=2, client_lr=0.1, eval_every=1)
SUPPORT = Path(torch_problems.__file__).parent
DEPLOYED = ["gpt2, tied", "gpt2, untied", "llama", "bert", "gpt2 with lora", "cnn"]


@functools.cache
def model(name: str) -> pytorch.Model:
    return pytorch.Model(CASES[name].make)


@functools.cache
def simulated(name: str) -> mixfl.runs.training.Result:
    return mixfl.train(problem(model(name), CASES[name]), "2wgt", devices=1, **SETTINGS)


class Counting(InProcess):
    """Counts the bytes of the arrays in the replies of a round."""

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        for reply in (r for r in replies if r.has_content()):
            arrays = [a for record in reply.content.array_records.values() for a in record.values()]
            self.events.append(("bytes", sum(len(a.data) for a in arrays)))
        return replies


@pytest.mark.system
@pytest.mark.parametrize("name", DEPLOYED)
def test_the_simulator_and_a_deployment_agree(name):
    """2-way, two rounds: what XLA compiled, and what clients compute in PyTorch."""
    there, nodes = at_nodes(problem(model(name), CASES[name]))
    config = SETTINGS | {"cohorts": "seed", "algorithm": "2wgt"}
    grid = Counting(mixfl.flower.client_app(there), nodes, config)
    plan = server.deployed(there, grid, config, Notes(), grid.clock)
    found, expected = run(plan, None, True, Notes()), simulated(name)
    assert_same(found.params, expected.params, 1e-4)
    start = model(name).init(jax.random.key(0))
    assert found.params.keys() == start.keys()
    assert max(np.abs(found.params[n] - start[n]).max() for n in start) > 1e-3
    trained = sum(4 * a.size for a in start.values())
    on_the_wire = max(count for kind, count in grid.events if kind == "bytes")
    assert trained <= on_the_wire <= 2 * trained + 200  # 2-way also has the sum of the gradients


def test_only_the_adapters_are_sent():
    """LoRA on a GPT-2: what is frozen is no part of the model that clients get and send."""
    name = "gpt2 with lora"
    result, params = simulated(name), model(name).init(jax.random.key(0))
    assert all("lora" in n for n in params)
    trained = sum(4 * a.size for a in params.values())
    everything = sum(4 * p.numel() for p in model(name).make().parameters())
    assert trained < everything / 20
    assert trained <= result.metrics[-1]["comm/up_bytes"] <= trained + 100
    state = model(name).state_dict(result.params)
    module = CASES[name].make()
    module.load_state_dict(state)
    assert module.base_model.model.lm_head.weight is module.base_model.model.transformer.wte.weight


def test_a_deployed_client_stays_pytorch(monkeypatch):
    from mixfl.pytorch import torchax_bridge

    def never():
        raise AssertionError("torchax at a node")

    monkeypatch.setattr(torchax_bridge, "environment", never)
    there, nodes = at_nodes(problem(pytorch.Model(CASES["mlp"].make), CASES["mlp"]))
    client = Client(there, SETTINGS | {"algorithm": "2wgt"}, nodes[1])
    client.hello()
    assert client.term.loss.verdicts
    assert not any(v.compiled or v.note for v in client.term.loss.verdicts.values())


def test_called_losses_train_alike_and_are_noted():
    notes = Notes()
    own = problem(model("control flow"), CASES["control flow"])
    found = run(plan_of(own, "2wgt", SETTINGS), None, False, notes)
    doubled = CASES["mlp"]._replace(loss=lambda net, b: 2 * classify(net, b))
    expected = mixfl.train(problem(model("mlp"), doubled), "2wgt", **SETTINGS)
    assert_same(found.params, expected.params, 1e-4)
    assert own.terms[0].loss.notes[0].startswith("the loss of term 'federated' runs in PyTorch")


WIDE = 48


def wide():
    return nn.Sequential(nn.Linear(8, WIDE), nn.ReLU(), nn.Linear(WIDE, 3))


def wide_loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["0.weight"].T + params["0.bias"])
    scores = jax.nn.log_softmax(hidden @ params["2.weight"].T + params["2.bias"])
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1)[:, 0]


def test_first_layers_are_low_rank():
    """A Linear on raw inputs: the same result as plain, and as written in JAX."""
    case = CASES["mlp"]._replace(make=wide, inputs=numbers(8))
    own = problem(pytorch.Model(wide), case)
    in_jax = dataclasses.replace(
        own, terms=[dataclasses.replace(t, loss=wide_loss) for t in own.terms]
    )
    form = plan_of(own, "2wgt", SETTINGS).simulator().forms
    assert form.low_rank == {"federated": ["0.weight"]}
    results = [
        mixfl.train(p, "2wgt", first_layer=kind, **SETTINGS).params
        for p, kind in ((own, "low-rank"), (own, "plain"), (in_jax, "plain"))
    ]
    assert_same(results[0], results[2], 1e-5)
    assert_same(results[1], results[2], 1e-5)


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.numbers), "control flow"])
def test_the_check_says_what_is_not_compiled(name):
    lines, good = check(problem(model(name), CASES[name]), mixfl.Settings(**SETTINGS))
    assert good, lines
    noted = any("_local_scalar_dense" in line for line in lines)
    assert noted == (not CASES[name].compiled)


@pytest.mark.system
def test_compare_and_diagnose(tmp_path, monkeypatch):
    """On the command line, with a loss that is compiled and one that is not."""
    monkeypatch.chdir(tmp_path)
    source = f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\nfrom torch_problems import *\n"
    own = "problem(pytorch.Model(mlp), CASES[{!r}], evaluate=evaluate)\n"
    source += "def evaluate(params): return {'loss': sum((a**2).sum() for a in params.values())}\n"
    source += f"first = {own.format('mlp')}second = {own.format('control flow')}"
    (tmp_path / "p.py").write_text(source)
    for name, said in (("first", False), ("second", True)):
        given = [f"--set={k}={v}" for k, v in SETTINGS.items()]
        compared = CliRunner().invoke(
            cli, ["compare", f"p.py:{name}", "--algorithms", "2wgt", "--out", name, *given]
        )
        assert compared.exit_code == 0, compared.output
        diagnosed = CliRunner().invoke(cli, ["diagnose", f"p.py:{name}", "--budget", "1", *given])
        assert diagnosed.exit_code == 0, diagnosed.output
        for result in (compared, diagnosed):
            assert ("_local_scalar_dense" in result.output) == said, result.output

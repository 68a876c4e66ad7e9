"""Frozen arrays in a deployment: compared by digest, or sent once and kept at the node."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import problems
import pytest
from deployed import SETTINGS, SIZES, Notes, assert_same, at_nodes, evaluate
from flower_grid import InProcess, changed

import mixfl
import mixfl.flower
from mixfl.deploy.flower import client as client_module
from mixfl.deploy.flower import server
from mixfl.runs.training import run

SCALE = np.array([0.5, 2.0, -1.0], np.float32)
TREE = {"layers": [{"scale": SCALE}, {"shift": np.arange(3, dtype=np.float32)}], "on": np.bool_(1)}


def loss(params, batch, frozen):
    scale, shift = frozen["layers"][0]["scale"], frozen["layers"][1]["shift"]
    x = jnp.where(frozen["on"], batch["x"] * scale + 0.1 * shift, 0.0)
    return problems.logistic(params, {**batch, "x": x})


def problem(frozen):
    terms = [problems.population(sizes=SIZES), problems.datacenter()]
    terms = [dataclasses.replace(t, loss=loss) for t in terms]
    return mixfl.Problem(problems.init, terms, evaluate, frozen=frozen)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    client_module._clients.clear()
    return tmp_path / "cache" / "mixfl" / "frozen"


def loader(calls):
    def read():
        calls.append(1)
        return TREE

    return read


def deploy(at_server, at_node=None, rounds=3, **more):
    there, nodes = at_nodes(at_server)
    elsewhere = there if at_node is None else at_nodes(at_node)[0]
    config = SETTINGS | {"cohorts": "seed", "rounds": rounds, "algorithm": "2wgt"}
    grid = InProcess(mixfl.flower.client_app(elsewhere), nodes, config, **more)
    notes = Notes()
    plan = server.deployed(there, grid, config, notes, grid.clock)
    return run(plan, None, True, notes), grid, notes.lines


def expected(rounds=3):
    return mixfl.train(problem(TREE), "2wgt", devices=1, **(SETTINGS | {"rounds": rounds})).params


def test_made_at_both(cache):
    result, _, _ = deploy(problem(TREE))
    assert_same(result.params, expected())
    assert not cache.exists()
    assert "comm/frozen_bytes" not in result.metrics[-1]


def test_sent_once(cache):
    at_server, at_node = [], []
    result, grid, _ = deploy(problem(loader(at_server)), problem(loader(at_node)))
    assert_same(result.params, expected())
    assert (len(at_server), len(at_node)) == (1, 0)
    (file,) = cache.iterdir()
    assert file.name == f"{problem(TREE).frozen.digest}.safetensors"
    hellos = [e for e in grid.events if e == ("push", "hello")]
    assert len(hellos) == 2 * len(SIZES)  # all were asked before the first had the arrays
    sent = result.metrics[-1]["comm/frozen_bytes"]
    assert 4 * 25 < sent < 4 * 3000  # four messages, with Flower's own headers
    client_module._clients.clear()  # restarted nodes find them
    again, grid, _ = deploy(problem(loader([])), problem(loader(at_node)))
    assert_same(again.params, expected())
    assert len([e for e in grid.events if e == ("push", "hello")]) == len(SIZES)
    assert again.metrics[-1]["comm/frozen_bytes"] == 0
    assert not at_node


def test_damaged_or_lost_they_are_sent_again(cache):
    def lose(message, reply):  # between two rounds
        (file,) = cache.iterdir()
        file.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
        client_module._clients.clear()
        return [(0.0, reply())]

    faults = {("1", place): lose for place in range(len(SIZES))}
    result, _, _ = deploy(problem(loader([])), problem(loader([])), rounds=4, faults=faults)
    assert result.metrics[-1]["clients/rejected/stale"] >= 1
    assert result.metrics[-1]["comm/frozen_bytes"] > 500
    assert result.metrics[-1]["round"] == 4


def test_others_take_no_part():
    other = {**TREE, "on": np.bool_(0)}
    with pytest.raises(AssertionError, match="not the server's"):
        _stop_at_notes(problem(TREE), problem(other))


def _stop_at_notes(at_server, at_node):
    """A deployment without clients waits for them forever."""

    class Stopping(Notes):
        def note(self, message):
            assert "not the server's" not in message, message

    there, nodes = at_nodes(at_server)
    config = SETTINGS | {"cohorts": "seed", "rounds": 1}
    grid = InProcess(mixfl.flower.client_app(at_nodes(at_node)[0]), nodes, config)
    plan = server.deployed(there, grid, config, Stopping(), grid.clock)
    run(plan, None, True, Stopping())


def in_pytorch(scale: float):
    """Logistic regression with a frozen buffer."""
    torch = pytest.importorskip("torch")
    from mixfl import pytorch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(problems.DIM, 1)
            self.register_buffer("scale", torch.full((problems.DIM,), scale))

    model = pytorch.Model(Net)

    def loss(net, batch):
        z = net.layer(batch["x"] * net.scale)[:, 0]
        return torch.nn.functional.softplus(-batch["y"] * z)

    terms = [problems.population(sizes=SIZES), problems.datacenter()]
    terms = [dataclasses.replace(t, loss=model.loss(loss)) for t in terms]
    return mixfl.Problem(model.init, terms)


def test_frozen_tensors_of_modules_are_compared():
    ours = in_pytorch(2.0)
    assert [jnp.asarray(a["scale"]).shape for a in ours.frozen_arrays()] == [(problems.DIM,)]
    assert ours.frozen_digest() == in_pytorch(2.0).frozen_digest()
    with pytest.raises(AssertionError, match="not the server's"):
        _stop_at_notes(ours, in_pytorch(3.0))


def test_a_changed_array_is_refused(cache):
    def change(content):
        content["hello"]["frozen"] = "0" * 64

    result, _, lines = deploy(problem(TREE), faults={("hello", 0): changed(change)})
    assert any("not the server's" in line for line in lines)
    assert result.metrics[-1]["clients/asked"] == 9


def test_only_plain_trees_are_sent():
    import collections

    from mixfl.deploy.flower import frozen
    from mixfl.errors import MixflError

    own = collections.namedtuple("Own", "scale")

    def loss(params, batch, frozen):
        return problems.logistic(params, batch) * frozen.scale[0]

    term = dataclasses.replace(problems.population(), loss=loss)
    p = mixfl.Problem(problems.init, [term], frozen=lambda: own(SCALE))
    with pytest.raises(MixflError, match="dicts, lists and tuples"):
        frozen.delivery(p)

"""An algorithm of the user's own on Flower, in one process: its file, settings and fields."""

import textwrap

import numpy as np
import pytest
from deployed import assert_same, deploy, simulate
from flwr.app import ArrayRecord, RecordDict

import mixfl
from mixfl.deploy.flower import messages

pytestmark = pytest.mark.system

FILE = """
    from typing import Any, NamedTuple

    import jax.numpy as jnp

    from mixfl.algorithms import CLIENT_KEYS, algorithm, fed_avg, key, own_loss_only
    from mixfl.algorithms.steps import add, client_update, gradient, scale, zeros


    class Pushed(NamedTuple):
        base: Any
        g: Any

        @property
        def x(self):
            return self.base.x


    @algorithm("pushed", CLIENT_KEYS, settings={"push": key(0.1, "of the last mean gradient")})
    def pushed(problem, s):
        base = fed_avg.build(problem, s)

        def init(x):
            return Pushed(base.init(x), zeros(x))

        def broadcast(state, drawn):
            sent = base.broadcast(state.base, drawn)
            return [b._replace(extra={"g": (state.g, jnp.float32(s.own.push))}) for b in sent]

        @own_loss_only
        def client(term, broadcast, feed):
            g_before, push = broadcast.extra["g"]

            def grad(x, step):
                loss, g = gradient(term, x, step.batches)
                return loss, add(g, scale(push, g_before))

            upload = client_update(term, s, broadcast, feed, grad, collect=True)
            return upload._replace(grads=None, extra=[upload.grads])

        def update(state, broadcasts, sums, central):
            new, info = base.update(state.base, broadcasts, sums, central)
            steps = sum(part.steps for part in sums)
            g = add(*(part.extra[0] for part in sums))
            return Pushed(new, scale(1 / jnp.maximum(steps, 1), g)), info

        return base._replace(init=init, broadcast=broadcast, client=client, update=update)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(FILE))
    return f"{tmp_path / 'mine.py'}:pushed"


@pytest.mark.parametrize("problem", ["two terms", "two populations", "tables"])
def test_it_is_the_same_as_in_the_simulator(mine, problem, tmp_path):
    keys = dict(rounds=3, push=0.5, out=tmp_path / "run")
    result, _, _ = deploy(problem, algorithm=mine, **keys)
    assert result.config["push"] == 0.5
    expected = simulate(problem, mine, rounds=3, push=0.5, tables="dense")
    assert_same(result.params, expected.params)
    plain = simulate(problem, mine, rounds=3, push=0.0, tables="dense")
    with pytest.raises(AssertionError):
        assert_same(plain.params, expected.params)


def test_unknown_settings_are_refused(mine):
    with pytest.raises(mixfl.MixflError, match=r"unknown key 'pusj'. Did you mean 'push'"):
        deploy(algorithm=mine, pusj=1.0)


def test_own_fields_of_another_shape_are_refused():
    like = {"g": np.zeros((2, 3), np.float32)}
    for given in ({"g": np.zeros((3, 2), np.float32)}, {"h": like["g"]}, {"g": np.zeros((2, 3))}):
        content = messages.task(0, mixfl.algorithms.Broadcast(np.zeros(2, np.float32)), {})
        content["extra"] = messages.arrays(given)
        with pytest.raises(messages.Rejected):
            messages.parsed_task(content, np.zeros(2, np.float32), {}, extra=lambda: like)
    assert isinstance(content, RecordDict)
    assert isinstance(content["extra"], ArrayRecord)


@pytest.mark.parametrize(
    ("algorithm", "own"),
    [
        ("server-learning", {}),
        ("fedclg", dict(correction="client")),
        ("fedclg", dict(correction="server")),
        ("mimelite", dict(momentum=0.5)),
    ],
)
def test_algorithms_of_other_papers_are_the_same_as_in_the_simulator(algorithm, own):
    keys = dict(rounds=3, clip="off", **own)
    result, _, _ = deploy("two populations", algorithm=algorithm, **keys)
    assert_same(result.params, simulate("two populations", algorithm, **keys).params)

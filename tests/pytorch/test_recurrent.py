"""PyTorch's recurrent layers are loops in the compiled program, and give what PyTorch gives."""

import jax
import numpy as np
import pytest
import torch

from mixfl.forms.jaxpr import inner_names
from mixfl.pytorch import Model


class Net(torch.nn.Module):
    def __init__(self, kind, batch_first=False, **more):
        super().__init__()
        torch.manual_seed(0)
        self.layer = getattr(torch.nn, kind)(3, 4, batch_first=batch_first, **more)
        self.batch_first = batch_first

    def forward(self, x):
        h, last = self.layer(x if self.batch_first else x.transpose(0, 1))
        ends = torch.cat([e.flatten() for e in (last if isinstance(last, tuple) else (last,))])
        return torch.square(h.transpose(0, 1) if not self.batch_first else h).sum((1, 2)) + (
            torch.sin(ends).sum()
        )


def loss_of(kind, **more):
    loss = Model(lambda: Net(kind, **more)).loss(lambda net, batch: net(batch["x"]))
    x = np.random.default_rng(0).normal(size=(3, 6, 3)).astype(np.float32)
    return loss, loss.model.init(jax.random.key(0)), {"x": x}


def operators(loss, params, batch) -> list[str]:
    jaxpr = jax.make_jaxpr(loss)(params, batch).jaxpr
    return [n for e in jaxpr.eqns for n in (e.primitive.name, *inner_names(e))]


MORE = [
    pytest.param("GRU", {"bidirectional": True}, 2, marks=pytest.mark.numbers),
    pytest.param("RNN", {}, 1, marks=pytest.mark.numbers),
    pytest.param(
        "RNN", {"nonlinearity": "relu", "batch_first": True}, 1, marks=pytest.mark.numbers
    ),
]


@pytest.mark.parametrize(
    ("kind", "more", "loops"),
    [
        ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}, 4),
        ("GRU", {"num_layers": 2, "bias": False}, 2),
        *MORE,
    ],
)
def test_a_layer_is_a_loop_and_equals_pytorch(kind, more, loops):
    """The trial, of which `compiled` is the outcome, compares values and gradients."""
    loss, params, batch = loss_of(kind, **more)
    loss(params, batch)
    (verdict,) = loss.verdicts.values()
    assert verdict.compiled is not None
    assert not verdict.note
    names = operators(loss, params, batch)
    assert names.count("scan") == loops
    assert names.count("tanh") <= 2 * loops  # of one step, not of six
    compiled, pytorch = loss(params, batch), loss.in_pytorch()(params, batch)
    np.testing.assert_allclose(compiled, pytorch, rtol=1e-5, atol=1e-5)


def test_what_has_no_loop_of_its_own_is_written_out():
    loss, params, batch = loss_of("LSTM", proj_size=2)
    compiled, pytorch = loss(params, batch), loss.in_pytorch()(params, batch)
    assert "scan" not in operators(loss, params, batch)
    np.testing.assert_allclose(compiled, pytorch, rtol=1e-5, atol=1e-5)

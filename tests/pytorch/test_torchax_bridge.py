"""torchax is there when it is needed, and nothing else changes."""

import subprocess
import sys

import pytest
import torch
from torch._ops import OpOverloadPacket

from mixfl.pytorch.torchax_bridge import constant, environment, placeholders


def test_placeholders_are_for_named_dimensions_and_gone_afterwards():
    before = OpOverloadPacket.__getattr__
    with placeholders():
        assert torch.ops.aten.prod.dim_Dimname is not None
        with pytest.raises(AttributeError):
            torch.ops.aten.prod.dim_Missing  # noqa: B018
    assert OpOverloadPacket.__getattr__ is before
    with pytest.raises(AttributeError):
        torch.ops.aten.prod.dim_Dimname  # noqa: B018


def test_operators_without_names_are_loaded():
    assert torch.nn.functional.linear in environment()._ops
    assert torch.ops.aten.convolution in environment()._ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_constants_keep_their_values(dtype):
    t = torch.tensor([[0, 1], [2, -3]]).to(dtype)
    assert constant(t).astype(float).tolist() == t.float().tolist()


CODE = """
import sys; sys.modules["torchax"] = None
import numpy, torch, mixfl, mixfl.pytorch

model = mixfl.pytorch.Model(lambda: torch.nn.Linear(3, 1))
loss = model.loss(lambda net, batch: net(batch["x"])[:, 0] ** 2)
batch = {"x": numpy.eye(3, dtype=numpy.float32)}
params = {"weight": numpy.ones((1, 3), numpy.float32), "bias": numpy.ones(1, numpy.float32)}
print(loss(params, batch), loss.notes)
"""


@pytest.mark.system
def test_without_torchax_pytorch_is_called():
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "[4. 4. 4.]" in ended.stdout
    assert "pip install 'mixfl[torch]'" in ended.stdout


LEAN = """
import sys, numpy, torch, mixfl, mixfl.pytorch

model = mixfl.pytorch.Model(lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()))
loss = model.loss(lambda net, batch: sum(net(batch["x"]).square().unbind(1)))
params = model.init(__import__("jax").random.key(0))
loss(params, {"x": numpy.ones((3, 3), numpy.float32)})
(verdict,) = loss.verdicts.values()
assert verdict.compiled is not None, verdict
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
import torch._dynamo
with mixfl.pytorch.torchax_bridge.lowering():
    assert not hasattr(
        sys.modules["torchax.tensor"].XLADispatchMode.__torch_dispatch__.__wrapped__,
        "__dynamo_disable",
    )
"""


@pytest.mark.system
def test_large_parts_of_pytorch_are_not_imported():
    ended = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr

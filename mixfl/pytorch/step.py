"""A client's step in PyTorch on one core: its products, how long it takes, and the rate of a large
product."""

import hashlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mixfl.engine.native import Flops, Step
from mixfl.pytorch.callbacks import InPyTorch
from mixfl.pytorch.native import in_threads
from mixfl.pytorch.torchax_bridge import no_other_compiler

MOST, SECONDS = 20, 0.15  # trials, as long as they are short
SIDE = 384  # of the large product
T = TypeVar("T")
Counts = dict[Any, Callable[..., float]]
aten = torch.ops.aten


def _matrices(a, b, *_) -> float:
    return 2 * math.prod(a.shape) * b.shape[-1]


def _convolution(out, x, w, bias, stride, padding, dilation, transposed, *_) -> float:
    """With what is multiplied by padding."""
    return 2 * (x if transposed else out[0]).numel() * math.prod(w.shape[1:])


def _backward(out, g, *given) -> float:
    wanted = given[-1]  # gradients: of the inputs, weights, biases
    return sum(wanted[:2]) * _convolution([g], *given)


def _recurrent(x, *weights) -> float:
    return 2 * x.shape[0] * x.shape[1] * sum(w.numel() for w in weights)


def _attention(q, k, v) -> float:
    return _matrices(q, k.mT) + 2 * math.prod(q.shape[:-1]) * math.prod(v.shape[-2:])


# The flops of a product, 2 per multiply-add, from what it returned and was given.
DENSE: Counts = {
    aten.mm: lambda out, *given: _matrices(*given),
    aten.bmm: lambda out, *given: _matrices(*given),
    aten.addmm: lambda out, _, *given: _matrices(*given),
    aten.baddbmm: lambda out, _, *given: _matrices(*given),
    aten._scaled_dot_product_flash_attention_for_cpu: lambda out, *given: _attention(*given[:3]),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda out, g, *given: 2.5 * _attention(*given[:3])
    ),
}
CONVOLUTIONS: Counts = {aten.convolution: _convolution, aten.convolution_backward: _backward}
RECURRENT: Counts = {
    aten.mkldnn_rnn_layer: lambda out, *given: _recurrent(*given[:3]),
    aten.mkldnn_rnn_layer_backward: lambda out, *given: 2 * _recurrent(*given[:3]),
}
PRODUCTS = {
    "dense": DENSE, "convolutions": CONVOLUTIONS, "recurrent": RECURRENT,
}  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts the flops of products. Those that it does not know count as 0."""

    def __init__(self):
        super().__init__()
        self.flops = {"dense": 0.0, "convolutions": 0.0, "recurrent": 0.0}
        self.layers = 0  # of convolutions
        self.seen = hashlib.sha256(torch.__version__.encode())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        kind, results = func._overloadpacket, out if isinstance(out, tuple | list) else [out]
        shapes = [tuple(a.shape) for a in results if isinstance(a, torch.Tensor)]
        self.seen.update(f"{kind} {shapes}\n".encode())
        self.layers += kind is aten.convolution
        for name, known in PRODUCTS.items():
            if kind in known:
                self.flops[name] += known[kind](results, *args)
        return out


def step_of(loss: InPyTorch, batch: dict[str, Any]) -> Step:
    def made() -> Callable[[], Any]:
        module = loss.model.fresh()
        parameters = [p for p in module.parameters() if p.requires_grad]

        def step():
            total = loss.at(module, batch).float().sum()
            torch.autograd.grad(total, parameters, allow_unused=True)

        return step

    def counted() -> Operators:
        step = made()
        with no_other_compiler(Operators), Operators() as found:
            step()
        return found

    def measured() -> tuple[float, float]:
        a = torch.ones(SIDE, SIDE)
        return _seconds(made()), 2 * SIDE**3 / _seconds(lambda: torch.mm(a, a))

    def of_clients(count: int) -> Callable[[], float]:
        steps = [made() for _ in range(count)]

        def seconds() -> float:
            begin = time.perf_counter()
            in_threads(lambda i: steps[i](), count)
            return time.perf_counter() - begin

        seconds()  # the first one takes longer
        return seconds

    found = _on_one_core(counted)
    digest, flops = found.seen.hexdigest(), Flops(**found.flops)
    return Step(digest, flops, found.layers, lambda: _on_one_core(measured), of_clients)


def _on_one_core(function: Callable[[], T]) -> T:
    """In a thread of its own."""
    before = torch.get_num_threads()

    def alone() -> T:
        torch.set_num_threads(1)
        with torch.random.fork_rng(devices=[]):
            return function()

    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(alone).result()
    finally:
        torch.set_num_threads(before)


def _seconds(function: Callable[[], Any]) -> float:
    """Of processor time: other work on the cores does not count."""
    taken: list[float] = []
    while sum(taken) < SECONDS and len(taken) < MOST:
        begin = time.thread_time()
        function()
        taken.append(time.thread_time() - begin)
    return min(taken)

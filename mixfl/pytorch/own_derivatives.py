"""Derivatives that a user has written for PyTorch: an autograd.Function, hooks on gradients.

JAX derives its own from what a loss computes. It sees neither, and a trial at a few points may not
tell: a hook that shortens large gradients does nothing at small ones. Such losses stay in PyTorch.
"""

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

HOOKS = "has hooks on gradients, which only PyTorch calls"


class _Hooks(TorchFunctionMode):
    """Notes whether a tensor gets a hook."""

    found = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.found |= func is torch.Tensor.register_hook
        return func(*args, **(kwargs or {}))


def own_derivatives(module: torch.nn.Module, losses: Callable[[], torch.Tensor]) -> str:
    """Which of them a loss has; empty if none."""
    if any(m._backward_hooks or m._backward_pre_hooks for m in module.modules()):
        return HOOKS
    with _Hooks() as hooks:
        found = losses()
    if hooks.found:
        return HOOKS
    left, seen = [found.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return f"has a derivative of its own ({type(node).__name__.removesuffix('Backward')})"
        seen.add(node)
        left += [each for each, _ in node.next_functions]
    return ""

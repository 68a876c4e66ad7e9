"""torchax 0.0.13 with PyTorch 2.13: imported when it is first needed, without other effects.

Two things are bridged here. PyTorch 2.13 has no operators for named dimensions any more, and
torchax mentions them when it is imported: it gets placeholders. And the import changes settings of
the process, which are put back. (What stays is that PyTorch's private device is called `jax`.)
"""

import contextlib
import functools
import os
import sys
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._ops import OpOverloadPacket
from torch.utils import _pytree

from mixfl.pytorch import derivatives, recurrent

KEPT_AWAY = "__dynamo_disable"  # where PyTorch's `_disable_dynamo` puts what it made of a function

_lock = threading.RLock()


@contextlib.contextmanager
def placeholders():
    """Operators for named dimensions exist, though nothing can be done with them."""
    real = OpOverloadPacket.__getattr__

    def found(packet, name):
        try:
            return real(packet, name)
        except AttributeError:
            if "name" not in name.lower() or name.startswith("_"):
                raise
            return object()

    OpOverloadPacket.__getattr__ = found  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = real  # type: ignore[method-assign]


@contextlib.contextmanager
def settings_kept():
    """What importing torchax sets is put back."""
    environment, fast = dict(os.environ), torch.backends.mha.get_fastpath_enabled()
    options = "jax_pjrt_client_create_options"
    before = getattr(jax.config, options, None)
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        torch.backends.mha.set_fastpath_enabled(fast)
        if getattr(jax.config, options, None) != before:
            jax.config.update(options, before)


@functools.cache
def environment() -> Any:
    """In it, PyTorch's operators on torchax's tensors are JAX's. Raises ImportError without
    torchax."""
    with _lock, settings_kept(), placeholders():
        from torchax.tensor import Environment, Tensor
        from torchax.view import View

        class WithConstants(Environment):
            def t2j_iso(self, tensors):
                """Other tensors, such as those that a loss made itself, are constants."""

                def array(t):
                    return t.jax() if isinstance(t, Tensor | View) else constant(t)

                return _pytree.tree_map_only(torch.Tensor, array, tensors)

            def dispatch(self, func, types, args, kwargs):
                if func is torch.Tensor.__getitem__ and not isinstance(args[0], Tensor | View):
                    args = self.indexed(*args)
                try:
                    if (function := recurrent.replacement(func, args, kwargs)) is not None:
                        return self.j2t_iso(function(*self.t2j_iso(args)))
                    return super().dispatch(func, types, args, kwargs)
                except Exception as error:
                    if not hasattr(error, "operator"):  # the innermost one
                        error.operator = func  # type: ignore[attr-defined]
                    raise

            def indexed(self, t, index):
                own = any(isinstance(i, Tensor | View) for i in _pytree.tree_leaves(index))
                return (Tensor(constant(t), self) if own else t), index

        env = WithConstants()
        derivatives.register(env)
        return env


def constant(t: torch.Tensor) -> jax.Array:
    """A tensor's values as a JAX array (NumPy has no bfloat16)."""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        if t.dtype == torch.bfloat16:
            return jnp.asarray(t.detach().float().numpy()).astype(jnp.bfloat16)
        return jnp.asarray(t.detach().numpy())


@contextlib.contextmanager
def no_other_compiler(mode: type):
    """PyTorch keeps its own compiler away from the operators of a dispatch mode, and imports it for
    that, which takes a second. If it was not imported before, there is nothing to keep away."""
    own = getattr(mode.__torch_dispatch__, "__wrapped__", None)  # type: ignore[attr-defined]
    if own is None or "torch._dynamo" in sys.modules or hasattr(own, KEPT_AWAY):
        yield
        return
    setattr(own, KEPT_AWAY, own)
    try:
        yield
    finally:
        delattr(own, KEPT_AWAY)


@contextlib.contextmanager
def known_checks():
    """PyTorch's operators in Python check their arguments by `torch._check`, which imports sympy,
    for sizes that are symbols. A check that holds needs none of it."""
    real = torch._check_with

    def check(error_type, cond, message):
        if cond is not True:
            real(error_type, cond, message)

    torch._check_with = check
    try:
        yield
    finally:
        torch._check_with = real


@contextlib.contextmanager
def lowering():
    """PyTorch's operators become JAX's. Yields the environment."""
    env, fast = environment(), torch.backends.mha.get_fastpath_enabled()
    from torchax.tensor import XLADispatchMode

    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explicitly requested dtype")  # 64-bit numbers
        torch.backends.mha.set_fastpath_enabled(False)  # of attention, by an operator for CPUs
        try:
            with env, no_other_compiler(XLADispatchMode), known_checks():
                yield env
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

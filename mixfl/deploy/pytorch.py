"""A deployed client whose loss is written in PyTorch takes its steps entirely in PyTorch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import torch

from mixfl.algorithms.contract import Broadcast, ClientFeed, Upload
from mixfl.algorithms.origin import traced_settings
from mixfl.algorithms.steps import own_part
from mixfl.optimizers import parse
from mixfl.problem import Federated
from mixfl.pytorch import Loss, tensor, to_numpy
from mixfl.settings import Settings

# Optimizers that are the same in optax and in PyTorch, with PyTorch's names of their arguments.
OPTIMIZERS: dict[str, tuple[Any, dict[str, str]]] = {
    "sgd": (torch.optim.SGD, {"momentum": "momentum", "nesterov": "nesterov"}),
    "adam": (torch.optim.Adam, {"eps": "eps"}),
}


def optimizer(s: Settings) -> Callable | None:
    """ClientOpt in PyTorch, as a function of the parameters; None if only optax has it, or if
    a step is more than ClientOpt (client_opt.py)."""
    if callable(s.client_opt) or s.proximal or s.weight_decay or s.grad_clip != "off":
        return None
    factory, arguments = parse(s.client_opt)
    for name, (kind, known) in OPTIMIZERS.items():
        if factory is getattr(optax, name) and set(arguments) <= set(known):
            options = {known[k]: v for k, v in arguments.items()}
            return lambda parameters: kind(parameters, lr=s.client_lr, **options)
    return None


def client_update(
    term: Federated, s: Settings, broadcast: Broadcast, feed: ClientFeed, collect: bool
) -> Upload:
    """What steps.client_update does, with the module's own optimizer and no padding."""
    loss: Loss = term.loss  # type: ignore[assignment]
    module = loss.model.fill(loss.model.of_thread("client"), broadcast.x)
    mask = np.asarray(feed.batches.mask) > 0
    named = {n: p for n, p in module.named_parameters() if n in broadcast.x}
    aug = None if broadcast.aug is None else {n: tensor(a) for n, a in broadcast.aug.items()}
    opt = optimizer(s)(named.values())  # type: ignore[misc]
    before = {name: p.detach().clone() for name, p in named.items()}
    sums = {name: torch.zeros_like(p) for name, p in named.items()} if collect else None
    total, examples, steps = 0.0, 0, 0
    for k in np.flatnonzero(mask.any(axis=1)):
        batch = {name: column[k][mask[k]] for name, column in feed.batches.data.items()}
        opt.zero_grad(set_to_none=False)
        value = term.weight * loss.together(module, batch).mean()
        value.backward()
        for name, p in named.items():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if sums is not None:
                sums[name] += p.grad
            if aug is not None:
                p.grad += aug[name]  # the augmenting gradient, before the optimizer's step
        opt.step()
        total, examples, steps = total + value.item(), examples + int(mask[k].sum()), steps + 1
    weight = {"examples": examples, "steps": steps, "uniform": min(steps, 1)}[s.weighting]
    delta = {name: to_numpy(p.detach() - before[name]) for name, p in named.items()}
    own = _own_part(s.client_opt, s.local_steps)(s.client_lr, broadcast, delta, np.float32(steps))
    grads = None if sums is None else {name: to_numpy(g) for name, g in sums.items()}
    return Upload(own, np.float32(weight), np.float32(steps), grads, np.float32(total))


@functools.cache
def _own_part(client_opt: str, local_steps: int) -> Callable:
    """Compiled once for all rounds, whatever their rates."""
    s = Settings(client_opt=client_opt, local_steps=local_steps)

    def of(lr, broadcast, delta, steps):
        return own_part(traced_settings(s, {"client_lr": lr}, set()), broadcast, delta, steps)

    return jax.jit(of)

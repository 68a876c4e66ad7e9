"""A client's step: ClientOpt, and what the settings add to it.

    g  = g_i, shortened to the norm `grad_clip`        the client's own gradient
    g  = g + mu (x - x_t) + the augmenting gradient    mu is `proximal`; x_t is what the server sent
    x' = ClientOpt(x, g) - eta `weight_decay` x        decoupled, as in AdamW

Only g_i is shortened: what the server sent is not the client's, and the own part of a change stays
free of it. A term's gradient, which 2-way sends to the other terms, is the mean of the shortened
g_i; pulls towards x_t or 0 are no part of it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixfl.optimizers import Optimizer, is_plain, make, taken_in_full
from mixfl.problem import Params
from mixfl.settings import Settings
from mixfl.trees import Model, params_of


class ClientOpt(NamedTuple):
    opt: Optimizer
    settings: Settings
    start: Params  # x_t

    def init(self, x):
        return self.opt.init(x)

    def step(self, x, g, state, active=None):
        if isinstance(x, Model):  # what follows is about its parameters
            own = self._replace(start=params_of(self.start))
            params, state = own.step(x.params, g.params, state, active)
            return Model(params, taken_in_full(x.state, g.state, active)), state
        mu, decay = self.settings.proximal, self.settings.weight_decay
        if mu:
            g = jax.tree.map(lambda g, x, x_t: g + mu * (x - x_t), g, x, self.start)
        new, state = self.opt.step(x, g, state, active)
        if decay:
            rate = self.opt.lr * decay * (1.0 if active is None else active)
            new = jax.tree.map(lambda new, x: (new - rate * x).astype(x.dtype), new, x)
        return new, state


def client_opt(s: Settings, start: Params) -> ClientOpt:
    return ClientOpt(make(s.client_opt, s.client_lr), s, start)


def plain_steps(s: Settings) -> bool:
    """Is a client's step x - eta g? Then its change is -eta times the sum of the g."""
    return is_plain(s.client_opt) and not s.proximal and not s.weight_decay


def not_plain(s: Settings) -> str:
    """The setting because of which a client's steps are not plain SGD."""
    if not is_plain(s.client_opt):
        return f"client_opt = {s.client_opt}"
    return f"proximal = {s.proximal:g}" if s.proximal else f"weight_decay = {s.weight_decay:g}"


def shortened(s: Settings, grad: Any) -> Any:
    """`grad`, whose gradient is no longer than `grad_clip`."""
    if s.grad_clip == "off":
        return grad

    def short(x, feed):
        loss, g = grad(x, feed)
        factor = jnp.minimum(1.0, s.grad_clip / norm(params_of(g)))
        short = jax.tree.map(lambda a: (factor * a).astype(a.dtype), params_of(g))
        return loss, Model(short, g.state) if isinstance(g, Model) else short

    return short


def norm(tree: Any) -> jax.Array:
    """Above 0. The squares of large numbers do not overflow."""
    leaves = [a.astype(jnp.float32) for a in jax.tree.leaves(tree)]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(a), initial=0) for a in leaves]))
    unit = jnp.maximum(largest, 1e-30)
    squares = sum(jnp.sum(jnp.square(a / unit)) for a in leaves)
    return jnp.maximum(unit * jnp.sqrt(squares), 1e-37)

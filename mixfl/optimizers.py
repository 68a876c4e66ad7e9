"""Turns an optimizer's name and learning rate into an optax optimizer.

An optimizer is given as a name in optax (`"adam"`, `"sgd"`), a name with keyword arguments
(`"sgd(momentum=0.9)"`, `"adam(eps=1e-3)"`), or a function from a learning rate to an
`optax.GradientTransformation`. The algorithms must know the rate, and whether it is plain SGD: only
then can a gradient be recovered from a change of the model.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixfl.calls import parsed_call
from mixfl.errors import MixflError, unknown
from mixfl.trees import Model, params_of

OptimizerLike = str | Callable[[float], optax.GradientTransformation]


class Optimizer(NamedTuple):
    lr: Any  # a number, or one of a traced round
    plain: bool  # plain SGD: x - lr * g, no state
    tx: optax.GradientTransformation

    def init(self, x):
        return self.tx.init(params_of(x))

    def step(self, x, g, state, active=None):
        """One step along -g. Where `active` is 0 (a padded step), x and state stay as they are."""
        if isinstance(x, Model):
            params, state = self.step(x.params, g.params, state, active)
            return Model(params, taken_in_full(x.state, g.state, active)), state
        g = jax.tree.map(lambda x, g: g.astype(x.dtype), x, g)  # bfloat16 stays bfloat16
        if self.plain:
            if active is not None:  # not a product: in a padded step g may not be finite
                g = jax.tree.map(lambda g: jnp.where(active > 0, g, 0), g)
            return jax.tree.map(lambda x, g: x - self.lr * g, x, g), state
        updates, new_state = self.tx.update(g, state, x)
        new_x = optax.apply_updates(x, updates)
        if active is None:
            return new_x, new_state
        keep = lambda new, old: jnp.where(active > 0, new, old)  # noqa: E731
        return jax.tree.map(keep, new_x, x), jax.tree.map(keep, new_state, state)


def taken_in_full(state, change, active):
    """The state of a model after a step: the change is taken in full (model_state.py)."""
    if active is not None:
        change = jax.tree.map(lambda a: jnp.where(active > 0, a, 0), change)
    return jax.tree.map(lambda a, b: (a - b).astype(a.dtype), state, change)


def make(spec: OptimizerLike, lr: Any) -> Optimizer:
    if callable(spec):
        return Optimizer(lr, is_plain(spec), spec(lr))
    factory, arguments = parse(spec)
    try:
        tx = factory(lr, **arguments)
    except (TypeError, ValueError) as error:
        raise MixflError(f"optimizer '{spec}' can't be made: {error}.") from None
    return Optimizer(lr, is_plain(spec), tx)


def is_plain(spec: OptimizerLike) -> bool:
    """Plain SGD?"""
    if callable(spec):
        return spec is optax.sgd
    factory, arguments = parse(spec)
    return factory is optax.sgd and not arguments


def parse(spec: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """`"sgd(momentum=0.9)"` -> optax.sgd, {"momentum": 0.9}. Literals only: nothing is run."""
    call = parsed_call(spec)
    if call is None or call.positional:
        raise MixflError(
            f"optimizer '{spec}' is not a name of optax's, alone or with keyword arguments: "
            "write it as adam or sgd(momentum=0.9)."
        )
    names = known()
    if call.name not in names:
        raise unknown("optimizer", call.name, names)
    return getattr(optax, call.name), call.keywords


@functools.cache
def known() -> list[str]:
    """The optimizers of optax: functions whose first argument is the learning rate."""
    names = []
    for name in dir(optax):
        if not name.startswith("_") and inspect.isfunction(function := getattr(optax, name)):
            first = next(iter(inspect.signature(function).parameters), None)
            if first == "learning_rate":
                names.append(name)
    return names


def has_schedule(opt: Optimizer, x: Any) -> bool:
    """Does its step depend on how many steps it has taken? `x` has the shapes of the parameters.

    Bias corrections, as Adam's, do not count: they belong to means of gradients. So of optimizers
    that keep anything but counts, optax's own schedules are found, and others are not.
    """
    state = jax.eval_shape(opt.init, x)
    if any(map(_of_schedule, jax.tree.leaves(state, is_leaf=_of_schedule))):
        return True
    leaves = jax.tree.leaves(state)
    if not leaves or not all(jnp.issubdtype(a.dtype, jnp.integer) for a in leaves):
        return False
    params = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), x)
    first = opt.init(params)

    def after(count: int):
        state = jax.tree.map(lambda a: jnp.full_like(a, count), first)
        return opt.step(params, params, state)[0]

    steps = [after(count) for count in COUNTS]
    return any(
        not jnp.allclose(a, b, rtol=1e-5, atol=0)
        for other in steps[1:]
        for a, b in zip(*map(jax.tree.leaves, (steps[0], other)), strict=True)
    )


COUNTS = (0, 1, 2, 5, 10, 100, 1000, 10**6)


def _of_schedule(state: Any) -> bool:
    """Is it the state of a schedule, as optax keeps it?"""
    injected = getattr(state, "hyperparams_states", None)
    return isinstance(state, optax.ScaleByScheduleState) or bool(injected)

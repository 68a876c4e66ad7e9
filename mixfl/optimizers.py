"""Turns an optimizer's name and learning rate into an optax optimizer.

An optimizer is given as a name in optax (`"adam"`, `"sgd"`), a name with keyword arguments
(`"sgd(momentum=0.9)"`, `"adam(eps=1e-3)"`), or a function from a learning rate to an
`optax.GradientTransformation`. The algorithms must know the rate, and whether it is plain SGD: only
then can a gradient be recovered from a change of the model.
"""

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixfl.errors import MixflError, unknown

OptimizerLike = str | Callable[[float], optax.GradientTransformation]


class Optimizer(NamedTuple):
    lr: Any  # a number, or one of a traced round
    plain: bool  # plain SGD: x - lr * g, no state
    tx: optax.GradientTransformation

    def init(self, x):
        return self.tx.init(x)

    def step(self, x, g, state, active=None):
        """One step along -g. Where `active` is 0 (a padded step), x and state stay as they are."""
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


def make(spec: OptimizerLike, lr: Any) -> Optimizer:
    if callable(spec):
        return Optimizer(lr, spec is optax.sgd, spec(lr))
    factory, arguments = parse(spec)
    try:
        tx = factory(lr, **arguments)
    except (TypeError, ValueError) as error:
        raise MixflError(f"optimizer '{spec}' can't be made: {error}.") from None
    return Optimizer(lr, factory is optax.sgd and not arguments, tx)


def parse(spec: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """`"sgd(momentum=0.9)"` -> optax.sgd, {"momentum": 0.9}. Literals only: nothing is run."""
    try:
        node = ast.parse(spec.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else None
        name = call.func if call else node
        if not isinstance(name, ast.Name) or (call and call.args):
            raise ValueError
        keywords = call.keywords if call else []
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
        if len(arguments) < len(keywords):
            raise ValueError
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise MixflError(
            f"optimizer '{spec}' is not a name of optax's, alone or with keyword arguments: "
            "write it as adam or sgd(momentum=0.9)."
        ) from None
    names = known()
    if name.id not in names:
        raise unknown("optimizer", name.id, names)
    return getattr(optax, name.id), arguments


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

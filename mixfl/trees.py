"""Parameters by their names, and their size."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


def name(path) -> str:
    """A parameter's name: its place in the pytree, such as tower/movies."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree) -> dict[str, Any]:
    return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def tree_bytes(tree) -> int:
    """The leaves may be shapes."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def on_named(function: Callable, by_name: Mapping[str, Any], tree, *more):
    """Applies function(leaf, by_name[its name], ...) to the leaves of a tree of parameters (and of
    more trees like it) that are in `by_name`. The other leaves stay."""

    def apply(path, leaf, *others):
        key = name(path)
        return function(leaf, by_name[key], *others) if key in by_name else leaf

    return jax.tree_util.tree_map_with_path(apply, tree, *more)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Model:
    """A model with a state (model_state.py)."""

    params: Any
    model_state: Any

    @property
    def state(self) -> Any:
        return self.model_state


def params_of(x: Any) -> Any:
    return x.params if isinstance(x, Model) else x


def as_model(tree: Any) -> Any:
    """A Model, if the tree was read from a file of one."""
    if isinstance(tree, dict) and tree.keys() == {"params", "model_state"}:
        return Model(**tree)
    return tree


def without_state(tree: Any) -> Any:
    """A gradient or a change, with 0 in place of what it has for the state."""
    if not isinstance(tree, Model):
        return tree
    return Model(tree.params, jax.tree.map(jax.numpy.zeros_like, tree.state))

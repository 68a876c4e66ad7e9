"""Parameters by their names, and their size."""

import math
from collections.abc import Callable, Mapping
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

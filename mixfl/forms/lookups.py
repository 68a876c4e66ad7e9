"""Gradients of tables that a loss only looks rows up in: steps that touch those rows alone.

Automatic differentiation gives the gradient of such a table as an array of its size, zero but for
the rows in the batch; a step then writes the zeros, adds the rows up in them, and reads all of it
again. Here the loss is differentiated by the rows that it has looked up, and a step adds them to
the table. Tables are found in the loss itself: parameters that go into nothing but gathers.
"""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, cast

import jax
from jax.extend.core import Literal

from mixfl.forms.jaxpr import Traced
from mixfl.problem import Federated, Term
from mixfl.trees import name, on_named


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Additions:
    """An array that is zero but for what was added to it. It may be scaled, and added to or taken
    off an array of the same shape."""

    places: list[Any]  # indices of the rows, per lookup
    values: list[Any]  # what is added there
    how: tuple = field(metadata={"static": True})  # per lookup, the rest of lax.scatter_add

    __array_ufunc__ = None  # NumPy's arrays leave the arithmetic to this class, as JAX's do

    def __rmul__(self, factor) -> "Additions":
        return dataclasses.replace(self, values=[factor * v for v in self.values])

    def __radd__(self, array):
        for place, value, (numbers, mode) in zip(self.places, self.values, self.how, strict=True):
            array = jax.lax.scatter_add(array, place, value, numbers, mode=mode)
        return array

    def __rsub__(self, array):
        return array + (-1 * self)

    def astype(self, dtype) -> "Additions":
        return dataclasses.replace(self, values=[v.astype(dtype) for v in self.values])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Found:
    """In place of a table: what was looked up in it."""

    rows: list[Any]


@dataclass(frozen=True)
class Lookups:
    """A loss, to be differentiated by what it looks up in the tables `names`."""

    loss: Callable
    names: Collection[str]

    def __call__(self, x, batch):
        return self.loss(x, batch)


def by_lookups(term: Federated, names: Collection[str]) -> Federated:
    """The term with gradients as Additions where its loss only looks rows up."""
    return dataclasses.replace(term, loss=Lookups(term.loss, names))


def looked_up(term: Term, x, data) -> tuple[Term, Any, Callable]:
    """The term as a function of the rows that it looks up in x (in the tables' places), those rows,
    and what turns a gradient by them into one of x."""
    lookups = cast(Lookups, term.loss)
    traced = Traced(lookups.loss, x, data)
    found = {n: eqns for n in lookups.names if (eqns := _gathers(traced, n))}
    eqns = [eqn for several in found.values() for eqn in several]
    indices = dict.fromkeys(eqn.invars[1] for eqn in eqns)
    find = traced.function(list(traced.data.values()), list(indices))
    place = dict(zip(indices, find(*(data[k] for k in traced.data)), strict=True))

    def rows(table, eqns):
        return Found([e.primitive.bind(table, place[e.invars[1]], **e.params) for e in eqns])

    def loss_of_rows(x, batch):
        given = {v: batch[k] for k, v in traced.data.items()}
        for path, leaf in jax.tree_util.tree_leaves_with_path(x, is_leaf=_is_found):
            if _is_found(leaf):
                outputs = [eqn.outvars[0] for eqn in found[name(path)]]
                given |= dict(zip(outputs, leaf.rows, strict=True))
            else:
                given[traced.params[name(path)]] = leaf
        (losses,) = traced.function(list(given), traced.jaxpr.outvars)(*given.values())
        return losses

    def whole(g):
        def additions(path, leaf):
            if not _is_found(leaf):
                return leaf
            eqns = found[name(path)]
            return Additions(
                [place[e.invars[1]] for e in eqns], leaf.rows, tuple(map(_scatter, eqns))
            )

        return jax.tree_util.tree_map_with_path(additions, g, is_leaf=_is_found)

    return dataclasses.replace(term, loss=loss_of_rows), on_named(rows, found, x), whole


def _is_found(leaf) -> bool:
    return isinstance(leaf, Found)


def _gathers(traced: Traced, table: str) -> list:
    """The lookups in a table, or none where it goes into anything else as well."""
    users = traced.users(traced.params[table])
    plain = all(
        eqn.primitive.name == "gather" and eqn.invars[0] is traced.params[table]
        and not isinstance(eqn.invars[1], Literal) and eqn.invars[1] not in traced.moving
        for eqn in users
    )  # fmt: skip
    return users if plain else []


def _scatter(gather) -> tuple:
    """How lax.scatter_add undoes a gather."""
    d, mode = gather.params["dimension_numbers"], gather.params["mode"]
    numbers = jax.lax.ScatterDimensionNumbers(
        d.offset_dims, d.collapsed_slice_dims, d.start_index_map,
        d.operand_batching_dims, d.start_indices_batching_dims,
    )  # fmt: skip
    return numbers, mode

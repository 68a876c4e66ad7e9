"""Gradients of tables that a loss only looks rows up in. A step touches only those rows.

Automatic differentiation returns the gradient of such a table as an array of the table's size, zero
except for the rows in the batch. A step then writes the zeros, adds the rows, and reads everything
again. Here the loss is differentiated with respect to the rows that it looked up, and a step adds
their gradients to the table. The loss itself shows which tables qualify: those that only gathers
use.
"""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Literal

from mixfl.forms.base import Candidate, Form
from mixfl.forms.jaxpr import Traced
from mixfl.trees import name, on_named


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Additions:
    """An array that is zero except where values were added. It can be scaled, and added to or
    subtracted from an array of the same shape."""

    places: list[Any]  # per lookup, the indices of the rows
    values: list[Any]  # what is added there
    how: tuple = field(metadata={"static": True})  # per lookup, other arguments of scatter_add

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
class LookedUp:
    """Stands for a table: the rows that were looked up in it."""

    rows: list[Any]


class Lookups(Form):
    """For the tables in the rows form (rows.py)."""

    name = "lookups"

    def __init__(self, tables: Collection[str]):
        self.tables = tables

    def narrow(self, term, broadcast, feed):
        loss = LookupLoss(term.loss, self.tables)
        return dataclasses.replace(term, loss=loss), broadcast, feed


def choose(c: Candidate) -> Form | None:
    """Used with the rows form. A low-rank layer replaces the loss too, and both can't. `grad_clip`
    needs the norm of a gradient, and what is added to a row twice has none of its own."""
    by_name = {form.name: form for form in c.others}
    if "rows" not in by_name or "low_rank" in by_name or c.settings.grad_clip != "off":
        return None
    return Lookups(by_name["rows"].tables)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class LookupLoss:
    """A loss whose gradient has Additions in place of the tables that are only looked up."""

    loss: Callable
    tables: Collection[str]

    def __call__(self, x, data):
        return self.loss(x, data)

    def gradient_in_form(self, mean, x, batch):
        loss_of_rows, rows, additions = by_rows(self.loss, self.tables, x, batch.data)
        value, g = jax.value_and_grad(lambda rows: mean(loss_of_rows(rows)))(rows)
        return value, additions(g)


def by_rows(loss: Callable, tables: Collection[str], x, data) -> tuple[Callable, Any, Callable]:
    """Three things: the loss as a function of x with LookedUp in place of tables; this x; and a
    function that turns a gradient with respect to it into one with respect to the original x."""
    traced = Traced(loss, x, data)
    gathers = {n: eqns for n in tables if (eqns := _gathers(traced, n))}
    eqns = [eqn for several in gathers.values() for eqn in several]
    indices = dict.fromkeys(eqn.invars[1] for eqn in eqns)
    compute = traced.function(list(traced.data.values()), list(indices))
    place = dict(zip(indices, compute(*(data[k] for k in traced.data)), strict=True))

    def rows(table, eqns):
        return LookedUp([e.primitive.bind(table, place[e.invars[1]], **e.params) for e in eqns])

    def loss_of_rows(x):
        given = {v: data[k] for k, v in traced.data.items()}
        for path, leaf in jax.tree_util.tree_leaves_with_path(x, is_leaf=_is_looked_up):
            if _is_looked_up(leaf):
                outputs = [eqn.outvars[0] for eqn in gathers[name(path)]]
                given |= dict(zip(outputs, leaf.rows, strict=True))
            else:
                given[traced.params[name(path)]] = leaf
        (losses,) = traced.function(list(given), traced.jaxpr.outvars)(*given.values())
        return losses

    def additions(g):
        def one(path, leaf):
            if not _is_looked_up(leaf):
                return leaf
            eqns = gathers[name(path)]
            places = [place[e.invars[1]] for e in eqns]
            return Additions(places, leaf.rows, tuple(map(_scatter, eqns)))

        return jax.tree_util.tree_map_with_path(one, g, is_leaf=_is_looked_up)

    return loss_of_rows, on_named(rows, gathers, x), additions


def _is_looked_up(leaf) -> bool:
    return isinstance(leaf, LookedUp)


def _gathers(traced: Traced, table: str) -> list:
    """The lookups in a table; none if another operation uses the table too."""
    users = traced.users(traced.params[table])
    plain = all(
        eqn.primitive.name == "gather" and eqn.invars[0] is traced.params[table]
        and not isinstance(eqn.invars[1], Literal) and eqn.invars[1] not in traced.moving
        for eqn in users
    )  # fmt: skip
    return users if plain else []


def _scatter(gather) -> tuple:
    """The arguments with which lax.scatter_add undoes a gather."""
    d, mode = gather.params["dimension_numbers"], gather.params["mode"]
    numbers = jax.lax.ScatterDimensionNumbers(
        d.offset_dims, d.collapsed_slice_dims, d.start_index_map,
        d.operand_batching_dims, d.start_indices_batching_dims,
    )  # fmt: skip
    return numbers, mode

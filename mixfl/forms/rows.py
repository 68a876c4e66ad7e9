"""Row-sparse parameters: a client gets, trains and uploads only its own rows of a table.

A term marks tables, and the columns of its data that name their rows (`Federated.rows`). For a
client, the table is replaced by the rows that its batches name, and the numbers in those columns by
positions among these rows. The loss does not notice.

In the dense algorithm the other rows move too, but only by the augmenting gradient. A client does
not upload that (`steps.own_part`): its own part is 0 on every row that it does not hold. So this is
exact for plain SGD at the client. If it would not be exact, the tables are dense.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms.client_opt import not_plain, plain_steps
from mixfl.algorithms.contract import Broadcast, ClientFeed, Sums
from mixfl.algorithms.marks import uses_own_loss_only
from mixfl.errors import MixflError, unknown
from mixfl.forms.base import Candidate, Form, Part, Refused
from mixfl.problem import Federated
from mixfl.trees import named_leaves, on_named

# A client's rows are padded to one of at most SIZES sizes. Each is half of the one before, and the
# smallest has at least SMALLEST rows. Every size is compiled. A client costs as much as its size.
SIZES, SMALLEST = 5, 64


class Table(NamedTuple):
    columns: tuple[str, ...]  # the data's columns that name its rows
    rows: int


def distinct(tables: Mapping[str, Table]) -> dict[str, list[str]]:
    """The tables whose rows a client must name, each with all tables of which it then holds the
    same: those that share columns."""
    alike: dict[Table, list[str]] = {}
    for name in sorted(tables):
        alike.setdefault(tables[name], []).append(name)
    return {names[0]: names for names in alike.values()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows(Part):
    """Some rows of a table that is zero elsewhere. The id `table`, which is not a row, marks
    padding; its values are 0."""

    ids: Any  # [n]
    values: Any  # [n, ...]
    table: int = field(metadata={"static": True})  # rows of the whole table

    def squares(self):
        return jnp.sum(jnp.square(self.values.astype(jnp.float32)))

    def scaled(self, factor):
        return Rows(self.ids, (factor * self.values).astype(self.values.dtype), self.table)

    def mapped(self, function):
        return Rows(self.ids, function(self.values), self.table)

    def of_group(self):
        values = self.values.reshape(-1, *self.values.shape[2:])
        return Rows(self.ids.reshape(-1), values, self.table)

    def zero(self):
        return jnp.zeros((self.table, *self.values.shape[1:]), self.values.dtype)

    def added_to(self, total):
        return total.at[self.ids].add(self.values, mode="drop")


class RowForm(Form):
    name = "rows"

    def __init__(self, tables: Mapping[str, Table], most: Mapping[str, int]):
        self.tables = tables
        self.most = most  # per table, the most rows that a client's batches can name

    def read(self, feed: ClientFeed) -> ClientFeed:
        data, ids = renumber(feed.batches.data, self.tables, self.most)
        batches = feed.batches._replace(data=data)
        return feed._replace(batches=batches, notes={**(feed.notes or {}), self.name: ids})

    def narrow(self, term, broadcast, feed):
        return term, restrict(broadcast, feed.notes[self.name]), feed

    def summand(self, sums, feed):
        return self.marked(sums, feed.notes[self.name])

    def marked(self, sums: Sums, ids: Mapping[str, Any]) -> Sums:
        """Turns sums that have only the rows `ids` of tables into Rows of the whole tables."""

        def rows(leaf, n):
            table = self.tables[n].rows
            held = (ids[n] < table).reshape(-1, *[1] * (leaf.ndim - 1))
            return Rows(ids[n], jnp.where(held, leaf, 0), table)  # padding may be NaN

        mark = functools.partial(on_named, rows, {n: n for n in ids})
        unweighted = None if sums.unweighted is None else mark(sums.unweighted)
        return sums._replace(weighted=mark(sums.weighted), unweighted=unweighted)

    def around(self, step: Callable) -> Callable:
        """Pads the rows of each client, or group of clients, to the smallest of a few sizes that
        fits. The program has a branch for every size."""

        def sized(carry, feed):
            rows = feed.notes[self.name]
            sizes = padded_sizes({n: ids.shape[-1] for n, ids in rows.items()})
            held = {n: jnp.max(jnp.sum(i < self.tables[n].rows, -1)) for n, i in rows.items()}
            fits = [jnp.all(jnp.stack([held[n] <= k for n, k in size.items()])) for size in sizes]
            level = sum((f.astype(jnp.int32) for f in fits[1:]), jnp.zeros((), jnp.int32))

            def branch(size, carry, feed):
                cut = {n: feed.notes[self.name][n][..., :k] for n, k in size.items()}
                return step(carry, feed._replace(notes={**feed.notes, self.name: cut}))

            branches = [functools.partial(branch, size) for size in sizes]
            return jax.lax.switch(level, branches, carry, feed)

        return sized

    def trained(self, numbers):
        """A typical client holds about a quarter of the most rows."""
        numbers = dict(numbers)
        for n, most in self.most.items():
            numbers[n] = numbers[n] // self.tables[n].rows * most // 4
        return numbers


def choose(c: Candidate) -> Form | Refused | None:
    if not c.term.rows or c.settings.tables == "dense":
        return None
    if c.single:
        reason = f"aggregation = {c.settings.aggregation} compares the whole changes of all clients"
    elif not uses_own_loss_only(c.algorithm):
        reason = "the clients' steps of this algorithm may use rows beyond those in their own data"
    elif not plain_steps(c.settings):
        reason = f"{not_plain(c.settings)} also moves rows that are not in a client's data"
    else:
        marked = tables(c.term, c.x)
        return RowForm(marked, most_rows(c, marked) if c.term.here else {})
    if c.settings.tables == "rows":
        raise MixflError(f"tables = rows is not exact here: {reason}. Set tables = auto.")
    return Refused(f"clients get the whole of {', '.join(c.term.rows)}: {reason}")


def most_rows(c: Candidate, marked: Mapping[str, Table]) -> dict[str, int]:
    columns, examples = c.term.examples.columns, c.steps * c.batch
    named = {n: sum(int(np.prod(columns[k].shape)) for k in t.columns) for n, t in marked.items()}
    return {n: min(t.rows, examples * named[n]) for n, t in marked.items()}


def tables(term: Federated, x: Any) -> dict[str, Table]:
    """The tables that a term marks, checked against the parameters' shapes `x` and its data."""
    leaves = named_leaves(x)
    marked: dict[str, Table] = {}
    for parameter, given in term.rows.items():
        if parameter not in leaves:
            raise unknown(f"parameter in the rows of term '{term.name}'", parameter, leaves)
        columns = (given,) if isinstance(given, str) else tuple(given)
        if not columns or not leaves[parameter].shape:
            raise MixflError(
                f"rows of '{parameter}': expected a table and the columns that name its rows."
            )
        for column in columns if term.here else ():
            if column not in term.examples.columns:
                raise unknown(f"column in the rows of '{parameter}'", column, term.examples.columns)
            dtype = term.examples.columns[column].dtype
            if dtype.kind not in "iu":
                raise MixflError(
                    f"column '{column}' names rows of '{parameter}': expected whole numbers, got "
                    f"{dtype}."
                )
        # Tables that share a column are numbered alike: a client holds the same rows of each.
        alike = [n for n, t in marked.items() if set(t.columns) & set(columns)]
        columns = tuple(dict.fromkeys([*(c for n in alike for c in marked[n].columns), *columns]))
        marked[parameter] = Table(columns, leaves[parameter].shape[0])
        for n in alike:
            if marked[n].rows != marked[parameter].rows:
                raise MixflError(
                    f"'{n}' and '{parameter}' share a column that names their rows, but have "
                    f"{marked[n].rows} and {marked[parameter].rows} rows."
                )
            marked[n] = Table(columns, marked[n].rows)
    return marked


def renumber(data: Mapping[str, np.ndarray], marked: Mapping[str, Table], most: Mapping[str, int]):
    """For clients' batches (columns [clients, ...]): the batches with positions among the client's
    own rows in place of row numbers, and these rows {table: [clients, most]}, padded to `most`."""
    data, ids = dict(data), dict[str, np.ndarray]()
    for table in dict.fromkeys(marked.values()):
        alike = [parameter for parameter, other in marked.items() if other == table]
        clients = len(data[table.columns[0]])
        columns = [data[c].reshape(clients, -1) for c in table.columns]
        values = np.concatenate(columns, axis=1)
        if values.size and not (values.min() >= 0 and values.max() < table.rows):
            raise MixflError(
                f"columns {', '.join(table.columns)} name row "
                f"{values.min() if values.min() < 0 else values.max()} of '{alike[0]}', which has "
                f"the rows 0 to {table.rows - 1}."
            )
        own = np.full((clients, most[alike[0]]), table.rows, np.int32)
        local = np.empty(values.shape, np.int32)
        place = np.empty(table.rows, np.int32)  # only entries just written are read
        order = np.arange(values.shape[1], dtype=np.int32)
        # Reused for each client: allocating memory takes a lock that the running round needs too.
        v, last = np.empty(order.shape, np.intp), np.empty(order.shape, bool)
        for i in range(clients):
            v[:] = values[i]
            place[v] = order
            np.equal(np.take(place, v, out=local[i], mode="clip"), order, out=last)
            distinct = v[last]  # each row once, where it occurs last
            own[i, : len(distinct)] = distinct
            place[distinct] = order[: len(distinct)]
            np.take(place, v, out=local[i], mode="clip")
        at = 0
        for column, flat in zip(table.columns, columns, strict=True):
            part = local[:, at : at + flat.shape[1]]
            data[column], at = part.reshape(data[column].shape), at + flat.shape[1]
        ids |= dict.fromkeys(alike, own)
    return data, ids


def restrict(broadcast: Broadcast, ids: Mapping[str, Any]) -> Broadcast:
    """What a client gets: only its own rows of the tables."""

    def take(tree):
        return on_named(
            lambda t, rows: jnp.asarray(t).at[rows].get(mode="fill", fill_value=0), ids, tree
        )

    aug = None if broadcast.aug is None else take(broadcast.aug)
    return broadcast._replace(x=take(broadcast.x), aug=aug)


def padded_sizes(most: Mapping[str, int]) -> list[dict[str, int]]:
    """The sizes to which a client's rows are padded, largest first."""
    sizes = [dict(most)]
    while len(sizes) < SIZES and max(sizes[-1].values()) >= 2 * SMALLEST:
        sizes.append({n: -(-k // 2) for n, k in sizes[-1].items()})
    return sizes

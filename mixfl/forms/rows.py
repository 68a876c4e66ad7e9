"""Row-sparse parameters: of a table, a client gets, trains and uploads only its own rows.

A term marks tables and the columns of its data that name their rows (`Federated.rows`). For a
client, the table is replaced by the rows that its batches name, and those columns by positions
in it; the loss does not notice.

In the dense algorithm the other rows move too, by the augmenting gradient alone: -eta K_i aug.
So a client uploads what its own data caused, Delta_i + eta K_i aug, which is 0 on every row that
it does not hold, and the server takes eta aug sum p_i K_i off the sum once. This is exact for
plain SGD at the client. Where it would not be, the tables are dense.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms.contract import Algorithm, Message, Sums, Upload
from mixfl.errors import MixflError, unknown
from mixfl.forms.lookups import by_lookups
from mixfl.forms.low_rank import is_local
from mixfl.optimizers import make
from mixfl.problem import Federated, Problem
from mixfl.settings import Settings
from mixfl.trees import named_leaves, on_named

# A client's rows are padded to one of at most so many sizes, each half of the one before, the
# smallest no less than so many rows: every size is compiled, and a client costs what its size does.
SIZES, SMALLEST = 5, 64


class Table(NamedTuple):
    columns: tuple[str, ...]  # of the data, which name its rows
    rows: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Some rows of a table, which is zero elsewhere. An id that is no row (`table`) is padding."""

    ids: Any  # [n]
    values: Any  # [n, ...]
    table: int = field(metadata={"static": True})  # rows of the whole table


def tables(term: Federated, x: Any) -> dict[str, Table]:
    """The tables that a term marks, checked against the parameters' shapes `x` and its data."""
    leaves = named_leaves(x)
    found: dict[str, Table] = {}
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
        alike = [n for n, t in found.items() if set(t.columns) & set(columns)]
        columns = tuple(dict.fromkeys([*(c for n in alike for c in found[n].columns), *columns]))
        found[parameter] = Table(columns, leaves[parameter].shape[0])
        for n in alike:
            if found[n].rows != found[parameter].rows:
                raise MixflError(
                    f"'{n}' and '{parameter}' share a column that names their rows, but have "
                    f"{found[n].rows} and {found[parameter].rows} rows."
                )
            found[n] = Table(columns, found[n].rows)
    return found


def why_dense(algorithm: Algorithm, s: Settings) -> str | None:
    """Why tables are dense in this run, or None where a client's own rows are all it needs."""
    if s.tables == "dense":
        return "tables = dense"
    if s.aggregation != "mean":
        reason = f"aggregation = {s.aggregation} compares the whole changes of all clients"
    elif not algorithm.feed.own:
        reason = "the clients' steps of this algorithm use rows beyond those in their own data"
    elif not make(s.client_opt, s.client_lr).plain:
        reason = f"client_opt = {s.client_opt} also moves rows that are not in a client's data"
    else:
        return None
    if s.tables == "rows":
        raise MixflError(f"tables = rows is not exact here: {reason}. Set tables = auto.")
    return reason


# The client's side


def renumber(data: Mapping[str, np.ndarray], marked: Mapping[str, Table], most: Mapping[str, int]):
    """For clients' batches (columns [clients, ...]): the rows that each names, padded to `most`
    ids {table: [clients, most]}, and the batches with positions in those in place of the rows."""
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
        # Used again for each client: memory is asked for under a lock that the round takes too.
        v, last = np.empty(order.shape, np.intp), np.empty(order.shape, bool)
        for i in range(clients):
            v[:] = values[i]
            place[v] = order
            np.equal(np.take(place, v, out=local[i], mode="clip"), order, out=last)
            distinct = v[last]  # a row where it stands last
            own[i, : len(distinct)] = distinct
            place[distinct] = order[: len(distinct)]
            np.take(place, v, out=local[i], mode="clip")
        at = 0
        for column, flat in zip(table.columns, columns, strict=True):
            part = local[:, at : at + flat.shape[1]]
            data[column], at = part.reshape(data[column].shape), at + flat.shape[1]
        ids |= dict.fromkeys(alike, own)
    return data, ids


def restrict(message: Message, ids: Mapping[str, Any]) -> Message:
    """What a client gets: of the tables, only its rows."""

    def take(tree):
        return on_named(
            lambda t, rows: jnp.asarray(t).at[rows].get(mode="fill", fill_value=0), ids, tree
        )

    return Message(take(message.x), None if message.aug is None else take(message.aug))


def own_part(upload: Upload, aug, ids: Mapping[str, Any], eta: float) -> Upload:
    """The upload with what the client's own data caused, on its rows."""
    if aug is None:
        return upload
    own = on_named(
        lambda d, _, a: (d + eta * upload.steps * a).astype(d.dtype), ids, upload.delta, aug
    )
    return upload._replace(delta=own)


# The server's side


def add_rows(total, summand):
    """total + summand, where leaves of `summand` may be Rows."""

    def plus(leaf, more):
        if isinstance(more, Rows):
            return leaf.at[more.ids].add(more.values, mode="drop")
        return leaf + more

    return jax.tree.map(plus, total, summand)


def sum_of_group(stacked):
    """The sum over the first axis; Rows of several clients stay apart, as Rows of all of them."""

    def one(leaf):
        if isinstance(leaf, Rows):
            values = leaf.values.reshape(-1, *leaf.values.shape[2:])
            return Rows(leaf.ids.reshape(-1), values, leaf.table)
        return leaf.sum(0)

    return jax.tree.map(one, stacked, is_leaf=lambda leaf: isinstance(leaf, Rows))


def zeros_for(summand):
    """Where sums begin: zeros for arrays, a whole table of zeros for Rows."""

    def zero(leaf):
        if isinstance(leaf, Rows):
            return jnp.zeros((leaf.table, *leaf.values.shape[1:]), leaf.values.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(zero, summand, is_leaf=lambda leaf: isinstance(leaf, Rows))


def complete(message: Message, sums: Sums, names, eta: float) -> Sums:
    """The dense algorithm's sums: every client moved all rows by the augmenting gradient too."""
    if message.aug is None:
        return sums

    def completed(total, steps):
        if total is None:
            return None
        return on_named(lambda t, _, a: t - eta * steps * a, names, total, message.aug)

    return sums._replace(
        weighted=completed(sums.weighted, sums.weighted_steps),
        delta=completed(sums.delta, sums.steps),
    )


def row_sparse(algorithm: Algorithm, problem: Problem, s: Settings,
               marked: Mapping[str, Mapping[str, Table]]) -> Algorithm:  # fmt: skip
    """The same algorithm with row-sparse clients. `marked` has the tables of each population."""
    if not any(marked.values()):
        return algorithm
    if algorithm.phase is not None:
        at = algorithm.phase
        wrapped = functools.cache(lambda a: row_sparse(a, problem, s, marked))
        return row_sparse(algorithm._replace(phase=None), problem, s, marked)._replace(
            phase=lambda t: wrapped(at(t))
        )
    if not algorithm.feed.clients or why_dense(algorithm, s):
        return algorithm
    rows_of = {n: t.rows for found in marked.values() for n, t in found.items()}

    def client(term, message, feed):
        if not feed.rows:
            return algorithm.client(term, message, feed)
        own = restrict(message, feed.rows)
        if not any(map(is_local, jax.tree.leaves(own.x, is_leaf=is_local))):
            term = by_lookups(term, feed.rows)
        upload = algorithm.client(term, own, feed._replace(rows=None))
        return own_part(upload, own.aug, feed.rows, s.client_lr)._replace(rows=feed.rows)

    def summand(upload):
        sums, ids = algorithm.summand(upload._replace(rows=None)), upload.rows or {}

        def rows(leaf, n):
            held = (ids[n] < rows_of[n]).reshape(-1, *[1] * (leaf.ndim - 1))
            return Rows(ids[n], jnp.where(held, leaf, 0), rows_of[n])  # padding may be NaN

        mark = functools.partial(on_named, rows)
        names = {n: n for n in ids}
        return sums._replace(
            weighted=mark(names, sums.weighted),
            delta=None if sums.delta is None else mark(names, sums.delta),
        )

    def update(state, messages, sums, central):
        sums = [
            complete(message, sum_j, marked[term.name], s.client_lr)
            for term, message, sum_j in zip(problem.populations, messages, sums, strict=True)
        ]
        return algorithm.update(state, messages, sums, central)

    return algorithm._replace(client=client, summand=summand, update=update)


def at_own_size(step: Callable, rows_of: Mapping[str, int]) -> Callable:
    """step(carry, feed) of a scan over clients, or groups of clients, each with its rows padded to
    the smallest of a few sizes that has room for them: the program has a branch for every size."""

    def sized(carry, feed):
        if not feed.rows:
            return step(carry, feed)
        sizes = padded_sizes({n: ids.shape[-1] for n, ids in feed.rows.items()})
        held = {n: jnp.max(jnp.sum(ids < rows_of[n], -1)) for n, ids in feed.rows.items()}
        fits = [jnp.all(jnp.stack([held[n] <= k for n, k in size.items()])) for size in sizes[1:]]
        level = sum((f.astype(jnp.int32) for f in fits), jnp.zeros((), jnp.int32))

        def branch(size, carry, feed):
            rows = {n: feed.rows[n][..., :k] for n, k in size.items()}
            return step(carry, feed._replace(rows=rows))

        branches = [functools.partial(branch, size) for size in sizes]
        return jax.lax.switch(level, branches, carry, feed)

    return sized


def padded_sizes(most: Mapping[str, int]) -> list[dict[str, int]]:
    """The sizes to which a client's rows are padded, largest first."""
    sizes = [dict(most)]
    while len(sizes) < SIZES and max(sizes[-1].values()) >= 2 * SMALLEST:
        sizes.append({n: -(-k // 2) for n, k in sizes[-1].items()})
    return sizes

"""What a form is: another exact way to compute the clients of one population.

A client trains and uploads the whole model. Often much of that can be left out: table rows that its
data does not name, or a first layer whose change has low rank. A form leaves it out, and the sums
are the same up to rounding. It is a few methods around the algorithm's own `client`:

    read       on the host: collects what the round must know about the batches
    start      in the round, for all clients at once, before the first one trains
    narrow     replaces one client's term, broadcast and feed
    summand    replaces arrays of the client's summand by Parts, which are never formed
    widen      turns Parts that were kept for each client into arrays of the sums

The defaults change nothing, so a form defines only the methods that it needs. A form's module has
`choose(Candidate)`. It returns the form, None, or a `Refused`: why a form that the user may expect
is not used.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixfl.algorithms.contract import Algorithm, Broadcast, ClientFeed, Sums
from mixfl.problem import Federated, Params
from mixfl.settings import Settings

FEW = 16  # clients of a group, whose arrays are added one by one


class Part:
    """Stands for an array of a summand that is never formed. A leaf of the summand's tree."""

    kept = False  # if True, it is kept for each client until `widen` makes one array of all

    def to_keep(self) -> "Part":
        """The part of it that `widen` needs."""
        return self

    def squares(self) -> Any:
        """The sum of the array's squares."""
        raise NotImplementedError

    def scaled(self, factor) -> "Part":
        raise NotImplementedError

    def mapped(self, function: Callable) -> "Part":
        """Applies an elementwise function that maps 0 to 0."""
        raise NotImplementedError

    def of_group(self) -> "Part":
        """Turns the Parts of several clients, stacked along the first axis, into one."""
        raise NotImplementedError

    def zero(self) -> Any:
        """The array of zeros that a sum starts from."""
        raise NotImplementedError

    def added_to(self, total) -> Any:
        raise NotImplementedError


def is_part(leaf: Any) -> bool:
    return isinstance(leaf, Part)


def map_parts(function: Callable, tree: Any, *more: Any) -> Any:
    """`jax.tree.map` with a Part as one leaf."""
    return jax.tree.map(function, tree, *more, is_leaf=is_part)


def leaves_and_parts(tree: Any) -> list:
    return jax.tree.leaves(tree, is_leaf=is_part)


class Form:
    name = ""
    large_groups = False  # a whole cohort may train at once, if clients train few numbers
    alone = False  # on a CPU, each client trains by itself

    def read(self, feed: ClientFeed) -> ClientFeed:
        return feed

    def start(self, term: Federated, broadcast: Broadcast, feeds: ClientFeed):
        """`feeds` has the feeds of all clients, [clients, ...]. Returns the form to continue with,
        and the three arguments."""
        return self, term, broadcast, feeds

    def narrow(self, term: Federated, broadcast: Broadcast, feed: ClientFeed):
        return term, broadcast, feed

    def summand(self, sums: Sums, feed: ClientFeed) -> Sums:
        return sums

    def widen(self, sums: Sums, without: Any) -> Sums:
        """`without` [clients] marks the clients that are left out. None: there are none."""
        return sums

    def around(self, step: Callable) -> Callable:
        """Wraps step(carry, feed) of the scan over clients, or over groups of clients."""
        return step

    def trained(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """How many numbers of each parameter a client usually trains."""
        return dict(numbers)


class Candidate(NamedTuple):
    """What `choose` decides from."""

    term: Federated
    x: Params  # shapes
    algorithm: Algorithm
    settings: Settings
    steps: int  # the most steps that a client takes
    batch: int  # its largest batch
    single: bool  # summands are compared with each other, so they must be arrays
    squares: bool  # the aggregation needs the norms of summands
    elements: bool  # the aggregation changes single numbers of a summand
    others: Sequence[Form] = ()  # the forms chosen before this one
    platform: str = "cpu"  # where it runs


class Refused(str):
    """Why a form is not used: the end of a sentence."""


def start(forms: Sequence[Form], term: Federated, broadcast: Broadcast, feeds: ClientFeed):
    begun = []
    for form in forms:
        form, term, broadcast, feeds = form.start(term, broadcast, feeds)
        begun.append(form)
    return begun, term, broadcast, feeds


def client_summand(
    algorithm: Algorithm, forms: Sequence[Form], term, broadcast, feed
) -> tuple[Any, Any]:
    """What one client adds to the sums, and what it keeps."""
    own = feed
    for form in forms:
        term, broadcast, own = form.narrow(term, broadcast, own)
    own = own._replace(notes=None, key=None)
    upload = algorithm.client(term, broadcast, own)
    sums = algorithm.summand(upload)
    if getattr(sums, "extra", None) is not None:  # a place without a client sends nothing
        real = jax.tree.map(lambda a: jnp.where(sums.steps > 0, a, 0), sums.extra)
        sums = sums._replace(extra=real)
    for form in reversed(forms):
        sums = form.summand(sums, feed)
    return sums, getattr(upload, "state", None)


def alone(algorithm: Algorithm, forms: Sequence[Form], term, broadcast, feed) -> Any:
    """The same for a client that trains by itself, as in a deployment. All arrays are formed."""
    stacked = jax.tree.map(lambda a: a[None], feed)
    begun, term, broadcast, stacked = start(forms, term, broadcast, stacked)
    feed = jax.tree.map(lambda a: a[0], stacked)
    sums, _ = client_summand(algorithm, begun, term, broadcast, feed)
    sums = map_parts(lambda a: jax.tree.map(lambda b: b[None], a) if is_part(a) else a, sums)
    for form in begun:
        sums = form.widen(sums, None)
    return sums


def squares(leaf: Any) -> Any:
    if is_part(leaf):
        return leaf.squares()
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


def mapped(function: Callable, leaf: Any) -> Any:
    """Applies an elementwise function that maps 0 to 0."""
    return leaf.mapped(function) if is_part(leaf) else function(leaf)


def scaled(factor: Any, leaf: Any) -> Any:
    return leaf.scaled(factor) if is_part(leaf) else (factor * leaf).astype(leaf.dtype)


def zeros_for(summand: Any) -> Any:
    """The zeros that sums start from."""
    return map_parts(lambda a: a.zero() if is_part(a) else jnp.zeros(a.shape, a.dtype), summand)


def add_to(total: Any, summand: Any) -> Any:
    """total + summand. Leaves of the summand may be Parts."""
    return jax.tree.map(lambda t, a: a.added_to(t) if is_part(a) else t + a, total, summand)


def sum_of_group(stacked: Any) -> Any:
    """The sum over the first axis. A few arrays are added one by one: XLA's own sum over a first
    axis is slow on a CPU (two arrays of 1.2 million numbers took 24 ms in place of 0.5)."""

    def total(a):
        if len(a) > FEW:
            return a.sum(0)
        return functools.reduce(operator.add, (a[i] for i in range(len(a))))

    return map_parts(lambda a: a.of_group() if is_part(a) else total(a), stacked)

"""What a form is: an exact other way to compute the clients of one population.

A client trains and uploads the whole model. Often much of that can be left out: rows of a table
that its data does not name, a first layer whose change has low rank. A form leaves it out, and the
sums come out the same, to rounding. It is a few methods around the algorithm's own `client`:

    read       at the host: what the round must know of the batches
    start      in the round, for all clients at once, before the first one trains
    narrow     what one client gets in place of its term, its broadcast and its feed
    summand    its summand, with Parts in place of arrays that are not formed
    widen      the sums over all clients, with arrays in place of what was kept of each

The defaults change nothing, so a form has only the methods that it needs. A module of a form has
`choose(Candidate)`, which returns the form, or why it is not used where one would expect it
(a `Refused`), or None.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixfl.algorithms.contract import Algorithm, Broadcast, ClientFeed, Sums
from mixfl.problem import Federated, Params
from mixfl.settings import Settings


class Part:
    """In a summand, what stands for an array that is not formed: a leaf of its tree."""

    kept = False  # each client's is kept, and the form's `widen` makes one array of them

    def to_keep(self) -> "Part":
        """What is needed of it until then."""
        return self

    def squares(self) -> Any:
        """The sum of the squares of the array."""
        raise NotImplementedError

    def scaled(self, factor) -> "Part":
        raise NotImplementedError

    def mapped(self, function: Callable) -> "Part":
        """With a function of single numbers, by which 0 stays 0."""
        raise NotImplementedError

    def of_group(self) -> "Part":
        """Those of several clients, stacked along the first axis, as one."""
        raise NotImplementedError

    def zero(self) -> Any:
        """The array that a sum begins with."""
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
    large_groups = False  # a whole cohort may train at once, where clients train few numbers

    def read(self, feed: ClientFeed) -> ClientFeed:
        return feed

    def start(self, term: Federated, broadcast: Broadcast, feeds: ClientFeed):
        """`feeds` has those of all clients, [clients, ...]. Returns the form to go on with, and
        the three arguments."""
        return self, term, broadcast, feeds

    def narrow(self, term: Federated, broadcast: Broadcast, feed: ClientFeed):
        return term, broadcast, feed

    def summand(self, sums: Sums, feed: ClientFeed) -> Sums:
        return sums

    def widen(self, sums: Sums, without: Any) -> Sums:
        """`without` [clients] says which clients are left out; None if none is."""
        return sums

    def around(self, step: Callable) -> Callable:
        """step(carry, feed) of the scan over clients, or groups of clients."""
        return step

    def trained(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """How many numbers of each parameter a client usually trains."""
        return dict(numbers)


class Candidate(NamedTuple):
    """What a form is chosen by."""

    term: Federated
    x: Params  # shapes
    algorithm: Algorithm
    settings: Settings
    steps: int  # the most that a client takes
    batch: int  # its largest batch
    single: bool  # summands are compared with each other, so that they must be arrays
    squares: bool  # the norm of a summand is asked for
    elements: bool  # single numbers of a summand are changed
    others: Sequence[Form] = ()  # chosen before


class Refused(str):
    """Why a form is not used, as the end of a sentence."""


def start(forms: Sequence[Form], term: Federated, broadcast: Broadcast, feeds: ClientFeed):
    begun = []
    for form in forms:
        form, term, broadcast, feeds = form.start(term, broadcast, feeds)
        begun.append(form)
    return begun, term, broadcast, feeds


def client_summand(algorithm: Algorithm, forms: Sequence[Form], term, broadcast, feed) -> Any:
    """What one client adds to the sums."""
    own = feed
    for form in forms:
        term, broadcast, own = form.narrow(term, broadcast, own)
    own = own._replace(notes=None, key=None)
    sums = algorithm.summand(algorithm.client(term, broadcast, own))
    for form in reversed(forms):
        sums = form.summand(sums, feed)
    return sums


def alone(algorithm: Algorithm, forms: Sequence[Form], term, broadcast, feed) -> Any:
    """The same for a client that trains by itself, as in a deployment: all arrays are formed."""
    stacked = jax.tree.map(lambda a: a[None], feed)
    begun, term, broadcast, stacked = start(forms, term, broadcast, stacked)
    feed = jax.tree.map(lambda a: a[0], stacked)
    sums = client_summand(algorithm, begun, term, broadcast, feed)
    sums = map_parts(lambda a: jax.tree.map(lambda b: b[None], a) if is_part(a) else a, sums)
    for form in begun:
        sums = form.widen(sums, None)
    return sums


def squares(leaf: Any) -> Any:
    if is_part(leaf):
        return leaf.squares()
    return jnp.sum(jnp.square(leaf.astype(jnp.float32)))


def mapped(function: Callable, leaf: Any) -> Any:
    """A function of single numbers, by which 0 stays 0."""
    return leaf.mapped(function) if is_part(leaf) else function(leaf)


def scaled(factor: Any, leaf: Any) -> Any:
    return leaf.scaled(factor) if is_part(leaf) else (factor * leaf).astype(leaf.dtype)


def zeros_for(summand: Any) -> Any:
    """Where sums begin."""
    return map_parts(lambda a: a.zero() if is_part(a) else jnp.zeros(a.shape, a.dtype), summand)


def add_to(total: Any, summand: Any) -> Any:
    """total + summand, where leaves of the summand may be Parts."""
    return jax.tree.map(lambda t, a: a.added_to(t) if is_part(a) else t + a, total, summand)


def sum_of_group(stacked: Any) -> Any:
    """The sum over the first axis."""
    return map_parts(lambda a: a.of_group() if is_part(a) else a.sum(0), stacked)

"""Runs a deployment's problem in the simulator, with all nodes' data in one place."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mixfl.data.examples import ClientData, checked
from mixfl.errors import MixflError, unknown
from mixfl.problem import AtNodes, Federated, Problem


def simulated(problem: Problem, nodes: Sequence[Mapping[str, Any]]) -> Problem:
    """The problem with the data of `nodes`, each given by its node configuration.

    A population's clients are in order of their numbers, as in the deployment.

    >>> own = lambda node: {"x": np.ones((3, 4)), "y": np.full(3, node["partition-id"])}
    >>> there = mixfl.Problem(init, [mixfl.Federated(loss, own)])
    >>> here = mixfl.flower.simulated(there, [{"partition-id": 0}, {"partition-id": 1}])
    >>> len(here.populations[0].clients)
    2
    """
    places = [(population(problem, node).name, number(node), node) for node in nodes]
    terms = []
    for term in problem.terms:
        if isinstance(term, Federated) and not term.here:
            own = sorted((n, i) for i, (name, n, _) in enumerate(places) if name == term.name)
            loaded = {f"{n}.{i}": load(term, nodes[i]).examples.all() for n, i in own}
            if not loaded:
                raise MixflError(f"none of the {len(nodes)} nodes belongs to '{term.name}'.")
            term = dataclasses.replace(term, clients=ClientData.from_clients(loaded))
        terms.append(term)
    return dataclasses.replace(problem, terms=terms)


def population(problem: Problem, node: Mapping[str, Any]) -> Federated:
    """The term that a node's data belongs to."""
    names = {term.name: term for term in problem.populations}
    if len(names) == 1 and "population" not in node:
        return problem.populations[0]
    if node.get("population") not in names:
        raise unknown("population in the node's configuration", node.get("population"), names)
    return names[node["population"]]


def number(node: Mapping[str, Any]) -> int:
    """A client's number, which determines the order of its data: `partition-id`, or the node's
    id."""
    given = node.get("partition-id", node.get("node-id", 0))
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 2**64:
        raise MixflError(f"partition-id = {given!r}: expected a whole number of at least 0.")
    return given


def load(term: Federated, node: Mapping[str, Any]) -> ClientData:
    """A node's own data, as one client."""
    if not isinstance(term.clients, AtNodes):
        raise MixflError(
            f"the data of '{term.name}' is in the problem itself: for a deployment, give Federated "
            "a function that loads a node's own examples (see docs/flower.md)."
        )
    given = term.clients.load(node)
    if isinstance(given, ClientData):
        given = given.examples.all()
    columns = checked(given)
    return ClientData.from_clients({"own": columns})

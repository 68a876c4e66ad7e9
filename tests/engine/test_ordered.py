"""Collectives in loops have one order on all devices: see mixfl/engine/ordered.py."""

import re

import jax
import numpy as np
import pytest
from problems import problem, settings

import mixfl
from mixfl.algorithms import ALGORITHMS
from mixfl.engine import Simulator

COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter")


def computations(text: str) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """{computation: {result: (operation, names that it refers to)}}, from XLA's text."""
    found: dict[str, dict[str, tuple[str, list[str]]]] = {}
    current: dict = {}
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = found.setdefault(begins[1], {})
        elif made := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)$", line):
            what = re.split(r", (?:metadata|backend_config)=", made[2])[0]
            operation = re.search(r"(?:^|[\s)}\]])([a-z][a-z0-9\-]*)\(", what)
            names = re.findall(r"%([\w.\-]+)", what)
            current[made[1]] = (operation[1] if operation else "", names)
    return found


def unordered(text: str) -> tuple[int, list[tuple[str, str]]]:
    """The number of loops with collectives, and their pairs with other collectives (also in loops)
    of which neither needs the other."""
    every = computations(text)

    def exchanges(operation, names) -> bool:
        inner = (i for name in names if name in every for i in every[name].values())
        return bool(COLLECTIVE.match(operation)) or any(exchanges(*one) for one in inner)

    pairs, loops = [], 0
    for made in every.values():
        before: dict[str, set[str]] = {}
        for name, (_, names) in made.items():  # in an order in which they could run
            direct = {n for n in names if n in before}
            before[name] = direct.union(*(before[n] for n in direct))
        exchanging = [name for name, one in made.items() if exchanges(*one)]
        whiles = [name for name in exchanging if made[name][0] == "while"]
        loops += len(whiles)
        pairs += [
            (one, other)
            for one in whiles
            for other in exchanging
            if one != other and one not in before[other] and other not in before[one]
        ]
    return loops, pairs


def compiled(p, name, **changes) -> str:
    s = settings(devices=2, cohort_size=4, **changes)
    simulator = Simulator(p, ALGORITHMS[name].build(p, s), s)
    piece = next(iter(simulator.feeder.pieces(simulator.algorithm, 0)))
    program = simulator.program(simulator.algorithm)
    arguments = (simulator.init(), piece.drawn, piece.clients, simulator.given(program))
    return program.whole.lower(*arguments).compile().as_text()


def several():
    p = problem()
    term = p.populations[0]
    half = len(term.clients) // 2
    parts = [term.clients.select(np.arange(half)), term.clients.select(np.arange(half, 2 * half))]
    pops = [mixfl.Federated(term.loss, c, weight=0.3, name=f"p{i}") for i, c in enumerate(parts)]
    return mixfl.Problem(p.init, [*pops, *p.central])


def central_terms():
    p = problem()
    (term,) = p.central
    rest = [mixfl.Central(term.loss, term.examples.all(), weight=0.3, name=n) for n in "ab"]
    return mixfl.Problem(p.init, [*p.populations, *rest])


MEASURED = dict(local_steps=1, central_steps=1, measure="dissimilarity")


@pytest.mark.parametrize(
    ("make", "name", "changes"),
    [
        (problem, "pt", {}),
        (problem, "pt", MEASURED),  # used to stop for good, after a few rounds on two cores
        (problem, "1wgt", {}),
        (several, "fedavg", {}),
        (several, "2wgt", {}),
        (central_terms, "pt", {}),
    ],
)
def test_loops_that_exchange_results_have_one_order(make, name, changes):
    assert len(jax.devices()) > 1
    p = make()
    loops, pairs = unordered(compiled(p, name, **changes))
    assert loops >= len(p.populations)  # each client loop asks all devices whether it goes on
    assert pairs == []

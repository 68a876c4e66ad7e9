"""What happens between a client's summand and the server's sums: a chain of steps.

    told       what the clients must know of a step's state
    encode     at the client: its summand becomes a code, and a report beside it
    settled    at the server: what it would have told, had it known the reports of this round
    decode     at the server: the sum of the codes becomes the sum of the summands
    next       the state after the round

A step that leaves its defaults alone costs nothing: what it has not is (), which has no arrays.
`encode` is given summands whose leaves may be Parts (forms/base.py).

Some reports change what is told: a limit follows the norms of the round itself. The simulator then
computes the round once more with what was settled, but only if it makes a difference
(`changed`). In a deployment a step runs at the client if it says so (`at_client`), and otherwise at
the server, on each summand as it arrives: there a client's word is not enough.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp


class Step:
    at_client = True  # in a deployment; False: at the server, which can trust nobody else
    squares = False  # asks for the norms of summands
    elements = False  # changes single numbers of summands, which low-rank layers do not form
    random = False  # draws at random: encode gets a key, which no other client or round has

    def init(self) -> Any:
        """The state before the first round, of one population."""
        return ()

    def told(self, state: Any) -> Any:
        return ()

    def encode(self, told: Any, summand: Any, key: Any) -> tuple[Any, Any]:
        """The code and the report of one client."""
        return summand, ()

    def bad(self, report: Any) -> Any:
        """Must the client be left out?"""
        return False

    def settled(self, state: Any, told: Any, reports: Any) -> Any:
        """`reports` are those of all clients, [clients, ...]."""
        return told

    def changed(self, told: Any, settled: Any, reports: Any) -> Any:
        """Would a code be another one with what was settled?"""
        return False

    def counted(self, settled: Any, reports: Any) -> dict[str, Any]:
        """Numbers of clients, for the metrics."""
        return {}

    def decode(self, settled: Any, codes: Any) -> Any:
        return codes

    def next(self, state: Any, reports: Any) -> Any:
        return state


class Chain(Step):
    """Steps one after the other, as one."""

    def __init__(self, steps: Sequence[Step]):
        self.steps = tuple(steps)
        self.squares = any(step.squares for step in steps)
        self.elements = any(step.elements for step in steps)
        self.random = any(step.random for step in steps)

    def at(self, client: bool) -> "Chain":
        """Only the steps that run at the client in a deployment, or only the others."""
        return Chain([step for step in self.steps if step.at_client == client])

    def part(self, values: Sequence[Any], client: bool) -> tuple:
        """Of values for each step, those for `at(client)`."""
        return tuple(
            v for v, step in zip(values, self.steps, strict=True) if step.at_client == client
        )

    def init(self):
        return tuple(step.init() for step in self.steps)

    def told(self, state):
        return tuple(map(lambda step, *a: step.told(*a), self.steps, state))

    def encode(self, told, summand, key):
        reports = []
        for step, told_i in zip(self.steps, told, strict=True):
            summand, report = step.encode(told_i, summand, key)
            reports.append(report)
        return summand, tuple(reports)

    def bad(self, report):
        return _any(map(lambda step, *a: step.bad(*a), self.steps, report))

    def settled(self, state, told, reports):
        return tuple(map(lambda step, *a: step.settled(*a), self.steps, state, told, reports))

    def changed(self, told, settled, reports):
        return _any(map(lambda step, *a: step.changed(*a), self.steps, told, settled, reports))

    def counted(self, settled, reports):
        counts: dict[str, Any] = {}
        for step, settled_i, reports_i in zip(self.steps, settled, reports, strict=True):
            counts |= step.counted(settled_i, reports_i)
        return counts

    def decode(self, settled, codes):
        for step, settled_i in reversed(list(zip(self.steps, settled, strict=True))):
            codes = step.decode(settled_i, codes)
        return codes

    def next(self, state, reports):
        return tuple(map(lambda step, *a: step.next(*a), self.steps, state, reports))


def _any(flags) -> Any:
    total = jnp.bool(False)
    for flag in flags:
        total = total | flag
    return total

"""What happens between a client's summand and the server's sums: a chain of steps.

    told       what the clients must know about a step's state
    encode     at the client: turns its summand into a code and a report
    settled    at the server: what it would have told, knowing the reports of this round
    decode     at the server: turns the sum of the codes into the sum of the summands
    release    at the server, once, on the sums of all devices and chunks: what the algorithm gets
    next       the state after the round

The defaults cost nothing: they return (), which has no arrays. `encode` gets summands whose leaves
may be Parts (forms/base.py). It changes p_i u_i and the gradients; u_i alone follows
from these, unless a step changes it too (`both`).

Reports can change what should have been told: a limit may follow the norms of the same round. The
simulator then computes the round again with the settled values, but only if that makes a difference
(`changed`). In a deployment a step runs at the client if `at_client` is set. Otherwise it runs at
the server, on each summand as it arrives, because a client could cheat. A client's report stays
with it: `settled`, `counted` and `next` of a step that runs at clients get () there.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms.contract import Sums
from mixfl.forms.base import map_parts, scaled
from mixfl.problem import Problem


class Step:
    at_client = True  # in a deployment; False: at the server, as a client could cheat
    squares = False  # needs the norms of summands
    elements = False  # changes single numbers of summands, which low-rank layers do not form
    both = False  # encode changes u_i itself, where it stands beside p_i u_i
    random = False  # draws at random at the client: encode gets a key of its own
    private = False  # what it releases is all that may be told about the clients
    coder = False  # what is sent are codes: `coded` at the client, then `taken` at the server
    half = False  # what is sent are bfloat16 numbers

    def init(self, x: Any, population: int) -> Any:
        """The state before the first round, of one population. `x` is the model, or its shapes."""
        return ()

    def told(self, state: Any) -> Any:
        return ()

    def bound(self, told: Any) -> Any:
        """The norm to which it shortens every client's own part, and the factor of gradients beside
        it. None if there is none."""
        return None

    def within(self, state: Any, told: Any, bound: Any) -> Any:
        """What is told, knowing another step's bound."""
        return told

    def encode(self, told: Any, summand: Any, key: Any) -> tuple[Any, Any]:
        """The code and the report of one client."""
        return summand, ()

    def bad(self, report: Any) -> Any:
        """Must the client be left out?"""
        return False

    def finite(self, report: Any) -> Any:
        """Are the arrays of the summand finite? None if the report does not tell."""
        return None

    def settled(self, state: Any, told: Any, reports: Any) -> Any:
        """`reports` has the reports of all clients, [clients, ...]."""
        return told

    def changed(self, told: Any, settled: Any, reports: Any) -> Any:
        """Would any code differ with the settled values?"""
        return False

    def counted(self, settled: Any, reports: Any) -> dict[str, Any]:
        """Counts of clients, for the metrics."""
        return {}

    def decode(self, settled: Any, codes: Any) -> Any:
        return codes

    def release(self, state: Any, sums: Any) -> tuple[Any, Any]:
        """The sums as the algorithm gets them, and the state after that."""
        return sums, state

    def next(self, state: Any, reports: Any) -> Any:
        return state

    def renewed(self, state: Any, population: int) -> Any:
        """The state with other secrets: rounds that are repeated may have other clients."""
        return state

    def cohort_seed(self, state: Any) -> int | None:
        return None


class Chain(Step):
    """Several steps in a row, as one step."""

    def __init__(self, steps: Sequence[Step]):
        self.steps = tuple(steps)
        self.squares = any(step.squares for step in steps)
        self.elements = any(step.elements for step in steps)
        self.random = any(step.random for step in steps)
        self.private = any(step.private for step in steps)
        self.half = any(step.half for step in steps)

    def at(self, client: bool) -> "Chain":
        """Only the steps that run at the client in a deployment, or only the others."""
        return Chain([step for step in self.steps if step.at_client == client])

    def part(self, values: Sequence[Any], client: bool) -> tuple:
        """From one value per step, the values for the steps of `at(client)`."""
        return tuple(
            v for v, step in zip(values, self.steps, strict=True) if step.at_client == client
        )

    def init(self, x, population):
        return tuple(step.init(x, population) for step in self.steps)

    def told(self, state):
        told = list(map(lambda step, *a: step.told(*a), self.steps, state))
        for bound in filter(None, map(lambda step, *a: step.bound(*a), self.steps, told)):
            told = [
                step.within(s, t, bound) for step, s, t in zip(self.steps, state, told, strict=True)
            ]
        return tuple(told)

    def encode(self, told, summand, key):
        reports = []
        for i, (step, told_i) in enumerate(zip(self.steps, told, strict=True)):
            own = folded(key, i) if step.random else None
            summand, report = step.encode(told_i, summand, own)
            reports.append(report)
            if not step.both and summand.unweighted is not None:
                summand = summand._replace(unweighted=unweighted(summand))
        return summand, tuple(reports)

    @property
    def coder(self) -> Any:  # type: ignore[override]
        """The step that makes what is sent, if it is not the summand itself. It is the last one at
        the client."""
        return next((step for step in self.steps if step.coder), None)

    def of_coder(self, values: Sequence[Any]) -> Any:
        """Its value, from one value per step."""
        return next(v for v, step in zip(values, self.steps, strict=True) if step.coder)

    def bits(self, told: Sequence[Any]) -> int | None:
        """Of the codes that are sent; 0 if all are 0. None if it is no codes."""
        if self.coder is None:
            return None
        return self.coder.bits if np.any(np.asarray(self.of_coder(told).ranges) > 0) else 0

    def coded(self, told: Any, summand: Any, key: Any) -> tuple[Any, Any]:
        """At the client of a deployment: what is sent, and the report of the coder."""
        if self.coder is None:
            return self.encode(told, summand, key)[0], None
        *before, last = self.steps
        summand, _ = Chain(before).encode(told[:-1], summand, key)
        own = folded(key, len(before)) if last.random else None
        return self.coder.coded(told[-1], summand, own)

    def bad(self, report):
        return _any(map(lambda step, *a: step.bad(*a), self.steps, report))

    def finite(self, report):
        return self.steps[-1].finite(report[-1]) if self.steps else None

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

    def release(self, state, sums):
        states = []
        for step, state_i in zip(self.steps, state, strict=True):
            sums, after = step.release(state_i, sums)
            states.append(after)
        return sums, tuple(states)

    def renewed(self, state, population):
        steps = zip(self.steps, state, strict=True)
        return tuple(step.renewed(state_i, population) for step, state_i in steps)

    def cohort_seed(self, state) -> int | None:
        """The secret that cohorts are drawn from. None: they are drawn from the run's seed."""
        for step, state_i in zip(self.steps, state, strict=True):
            if step.private:
                return step.cohort_seed(state_i)
        return None

    def published(self, info: dict[str, Any], problem: Problem) -> dict[str, Any]:
        """A round's numbers without those that come from clients, if these are private."""
        if not self.private:
            return info
        losses = {f"train/{p.name}/loss" for p in problem.populations}
        hidden = ("clients/", "replies/")
        told = {k: v for k, v in info.items() if k not in losses and not k.startswith(hidden)}
        return {**told, "clients/rejected": 0}

    def next(self, state, reports):
        return tuple(map(lambda step, *a: step.next(*a), self.steps, state, reports))


def unweighted(code: Sums) -> Any:
    """u_i from p_i u_i. A client encodes and sends one array, and it serves both sums."""
    return map_parts(lambda a: scaled(1 / jnp.maximum(code.weight, 1e-30), a), code.weighted)


def folded(key: Any, i: int) -> jax.Array:
    """The key of a client's i-th step, from the two words of its feed."""
    return jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), i)


def _any(flags) -> Any:
    total = jnp.bool(False)
    for flag in flags:
        total = total | flag
    return total

"""Whether the noise of a private run drowns what its clients say.

In a round's mean, noise has about the norm z C sqrt(d) / S for d parameters, and the clients'
changes have at most C. Far above that, a step goes where the noise goes. Central data still helps,
and noise averages over rounds, so much is learned at ratios of 2 to 5, and something at 10
(docs/privacy.md has what we measured).
"""

import math
from collections.abc import Iterator

import jax

from mixfl.aggregation.private import deviations
from mixfl.engine.auto import model_shapes
from mixfl.problem import Problem
from mixfl.settings import Settings

LOUD = 10.0  # times the clip norm


def notes(problem: Problem, s: Settings) -> Iterator[str]:
    x = model_shapes(problem)
    if not s.private or x is None:
        return
    numbers = sum(math.prod(a.shape) for a in jax.tree.leaves(x))
    clients = s.cohort_size * s.dp_scale
    noise = deviations(s)[0] * s.dp_scale  # on the sum, in clip norms
    ratio = noise * math.sqrt(numbers) / clients
    if ratio >= LOUD:
        yield (
            f"the noise is about {ratio:.3g} times as long as the longest change that clients can "
            f"agree on, in every round ({noise:.3g} clip norms x sqrt({numbers:,} parameters) / "
            f"{clients} clients in a cohort): expect little, or that training diverges. Larger "
            "cohorts of more clients, a larger epsilon, fewer rounds or a smaller model help; "
            "see docs/privacy.md"
        )

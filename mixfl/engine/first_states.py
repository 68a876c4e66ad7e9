"""What a client has kept before its first round (client_states.py)."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mixfl.algorithms.contract import Algorithm, ClientFeed
from mixfl.engine.auto import model_shapes
from mixfl.problem import Problem


def first_state(problem: Problem, algorithm: Algorithm) -> Any:
    """Of a client, if the algorithm has client state; otherwise None."""
    if algorithm.client_state is None or (x := model_shapes(problem)) is None:
        return None
    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), x)
    return jax.tree.map(np.asarray, algorithm.client_state(zeros))


def with_first(feeds: tuple, state: Any) -> Iterator[ClientFeed]:
    """With a client's first state in each place. The states themselves come later."""
    for feed in feeds:
        count = len(feed.batches.mask)
        yield feed._replace(
            state=jax.tree.map(lambda a, n=count: np.broadcast_to(a, (n, *a.shape)), state)
        )

"""How many steps clients take on average, for what the server does as much of as a client."""

import numpy as np

from mixfl.problem import Problem
from mixfl.settings import Settings


def mean_steps(problem: Problem, s: Settings) -> int:
    """K; with local epochs the mean of the clients' K_i, if their data is here."""
    here = [t for t in problem.populations if t.here]
    if s.local_epochs is None or not here:
        return s.local_steps
    batches = [-(-t.clients.sizes() // s.client_batch) * s.local_epochs for t in here]
    means = [np.minimum(k, s.local_steps).mean() for k in batches]
    return max(1, round(sum(means) / len(means)))

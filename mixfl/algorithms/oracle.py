"""Oracle: all data in one place, which federated learning rules out. The result to reach.

K steps a round of CentralOpt; each on w_f x mean of S |B_i| pooled federated examples
+ w_c x mean of a central batch of the same size.
"""

from mixfl.algorithms.central import server_training
from mixfl.algorithms.contract import AUTO_KEYS, Algorithm, Draw, Feed, algorithm
from mixfl.algorithms.epochs import mean_steps
from mixfl.problem import Problem
from mixfl.settings import Settings


@algorithm(
    "oracle", AUTO_KEYS, frozenset({"central_lr", "central_opt", "central_chunk", "w_f", "w_c"})
)
def oracle(problem: Problem, s: Settings) -> Algorithm:
    """All data in one place: what a federated algorithm is compared with.

    >>> mixfl.oracle(client_lr=0.2).settings
    {'client_lr': 0.2}
    """
    size = s.cohort_size * s.client_batch
    draw = tuple(
        Draw(mean_steps(problem, s), 1 if term.examples is None else min(size, len(term.examples)))
        for term in problem.terms
    )
    return server_training(problem.terms, s, Feed(clients=False, draw=draw), lambda drawn: drawn)

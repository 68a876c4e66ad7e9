"""Server learning: a round of FedAvg, then J central steps from the model that it gave.

x   = ServerOpt(x, -Delta)
x   = J steps of CentralOpt on the sum of the central terms, from x

Mai, La and Zhang, "Federated Learning with Server Learning" (arXiv 2210.02614).
"""

from typing import Any, NamedTuple

from mixfl.algorithms.contract import (
    AUTO_KEYS,
    CENTRAL_KEYS,
    CLIENT_KEYS,
    Algorithm,
    algorithm,
    usual_central_batch,
)
from mixfl.algorithms.fed_avg import State as FedAvgState
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.algorithms.steps import add, central_batches, chunked_gradient, descend, draw_central
from mixfl.errors import MixflError
from mixfl.optimizers import make
from mixfl.problem import Params, Problem
from mixfl.settings import Settings


class State(NamedTuple):
    fedavg: FedAvgState
    central: Any  # CentralOpt's state

    @property
    def x(self) -> Params:
        return self.fedavg.x


@algorithm("server-learning", CLIENT_KEYS, CENTRAL_KEYS, AUTO_KEYS)
def server_learning(problem: Problem, s: Settings) -> Algorithm:
    """FedAvg, then central steps at the server.

    >>> mixfl.server_learning(client_lr=0.2).settings
    {'client_lr': 0.2}
    """
    if not problem.central:
        raise MixflError("server-learning needs a central term, and the problem has none.")
    central_opt = make(s.central_opt, s.eta_c)
    fedavg = fed_avg.build(problem, s)

    def init(x):
        return State(fedavg.init(x), central_opt.init(x))

    def broadcast(state, drawn):
        return fedavg.broadcast(state.fedavg, drawn)

    def central(state, drawn):
        return central_batches(problem, drawn)  # the steps wait for the clients

    def grad(x, batches):
        pairs = zip(problem.central, batches, strict=True)
        return add(*(chunked_gradient(term, x, batch) for term, batch in pairs))

    def update(state, broadcasts, sums, batches):
        after, info = fedavg.update(state.fedavg, broadcasts, sums, ())
        x, opt_state, _, loss = descend(grad, central_opt, after.x, batches, state.central)
        info = {**info, "train/central/loss": loss / len(batches[0].mask)}
        return State(after._replace(x=x), opt_state), info

    draw = draw_central(problem, s, s.J, auto=usual_central_batch(problem, s))
    return fedavg._replace(
        init=init, broadcast=broadcast, central=central, update=update,
        feed=fedavg.feed._replace(draw=draw),
    )  # fmt: skip

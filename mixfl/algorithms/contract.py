"""The contract of an algorithm: a few pure functions, cut where the network is.

One round, wherever it runs (`x` is the model, a pytree):

    messages = broadcast(state, drawn)             one per population
    uploads  = client(term, message, batches)      at each client
    sums     = sum over clients of summand(upload) the server sees nothing else of them
    update   = central(state, drawn)               at the server, beside the clients
    state, info = update(state, messages, sums, update)

State is what the next round needs, Info is everything else. `drawn` has, per term, the batches
that were drawn at the server for this round, as `feed.draw` asks for them.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mixfl.problem import Params, Problem
from mixfl.settings import KEYS, Settings, check_keys


class Batches(NamedTuple):
    """A client's batches, [steps, batch, ...], or batches drawn at the server, which are cut
    into chunks of bounded size: [steps, chunks, chunk, ...]. Padded rows repeat real ones."""

    data: Any  # dict of arrays; None for a loss without data
    mask: Any  # 0 = padding


class ClientFeed(NamedTuple):
    batches: Batches  # the client's own
    share: Any = None  # example transfer: central examples, dict of arrays [steps, batch, ...]
    rows: Any = None  # row-sparse: per table, the rows that the batches name (see sparse.py)


class Message(NamedTuple):
    x: Params
    aug: Params | None = None  # augmenting gradient, added to each of the client's own


class Upload(NamedTuple):
    delta: Params  # Delta_i
    weight: Any  # p_i
    steps: Any  # K_i
    grads: Params | None  # sum of the client's own gradients, where Delta_i does not tell it
    loss: Any  # sum over the steps of the client's own loss
    rows: Any = None  # row-sparse: per table, the rows that delta has


class Sums(NamedTuple):
    """Sums over the clients of a population."""

    weighted: Params  # p_i Delta_i
    weight: Any  # p_i
    delta: Params | None  # Delta_i, where an algorithm needs it beside p_i Delta_i
    grads: Params | None
    steps: Any  # K_i
    weighted_steps: Any  # p_i K_i
    loss: Any
    clients: Any  # clients that took a step


class CentralUpdate(NamedTuple):
    delta: Params  # Delta_c
    opt_state: Any
    grads: Params | None  # sum of the term's own gradients, where Delta_c does not tell it
    loss: Any  # mean over the steps


class Draw(NamedTuple):
    steps: int
    batch: int


class Feed(NamedTuple):
    """The data that a round of the algorithm reads."""

    clients: bool = True  # a cohort of each population
    share: bool = False  # and central examples dealt out to its clients
    draw: tuple[Draw | None, ...] = ()  # per term, batches drawn at the server
    own: bool = True  # a client's steps use the model through its own loss only


class Algorithm(NamedTuple):
    init: Callable  # x -> state (which has the model as .x)
    broadcast: Callable
    client: Callable
    summand: Callable
    central: Callable
    update: Callable
    feed: Feed
    phase: Callable | None = None  # round -> the Algorithm of that round, if it changes


@dataclass(frozen=True)
class Recipe:
    """An algorithm by name, with settings: what the user holds before there is a problem."""

    id: str
    make: Callable[[Problem, Settings], Algorithm]
    uses: frozenset[str]  # the settings that have an effect
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, **settings) -> "Recipe":
        check_keys(settings, valid=KEYS, used=self.uses, by=f"'{self.id}'")
        return dataclasses.replace(self, settings=self.settings | settings)

    def build(self, problem: Problem, settings: Settings) -> Algorithm:
        return self.make(problem, settings)


RUN_KEYS = frozenset({"rounds", "seed", "eval_every", "checkpoint_every", "devices", "measure"})
CLIENT_KEYS = frozenset(
    {"cohort_size", "client_batch", "local_steps", "client_lr", "client_opt", "weighting",
     "cohort_chunk", "server_lr", "server_opt", "w_f", "clip", "aggregation", "trim", "tables",
     "first_layer"}
)  # fmt: skip
BATCH_KEYS = frozenset({"central_batch", "central_chunk", "w_c"})
CENTRAL_KEYS = BATCH_KEYS | {"central_steps", "central_lr", "central_opt"}
# What the `auto` values of the central keys are made from.
AUTO_KEYS = frozenset({"cohort_size", "client_batch", "local_steps", "client_lr", "server_lr"})
MERGE_KEYS = frozenset({"merge_lr", "merge_opt"})


def algorithm(id: str, *keys: frozenset[str]) -> Callable[[Callable], Recipe]:
    """Turns `make(problem, settings) -> Algorithm` into a Recipe that uses the given keys."""
    return lambda make: Recipe(id, make, RUN_KEYS.union(*keys))

"""The contract of an algorithm: a few pure functions, cut where the network is.

One round, wherever it runs (`x` is the model, a pytree):

    broadcasts = broadcast(state, drawn)            at the server, one per population
    upload     = client(term, broadcast, feed)      at each client
    summand    = summand(upload)                    at each client: what is added up
    sums       = the summands of a population, added up: all that the server sees
    central    = central(state, drawn)              at the server, while the clients train
    state, info = update(state, broadcasts, sums, central)

State is what the next round needs, Info is everything else. `drawn` has, per term, the batches
drawn at the server for this round, as many as `feed.draw` says.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax

from mixfl.algorithms.epochs import mean_steps
from mixfl.algorithms.functions import (
    BroadcastTo,
    CentralWork,
    Client,
    ClientState,
    Init,
    Phase,
    Summand,
    Update,
)
from mixfl.algorithms.keys import *  # noqa: F403
from mixfl.algorithms.keys import RUN_KEYS, WITH_POPULATIONS
from mixfl.algorithms.origin import Origin
from mixfl.algorithms.own import OwnKeys
from mixfl.errors import MixflError
from mixfl.model_state import check_known
from mixfl.problem import Central, Federated, Params, Problem
from mixfl.settings import KEYS, Settings, check_keys

# What clients read


class Batches(NamedTuple):
    """A client's batches, [steps, batch, ...]. Padded rows repeat real ones."""

    data: Any  # dict of columns
    mask: Any  # 0 = padding
    extra: Any = None  # what a form computed for its loss (see forms/base.py)


class ClientFeed(NamedTuple):
    batches: Batches  # the client's own
    share: Any = None  # example transfer: central examples, dict of arrays [steps, batch, ...]
    notes: Any = None  # per form, what it read on the host; a client's steps never see it
    key: Any = None  # two words of randomness, for aggregation steps that draw
    state: Any = None  # what the client has kept (Algorithm.client_state)


# What the server reads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AfterChunk:
    """Calls back from a running program. It has no arrays, so it can be passed along with them."""

    call: Callable[[], None] = dataclasses.field(metadata={"static": True})

    def __call__(self, loss) -> None:
        jax.debug.callback(lambda _: self.call(), loss)  # takes the loss to wait for it


class Drawn(NamedTuple):
    """Batches drawn at the server, cut into chunks of bounded size: [steps, chunks, chunk, ...].
    Padded rows repeat real ones."""

    data: Any  # dict of columns; None for a loss without data
    mask: Any  # 0 = padding
    after_chunk: AfterChunk | None = None  # called after each chunk of a long round


class Draw(NamedTuple):
    steps: int
    batch: int


class Feed(NamedTuple):
    """The data that a round of the algorithm reads."""

    clients: bool = True  # a cohort of each population
    share: bool = False  # central examples, dealt out to the clients
    draw: tuple[Draw | None, ...] = ()  # per term, batches drawn at the server


# What travels


class Broadcast(NamedTuple):
    """What the clients of a population get."""

    x: Params
    aug: Params | None = None  # augmenting gradient, added to the gradient of each step
    drift: Params | None = None  # never sent: what 1, 2, ... K steps on aug alone change, [K, ...]
    extra: Any = None  # fields of the algorithm's own: a tree of arrays


class Upload(NamedTuple):
    """What a client computed."""

    own: Params  # u_i: Delta_i without what the augmenting gradient alone would have changed
    weight: Any  # p_i
    steps: Any  # K_i
    grads: Params | None  # sum of the client's own gradients, if u_i does not determine it
    loss: Any  # the client's own loss, summed over its steps
    extra: Any = None  # fields of the algorithm's own, which are added up as they are
    state: Any = None  # what the client keeps for its next round. It is not sent


class Sums(NamedTuple):
    """Sums over the clients of a population. For a single client, its summand."""

    weighted: Params  # p_i u_i
    weight: Any  # p_i
    unweighted: Params | None  # u_i, if an algorithm needs it as well as p_i u_i
    grads: Params | None
    steps: Any  # K_i
    by_steps: Any  # [K], p_i of the clients that took 1, 2, ... steps
    loss: Any
    clients: Any  # clients that took a step
    extra: Any = None


class CentralUpdate(NamedTuple):
    delta: Params  # Delta_c
    opt_state: Any
    grads: Params | None  # sum of the term's own gradients, if Delta_c does not determine it
    loss: Any  # mean over the steps


# The functions: see functions.py


class Algorithm(NamedTuple):
    init: Init
    broadcast: BroadcastTo
    client: Client
    summand: Summand
    central: CentralWork
    update: Update
    feed: Feed
    phase: Phase | None = None  # if the functions change from round to round
    client_state: ClientState | None = None  # if clients keep something between rounds
    origin: Origin | None = None  # how Recipe.build made it

    def at(self, round: int) -> "Algorithm":
        return self.phase(round) if self.phase else self

    def own_origin(self) -> Origin | None:
        """None if it was not built by a recipe, or if a function was replaced since."""
        return self.origin if self.origin is not None and self.origin.built == self[:-1] else None


# An algorithm by name


class Auto(Protocol):
    def __call__(self, problem: Problem, s: Settings, /) -> Any:
        """The value that `auto` stands for."""


def usual_central_batch(problem: Problem, s: Settings) -> int:
    each = [s.of(term) for term in problem.populations] or [s]
    return max(own.cohort_size * own.client_batch for own in each)


def _weight_of(kind: type) -> Auto:
    def weight(problem, s):
        terms = [t for t in problem.terms if isinstance(t, kind)]
        return float(terms[0].weight) if len(terms) == 1 else None

    return weight


AUTO: dict[str, Auto] = {
    "central_lr": lambda problem, s: None if s.changing_eta_c else s.eta_c,
    "central_steps": mean_steps,
    "central_batch": usual_central_batch,
    "merge_lr": lambda problem, s: 1.0,
    "pretrain_rounds": lambda problem, s: s.rounds // 2,
    "w_f": _weight_of(Federated),
    "w_c": _weight_of(Central),
}


@dataclass(frozen=True)
class Recipe:
    """An algorithm by name, with settings: what a user has before there is a problem."""

    id: str
    make: Callable[[Problem, Settings], Algorithm]
    uses: frozenset[str]  # the settings that have an effect
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    auto: Mapping[str, Auto] = dataclasses.field(default_factory=dict)  # in place of AUTO
    own: OwnKeys = dataclasses.field(default_factory=OwnKeys)  # keys that only it has
    place: str = ""  # path.py:name, if it came from a file

    def __call__(self, **settings) -> "Recipe":
        check_keys(settings, valid=self.valid, used=self.uses, by=f"'{self.id}'")
        return dataclasses.replace(self, settings=self.settings | settings)

    @property
    def valid(self) -> dict[str, Any]:
        """Every key that can be set, with or without an effect."""
        return {**KEYS, **self.own}

    @property
    def name(self) -> str:
        """What finds it again."""
        return self.place or self.id

    def chosen(self, keys: Mapping[str, Any]) -> Settings:
        """The settings of a run, checked. Keys without an effect are left out."""
        general = {k: v for k, v in keys.items() if k in KEYS and k in self.uses}
        return Settings(**general, own=self.own.chosen(keys))

    def resolve(self, problem: Problem, s: Settings) -> Settings:
        """Replaces each `auto` that the algorithm and the problem determine. Engines replace those
        that depend on the machine (engine/auto.py)."""
        s = self.own.completed(s)
        if any("local_steps" in term.settings for term in problem.populations):
            most = max(s.local_steps, *(s.of(term).local_steps for term in problem.populations))
            s = dataclasses.replace(s, most_steps=most) if most != s.most_steps else s
        used = {k: getattr(s, k) for k in AUTO if k in self.uses}
        # A rate may be a tracer, which can't be compared.
        open_keys = [
            k for k, v in used.items() if isinstance(v, str | None) and v in ("auto", None)
        ]
        values = {k: {**AUTO, **self.auto}[k](problem, s) for k in open_keys}
        if "central_batch" in values:  # one number, unless the terms have too few examples for it
            usual = values.pop("central_batch")
            data = [t.examples for t in problem.central if t.examples is not None]
            batches = {min(len(examples), usual) for examples in data}
            values |= {"central_batch": batches.pop()} if len(batches) == 1 else {}
        values = {k: v for k, v in values.items() if v is not None}
        return dataclasses.replace(s, **values) if values else s

    def build(self, problem: Problem, settings: Settings) -> Algorithm:
        """Rates that are schedules are those of the first round; engines replace them in each."""
        check_known(self.id, problem, settings)
        apart = [term for term in problem.populations if term.settings]
        if apart and self.id not in WITH_POPULATIONS:
            raise MixflError(
                f"the population '{apart[0].name}' has settings of its own, which '{self.id}' does "
                f"not know of. These do: {', '.join(sorted(WITH_POPULATIONS))}."
            )
        if apart and getattr(settings, "private", False):
            raise MixflError(
                "differential privacy counts on one cohort, weighting and clipping for all: "
                "leave out settings=... of Federated."
            )
        every = [settings, *map(settings.of, apart)]
        for s in every:
            s.check_schedules()

        def at(round: int) -> Settings:
            s = dataclasses.replace(settings.at(round), round=round) if scheduled else settings
            return self.resolve(problem, s)

        scheduled = any(s.schedules for s in every)
        s = at(0)
        built = self.make(problem, s)
        origin = Origin(self.make, problem, s, built[:-1], at if scheduled else None)
        return built._replace(origin=origin)


def algorithm(
    id: str, *keys: frozenset[str], settings: Mapping[str, Any] = MappingProxyType({}), **auto: Auto
) -> Callable[[Callable], Recipe]:
    """Turns `make(problem, settings) -> Algorithm` into a Recipe that uses the given keys.

    `settings` has keys of its own, each made by `key(default, meaning)`: see algorithms/own.py.
    `auto` has functions for keys whose `auto` differs from AUTO."""
    own = OwnKeys(settings, of=id)
    return lambda make: Recipe(id, make, RUN_KEYS.union(*keys, own), auto=auto, own=own)

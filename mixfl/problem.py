"""A problem is a sum of terms; a term is federated (its data stays with clients) or central.

A loss is a function `loss(params, batch)` that returns one number per example, where `batch`
is a dict of the data's columns. The library applies masks, means and weights. A central term
without data is a regularizer: `loss(params)` returns one number. A loss that draws at random is
`loss(params, batch, key)`, where `key` has a JAX key for each example (randomness.py).

If the data really stays with clients (mixfl.flower), a function takes its place. For a federated
term it loads a node's own examples, at the node. For a central term it loads the server's.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mixfl.client_evaluation import ClientEvaluation
from mixfl.data.examples import ClientData, Examples
from mixfl.errors import MixflError
from mixfl.frozen import Frozen, bound, frozen_of, with_frozen, with_losses
from mixfl.losses import takes
from mixfl.model_state import with_initial, with_state
from mixfl.per_client import per_client
from mixfl.randomness import with_keys
from mixfl.validation import check_files

Params = Any  # a pytree of floating-point arrays
RESERVED = {  # names of other things in a run folder
    "config.toml", "metrics.jsonl", "status.json", "model.safetensors", "checkpoints",
    "tensorboard", "mlflow.json", "origin.json", "deployment.json", ".lock", "clients",
    "algorithm.py", "progress.json", "log.jsonl", "stop", "wandb.json", "card.md",
}  # fmt: skip


@dataclass(frozen=True)
class AtNodes:
    """Clients whose data is at the nodes of a deployment: `load(node)` reads a node's own, there.

    Any other use of such clients needs data that is not here, and is an error."""

    load: Callable[[Mapping[str, Any]], "Mapping[str, np.ndarray] | ClientData"]

    def __getattr__(self, name: str):
        raise MixflError(
            "the data of a federated term is at the nodes of a deployment, and all of it is needed "
            "here: give a mixfl.ClientData, or use mixfl.flower.simulated(problem, nodes)."
        )

    def __len__(self) -> int:
        return self.offsets  # raises


@dataclass(frozen=True, eq=False)
class Federated:
    """w x mean over clients of f_i; each f_i is the mean of `loss` over the client's examples.

    `rows` marks tables (embeddings) from which a client needs only the rows that its own data
    names. It maps each table to the columns that name its rows: {"movies": ("context", "movie")}.
    The loss may use such a table only as params["movies"][batch["context"]] and the like: a client
    gets a table of its own rows, and batches whose numbers are positions in it.

    Who takes part in the simulator, each as an array with a number per client or as a function from
    the round to one: `sampling`, weights by which cohorts are drawn; `available`, the chances that
    clients can be drawn at all (or True and False); `speeds`, the share of its steps that a client
    makes.

    `settings` are keys of this population alone, in place of the run's: {"client_lr": 0.01}.

    >>> mixfl.Federated(loss, clients, weight=0.6).name
    'federated'
    """

    loss: Callable
    clients: Any  # a ClientData, or (see AtNodes) a function that loads a node's own examples
    weight: float = 1.0
    name: str = "federated"
    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sampling: Any = None  # afterwards a PerClient, as the next two
    available: Any = None
    speeds: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        _check_term(self)
        if not isinstance(self.settings, Mapping):
            raise MixflError("Federated: settings must be a dict, such as {'client_lr': 0.01}.")
        _check_rows(self)
        _tell_loss(self)
        if isinstance(self.clients, AtNodes):
            return
        if not isinstance(self.clients, ClientData):
            if callable(self.clients):
                _check_no_numbers(self)
                object.__setattr__(self, "clients", AtNodes(self.clients))
                return
            raise MixflError(
                f"Federated needs a mixfl.ClientData, got {type(self.clients).__name__}: make one "
                "with ClientData.from_arrays(columns, client=...) or ClientData.open(path)."
            )
        usable = self.clients.usable()
        if not len(usable):
            raise MixflError(
                f"the population '{self.name}' is empty: none of its {usable.dropped} clients has "
                "an example."
            )
        kept = np.flatnonzero(self.clients.sizes() > 0)
        for name, largest in (("sampling", np.inf), ("available", 1.0), ("speeds", 1.0)):
            given = per_client(name, getattr(self, name), len(self.clients), kept, largest)
            object.__setattr__(self, name, given)
        object.__setattr__(self, "clients", usable)

    @property
    def here(self) -> bool:
        """Is the data here, rather than at nodes?"""
        return isinstance(self.clients, ClientData)

    @property
    def examples(self) -> Examples:
        """The rows of all clients, one client after the other."""
        return self.clients.examples


@dataclass(frozen=True, eq=False)
class Central:
    """w x mean of `loss` over the server's examples; without data, w x loss(params).

    >>> mixfl.Central(lambda params: jnp.sum(params["w"] ** 2), weight=0.1).name
    'central'
    """

    loss: Callable
    data: Any = None  # columns, Examples, ClientData, or a function that loads them when needed
    weight: float = 1.0
    name: str = "central"

    def __post_init__(self):
        _check_term(self)
        if self.data is None and takes(self.loss).key:
            raise MixflError(
                f"the term '{self.name}' has no data, so there are no examples to draw keys for: a "
                "regularizer is loss(params). Give it data, such as {'i': np.arange(1000)}."
            )
        _tell_loss(self)
        load = self.data
        data = functools.cache(lambda: _examples(load())) if callable(load) else _examples(load)
        object.__setattr__(self, "data", data)

    @property
    def examples(self) -> Examples | None:
        """The server's rows; None for a regularizer."""
        return self.data() if callable(self.data) else self.data


def _examples(data: Any) -> Examples | None:
    if isinstance(data, ClientData):
        return data.examples
    return data if data is None or isinstance(data, Examples) else Examples.from_arrays(data)


Term = Federated | Central


@dataclass(frozen=True, eq=False)
class Problem:
    """What to train: the initial model, the terms, and how a model is judged.

    `evaluate(params)` returns a dict of numbers, for instance {"loss": ..., "auc": ...} or
    {"wikipedia/accuracy": ...}. `validate` does the same on data used for neither training nor
    evaluation; `mixfl sweep` chooses settings by it. `settings` are defaults for this problem's
    runs. `files` are texts that a trained model needs (a vocabulary), by their file names in the
    run folder. A run that is resumed must have the same files. `client_eval` judges each client.

    `frozen` are arrays that losses need and nobody trains, such as a pretrained encoder: a pytree,
    or a function that loads it. A loss takes them as a parameter of that name,
    `loss(params, batch, frozen)`.

    `predict(params, batch)` returns a model's outputs for a batch of columns: an array, or a dict
    of arrays, with a row per example. It may take `state` and `frozen` by these names. `mixfl
    predict` and `mixfl export` need it; training does not.

    `state` is the initial state of the model, such as running statistics: a pytree of arrays.
    `loss(params, batch, state)` returns (losses, the next state). See docs/models.md.

    >>> terms = [mixfl.Federated(loss, clients), mixfl.Central(loss, central)]
    >>> problem = mixfl.Problem(init, terms, lambda params: {"loss": loss(params, test).mean()})
    """

    init: Callable[[Any], Params]  # key -> params
    terms: Sequence[Term]
    evaluate: Callable[[Params], Mapping[str, Any]] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = "problem"
    files: Mapping[str, str] = field(default_factory=dict)
    validate: Callable[[Params], Mapping[str, Any]] | None = None
    frozen: Any = None  # afterwards a Frozen, or None
    client_eval: ClientEvaluation | None = None
    state: Any = None
    predict: Callable[..., Any] | None = None
    kept: dict = field(init=False, repr=False)  # by engines, between runs: compiled programs

    def __post_init__(self):
        terms = () if isinstance(self.terms, Federated | Central) else tuple(self.terms)
        object.__setattr__(self, "terms", terms)
        object.__setattr__(self, "kept", {})
        if not terms or not all(isinstance(t, Federated | Central) for t in terms):
            raise MixflError(
                "a problem needs a list of terms: Problem(init, [mixfl.Federated(...), "
                "mixfl.Central(...)])."
            )
        self._bind()
        if not isinstance(self.client_eval, ClientEvaluation | None):
            raise MixflError("client_eval: expected a mixfl.ClientEvaluation.")
        if self.predict is not None and not callable(self.predict):
            raise MixflError("predict: expected a function predict(params, batch).")
        check_files(self.files, RESERVED)
        names = [t.name for t in terms]
        if len(set(names)) < len(names):
            raise MixflError(f"the terms need different names (name=...), got {names}.")

    def _bind(self) -> None:
        """Gives the losses what they take."""
        new = self.frozen is not None and not isinstance(self.frozen, Frozen)
        if new:
            object.__setattr__(self, "frozen", Frozen(self.frozen))
        losses = [with_frozen(t.loss, self.frozen) for t in self.terms]
        if new and self.frozen not in frozen_of(losses):
            raise MixflError("frozen: no loss has a parameter of this name, as loss(x, b, frozen).")
        if self.state is not None:
            object.__setattr__(self, "init", with_initial(self.init, self.state))
        losses = with_state(self.terms, losses, self.state is not None)
        object.__setattr__(self, "terms", with_losses(self.terms, losses))

    @functools.cached_property
    def all_frozen(self) -> list[Frozen]:
        """The frozen arrays of all losses: the problem's own, and those of PyTorch modules."""
        return frozen_of(t.loss for t in self.terms)

    def frozen_arrays(self) -> list[Any]:
        """The arrays of `all_frozen`."""
        return [f.arrays for f in self.all_frozen]

    def frozen_digest(self) -> str:
        """Empty if there are no frozen arrays."""
        return "-".join(f.digest for f in self.all_frozen)

    def with_frozen(self, arrays: Sequence[Any]) -> "Problem":
        """With other arrays, such as a program's arguments, in place of `frozen_arrays()`."""
        given = dict(zip(self.all_frozen, arrays, strict=True))
        losses = [bound(t.loss, given) for t in self.terms]
        return self.with_terms(with_losses(self.terms, losses)) if given else self

    @property
    def populations(self) -> tuple[Federated, ...]:
        """Its federated terms."""
        return tuple(t for t in self.terms if isinstance(t, Federated))

    @property
    def central(self) -> tuple[Central, ...]:
        """Its central terms."""
        return tuple(t for t in self.terms if isinstance(t, Central))

    def weighted(self, w_f: float | None, w_c: float | None) -> "Problem":
        """With other weights for its federated and its central term; None keeps a weight."""
        terms = self.terms
        for kind, key, weight in ((Federated, "w_f", w_f), (Central, "w_c", w_c)):
            if weight is None:
                continue
            if sum(isinstance(t, kind) for t in terms) != 1:
                raise MixflError(
                    f"{key} is for problems with one {kind.__name__.lower()} term; this one has "
                    f"{sum(isinstance(t, kind) for t in terms)}: set the weights in its terms."
                )
            terms = tuple(
                dataclasses.replace(t, weight=weight) if isinstance(t, kind) else t for t in terms
            )
        return self.with_terms(terms)

    def with_equal_populations(self) -> "Problem":
        """Without settings that single populations have of their own."""
        if not any(t.settings for t in self.populations):
            return self
        return self.with_terms([
            dataclasses.replace(t, settings={}) if isinstance(t, Federated) else t
            for t in self.terms
        ])  # fmt: skip

    def with_terms(self, terms: Sequence[Term]) -> "Problem":
        """The same problem with other weights, or other forms of its losses."""
        problem = dataclasses.replace(self, terms=terms)
        object.__setattr__(problem, "kept", self.kept)
        return problem


def _check_rows(term: Federated) -> None:
    good = isinstance(term.rows, Mapping) and all(
        isinstance(n, str)
        and (
            isinstance(c, str)
            or (isinstance(c, list | tuple) and all(isinstance(k, str) for k in c))
        )
        for n, c in term.rows.items()
    )
    if not good:
        raise MixflError(
            f"rows = {term.rows!r}: expected a dict from a table's name to the columns that name "
            "its rows, such as {'movies': ('context', 'movie')}."
        )


def _check_no_numbers(term: Federated) -> None:
    given = [n for n in ("sampling", "available", "speeds") if getattr(term, n) is not None]
    if given:
        raise MixflError(
            f"{given[0]} of '{term.name}' is for clients whose data is here (a mixfl.ClientData): "
            "in a deployment, the nodes that are connected take part."
        )


def _tell_loss(term: Term) -> None:
    """Some losses (mixfl.pytorch) are tried on the term's examples before they are used."""
    of_term = getattr(term.loss, "of_term", None)
    if of_term is not None:
        object.__setattr__(term, "loss", of_term(term))
    else:
        object.__setattr__(term, "loss", with_keys(term.loss))


def _check_term(term: Term) -> None:
    kind = type(term).__name__
    if not callable(term.loss):
        raise MixflError(f"{kind}: the loss must be a function, got {type(term.loss).__name__}.")
    weight = term.weight
    if isinstance(weight, bool) or not isinstance(weight, int | float | np.number):
        raise MixflError(f"{kind}: the weight must be a number, got {weight!r}.")
    if not (np.isfinite(weight) and weight >= 0):
        raise MixflError(f"{kind}: the weight must be finite and at least 0, got {weight}.")

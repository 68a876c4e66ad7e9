"""How well a model serves each client: a mean over all examples hides whom it fails."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mixfl.data.examples import ClientData
from mixfl.errors import MixflError, unknown
from mixfl.losses import takes
from mixfl.metrics import lower_is_better

QUANTILES = (5, 25, 50, 75, 95)  # percent of the clients
WORST = 0.1  # part of the clients
CHUNK_EXAMPLES, CHUNK_BYTES = 1024, 64 << 20  # computed at once, at most


@dataclass(frozen=True, eq=False)
class ClientEvaluation:
    """An evaluation of each client on its own examples, for `Problem(client_eval=...)`.

    `metric(params, batch)` returns one number per example, or a dict of them by name. A client's
    value is the mean over its examples. Reported are the mean over clients, quantiles, the mean of
    the worst tenth, and the mean of each group. `groups` is a column that says each client's group,
    or a dict from clients' names to groups. `clients` may be a function that loads them.
    `at_server`: these are the server's own examples, held out, and no participant's: with
    differential privacy, nothing else may be reported.

    >>> clients = mixfl.ClientData.from_arrays({"x": np.arange(4.0)}, client=["a", "a", "b", "b"])
    >>> judge = mixfl.ClientEvaluation(lambda params, batch: (batch["x"] - params) ** 2, clients)
    >>> found = judge(jnp.zeros(()))
    >>> found["loss/p50"], found["loss/worst10"]
    (3.5, 6.5)
    """

    metric: Callable[..., Any]
    clients: Any  # a ClientData, or a function that returns one
    groups: str | Mapping[Any, Any] | None = None
    name: str = "loss"  # of a metric that returns no dict
    at_server: bool = False
    kept: dict = field(default_factory=dict, init=False, repr=False)  # what is computed once

    def __post_init__(self):
        if not callable(self.metric):
            raise MixflError("ClientEvaluation: the metric must be a function of params and batch.")
        if takes(self.metric).key or takes(self.metric).state:
            raise MixflError(
                "ClientEvaluation: the metric must be metric(params, batch), with or without "
                "`frozen`: an evaluation draws nothing and carries no state."
            )
        if not isinstance(self.clients, ClientData) and not callable(self.clients):
            raise MixflError(
                f"ClientEvaluation needs a mixfl.ClientData, or a function that returns one, got "
                f"{type(self.clients).__name__}."
            )

    def __call__(self, params: Any, most: int = 10_000, frozen: Any = None) -> dict[str, float]:
        """The numbers, by name. At most `most` clients are evaluated, the same ones each time."""
        chosen = self._chosen(most)
        found: dict[str, float] = {}
        for name, values in self._values(params, chosen, frozen).items():
            means = np.bincount(chosen.owner, values, chosen.count) / chosen.sizes
            found[f"{name}/mean"] = means.mean()
            for q in QUANTILES:
                found[f"{name}/p{q:02d}"] = np.quantile(means, q / 100)
            best_first = means[np.argsort(means if lower_is_better(name) else -means)]
            found[f"{name}/worst10"] = best_first[-max(1, round(WORST * len(means))) :].mean()
            for group, members in chosen.groups.items():
                found[f"{name}/group/{group}"] = means[members].mean()
        return {k: float(v) for k, v in found.items()}

    def _values(self, params: Any, chosen: "Chosen", frozen: Any) -> dict[str, np.ndarray]:
        """For each metric, a number per example of the chosen clients."""
        examples, rows = chosen.clients.examples, chosen.rows
        room = CHUNK_BYTES // max(examples.example_bytes, 1)
        size = max(1, min(CHUNK_EXAMPLES, room, len(rows)))
        parts: dict[str, list[np.ndarray]] = {}
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            whole = np.concatenate([some, np.repeat(some[-1:], size - len(some))])
            for name, values in self._program(params, examples.take(whole), frozen).items():
                if np.shape(values) != (size,):
                    raise MixflError(
                        f"ClientEvaluation: the metric '{name}' has shape {np.shape(values)} for "
                        f"{size} examples: expected one number per example."
                    )
                parts.setdefault(name, []).append(np.asarray(values, np.float64)[: len(some)])
        return {name: np.concatenate(values) for name, values in parts.items()}

    @property
    def _program(self) -> Callable[[Any, Any, Any], dict[str, Any]]:
        import jax  # commands that only print need not wait for it

        def named(params: Any, batch: Any, frozen: Any) -> dict[str, Any]:
            more = {"frozen": frozen} if takes(self.metric).frozen else {}
            values = self.metric(params, batch, **more)
            return dict(values) if isinstance(values, Mapping) else {self.name: values}

        return self.kept.setdefault("program", jax.jit(named))

    def _chosen(self, most: int) -> "Chosen":
        if most not in self.kept:
            given = self.clients() if callable(self.clients) else self.clients
            clients = given.usable()
            if not len(clients):
                raise MixflError("ClientEvaluation: no client has an example.")
            some = np.arange(len(clients))
            if len(some) > most:
                draw = np.random.default_rng(0)  # the same clients in every run
                some = np.sort(draw.choice(len(clients), most, replace=False))
            self.kept[most] = Chosen(clients, some, self.groups)
        return self.kept[most]


class Chosen:
    """The clients that are evaluated, their examples' rows, and who is in which group."""

    def __init__(self, clients: ClientData, some: np.ndarray, groups: Any):
        self.clients, self.count = clients, len(some)
        self.sizes = clients.sizes()[some]
        self.owner = np.repeat(np.arange(self.count), self.sizes)
        self.rows = np.concatenate([clients.rows(int(i)) for i in some])
        names = [clients.ids[i] for i in some]
        self.groups = {} if groups is None else self._groups(groups, names)

    def _groups(self, groups: Any, names: list) -> dict[str, np.ndarray]:
        of_client = self._by_column(groups) if isinstance(groups, str) else _by_name(groups, names)
        kinds = sorted(set(of_client))
        return {kind: np.flatnonzero(np.array(of_client) == kind) for kind in kinds}

    def _by_column(self, column: str) -> list[str]:
        examples = self.clients.examples
        if column not in examples.columns:
            raise unknown("column in groups:", column, examples.columns)
        values = examples.take(self.rows)[column]
        first = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        mixed = np.any(values != values[first][self.owner])
        if values.ndim != 1 or mixed:
            raise MixflError(
                f"groups = '{column}': expected one value per client, the same in all of its "
                "examples. Give a dict from clients to groups otherwise."
            )
        return [str(v) for v in values[first]]


def _by_name(groups: Mapping[Any, Any], names: list) -> list[str]:
    missing = [n for n in names if n not in groups]
    if missing:
        raise MixflError(
            f"groups: {len(missing)} clients have no group, such as '{missing[0]}': give each one."
        )
    return [str(groups[n]) for n in names]


def refuse_participants_data(evaluation: ClientEvaluation | None) -> None:
    """For runs with differential privacy: their noise does not cover what an evaluation of the
    participants' own examples reports. Only the server's own held-out examples are allowed."""
    if evaluation is not None and not evaluation.at_server:
        raise MixflError(
            "client_eval reports numbers of single clients, which differential privacy does not "
            "cover: leave it out, or say that its data is the server's own, held out, and no "
            "participant's (ClientEvaluation(..., at_server=True))."
        )

"""Every key of a run: the same in TOML, on the command line and in Python."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from msgspec import Meta

from mixfl.errors import MixflError
from mixfl.schedules import EXAMPLE, check_schedule, is_schedule, named, rate_at, rates
from mixfl.validation import (
    Auto,
    Count,
    Index,
    NotNegative,
    Positive,
    check_fields,
    check_keys,
    key,
)  # fmt: skip

__all__ = ["KEYS", "WEIGHTINGS", "Settings", "check_keys"]

Optimizer = str | Callable[..., Any]
if TYPE_CHECKING:
    Rate: TypeAlias = Any  # a number, wherever it is computed with
    AutoRate: TypeAlias = Any
else:
    Text = Annotated[str, Meta(extra={"expected": f"a schedule such as {EXAMPLE}"})]
    AutoText = Annotated[str, Meta(extra={"expected": f"'auto', or a schedule such as {EXAMPLE}"})]
    Rate = Positive | Text | Callable[..., Any]
    AutoRate = Positive | AutoText | Callable[..., Any]
# What a population may have of its own: Federated(settings=...).
POPULATION_KEYS = (
    "cohort_size", "client_batch", "local_steps", "client_lr", "client_opt", "weighting",
    "grad_clip", "weight_decay", "proximal",
)  # fmt: skip
RATES = ("client_lr", "server_lr", "central_lr", "merge_lr")
# Nothing is rounded on the way: for measurements.
SENT_EXACTLY: Mapping[str, Any] = MappingProxyType(
    {"upload": "float32", "download": "float32", "download_gradient": "auto"}
)
Weighting = Literal["examples", "steps", "uniform"]
WEIGHTINGS = get_args(Weighting)


class Own(Mapping[str, Any]):
    """The settings that an algorithm declares for itself (algorithms/own.py): `s.own.mu`, or
    `s.own["mu"]`. Hashable, as all settings are."""

    def __init__(self, values: Mapping[str, Any] = MappingProxyType({})):
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"the algorithm declares no setting '{name}'")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._values.items())))

    def __repr__(self) -> str:
        return f"Own({self._values})"


@dataclass(frozen=True)
class Settings:
    """Every key of a run, checked. `mixfl keys` lists them with their meaning.

    >>> mixfl.Settings(client_lr=0.2).rounds
    100
    """

    rounds: Count = key(100, "rounds of training (T)")
    seed: Index = key(0, "seed of cohorts, batches and the initial model")
    cohort_size: Count = key(10, "clients per round and population (S)")
    client_batch: Count = key(10, "examples in a client's batch (|B_i|)")
    local_steps: Count = key(10, "most steps a client takes in a round (K)")
    local_epochs: Count | None = key(
        None, "passes of a client through its data in a round; with local_steps, at most so many "
        "steps; unset: one",
    )  # fmt: skip
    sampling: Literal["uniform", "examples", "poisson"] = key(
        "uniform", "how a cohort is drawn: with equal chances; by numbers of examples; poisson: "
        "each client joins by itself, cohort_size of them on average",
    )  # fmt: skip
    cohort_cap: Count | Auto = key(
        "auto", "most clients of a Poisson cohort; auto: 4 standard deviations above the mean"
    )
    drop_rate: Annotated[float, Meta(ge=0, lt=1)] = key(
        0.0, "chance of a client in the simulator to drop out after the download"
    )
    late_rate: Annotated[float, Meta(ge=0, lt=1)] = key(
        0.0, "chance of a client in the simulator to be too late with its upload"
    )
    min_speed: Annotated[float, Meta(gt=0, le=1)] = key(
        1.0, "speeds of clients in the simulator, drawn between this and 1: the share of its steps "
        "that a client makes",
    )  # fmt: skip
    client_lr: Rate = key(0.1, "client learning rate (eta); a number or a schedule of the round")
    server_lr: Rate = key(1.0, "server learning rate (eta_s)")
    central_batch: Count | Auto = key(
        "auto", "central batch (|B_c|); auto: S |B_i|, for 1wgt K S |B_i|"
    )
    central_steps: Count | Auto = key("auto", "central steps per round (J); auto: local_steps")
    central_lr: AutoRate = key("auto", "central learning rate (eta_c); auto: eta eta_s")
    merge_lr: AutoRate = key("auto", "merge learning rate (eta_m); auto: 1, for 2wgt 1/terms")
    w_f: NotNegative | None = key(None, "weight of the federated term; unset: the problem's")
    w_c: NotNegative | None = key(None, "weight of the central term; unset: the problem's")
    client_opt: Optimizer = key("sgd", "ClientOpt: an optax optimizer")
    server_opt: Optimizer = key("sgd", "ServerOpt")
    central_opt: Optimizer = key("sgd", "CentralOpt")
    merge_opt: Optimizer = key("sgd", "MergeOpt")
    weighting: Weighting = key("examples", "weight of a client: examples, steps or uniform")
    grad_clip: Positive | Literal["off"] = key(
        "off", "largest norm of a client's own gradient in a local step; off"
    )
    weight_decay: NotNegative = key(0.0, "decoupled weight decay of a client's step, times eta")
    proximal: NotNegative = key(0.0, "FedProx's mu: pulls a client's step to the server's model")
    clip: Positive | Literal["quantile", "off"] = key(
        "quantile", "largest norm, per local step, of a client's own part of the change; quantile: "
        "3 times a running quantile over all clients; off",
    )  # fmt: skip
    aggregation: Literal["mean", "median", "trimmed-mean", "krum"] = key(
        "mean", "of the clients' changes: mean, or median, trimmed-mean, krum against bad clients"
    )
    trim: Annotated[float, Meta(ge=0, lt=0.5)] = key(
        0.2, "share of clients that trimmed-mean leaves out at each end, and krum in all"
    )
    upload: Literal["float32", "bfloat16", "int16", "int8", "int4", "int2"] = key(
        "float32", "how clients send their changes; int8: codes of 8 bits, unbiased (docs/wire.md)"
    )
    download: Literal["float32", "bf16", "bfloat16", "int16", "int8"] = key(
        "float32", "how clients get the model: rounded, with error feedback at the server"
    )
    download_gradient: Literal["auto", "float32", "bf16", "bfloat16", "int16", "int8"] = key(
        "auto", "how clients get the augmenting gradient; auto: as download says"
    )
    tables: Literal["auto", "rows", "dense"] = key(
        "auto", "tables at clients: rows (their own only), dense; auto: rows where exact"
    )
    first_layer: Literal["auto", "low-rank", "plain"] = key(
        "auto", "dense layers on raw inputs at clients: low-rank, plain; auto: the faster one"
    )
    convolutions: Literal["auto", "products", "plain"] = key(
        "auto", "convolutions, recurrent layers in losses: products (fast in loops), plain; auto: "
        "products on a CPU",
    )  # fmt: skip
    compute: Literal["float32", "bfloat16"] = key(
        "float32", "how losses compute; with bfloat16, parameters and sums stay float32"
    )
    loops: Literal["auto", "compiled", "host", "pytorch"] = key(
        "auto", "where the loops over clients and steps run; pytorch: on the host, with gradients "
        "by PyTorch; auto: compiled, unless another way is found to be faster",
    )  # fmt: skip
    pretrain_rounds: Index | Auto = key("auto", "rounds of `central` before `fedavg`; auto: half")
    eval_every: Count = key(10, "rounds between evaluations")
    eval_clients: Count = key(10_000, "most clients that an evaluation per client looks at")
    measure: Literal["none", "dissimilarity"] = key(
        "none", "measured with each evaluation: dissimilarity (theory/g2, theory/b2)"
    )
    best_by: str = key(
        "auto", "metric by which a model is the best, such as eval/auc, or max:NAME, min:NAME; "
        "auto: valid/loss if there is one, else eval/loss",
    )  # fmt: skip
    keep_best: bool = key(False, "save the model at each evaluation with a better best_by")
    early_stop: Index = key(
        0, "end the run after so many evaluations without a better best_by (and keep_best); 0: not"
    )
    checkpoint_every: Count = key(50, "rounds between checkpoints")
    cohort_chunk: Count | Auto = key("auto", "clients held in memory at once; auto: 256 MB of them")
    central_chunk: Count = key(512, "central examples in one gradient computation (summed exactly)")
    devices: Count | Auto = key(
        "auto", "JAX devices (of all processes) that share a cohort; see docs/simulator.md"
    )
    # Differential privacy of a client (docs/privacy.md): --dp epsilon=4 sets dp_epsilon
    dp_epsilon: Positive | None = key(None, "most that a run may spend; without the next: for z")
    dp_noise_multiplier: NotNegative | None = key(
        None, "z: standard deviation of the noise on the sum, in clip norms; unset: from dp_epsilon"
    )
    dp_delta: Annotated[float, Meta(gt=0, lt=1)] | None = key(None, "delta; below 1/clients")
    dp_clip: Positive | Literal["adaptive"] = key(
        "adaptive", "C: largest norm of a client's own part; adaptive: follows a quantile of them"
    )
    dp_clip_start: Positive = key(0.1, "C in the first round, if it is adaptive")
    dp_clip_quantile: Annotated[float, Meta(gt=0, lt=1)] = key(
        0.5, "share of the clients that an adaptive C leaves as they are"
    )
    dp_mechanism: Literal["gaussian", "banded", "distributed"] = key(
        "gaussian", "noise: independent; banded: correlated; distributed: added by the clients"
    )
    dp_sampling: Literal["poisson", "fixed", "none"] = key(
        "none", "what the accountant may assume of `sampling`; none: nothing, always right"
    )
    dp_min_sep: Count = key(1, "rounds from one participation of a client to the next")
    dp_clients: Count | Auto = key("auto", "clients in a population; auto: counted")
    dp_scale: Count = key(
        1, "FOR STUDIES, not private: simulates this many times the clients and the cohort"
    )
    dp_seed: Index | None = key(None, "FOR TESTS ONLY, not private: noise from a seed")
    # No key, but the keys that the algorithm declares for itself, which has checked them.
    own: Own = dataclasses.field(default=Own(), metadata={"checked": True})
    # No key either: the most local steps of any population, if they differ.
    most_steps: int | None = dataclasses.field(default=None, metadata={"checked": True})
    # Nor this: the round whose rates are in place of schedules.
    round: int | None = dataclasses.field(default=None, metadata={"checked": True})

    def __post_init__(self):
        check_fields(self)
        for name in RATES:
            value, auto = getattr(self, name), KEYS[name].default == "auto"
            if is_schedule(value) or (value == "auto" and not auto):
                check_schedule(name, value, self.rounds, auto)

    @property
    def schedules(self) -> dict[str, Any]:
        """The rates that are schedules."""
        return {k: v for k in RATES if is_schedule(v := getattr(self, k))}

    def at(self, round: int) -> "Settings":
        """With the rates of a round (0, 1, ...) in place of schedules."""
        found: dict[str, Any] = {
            k: rate_at(k, v, self.rounds, round) for k, v in self.schedules.items()
        }
        return dataclasses.replace(self, **found) if found else self

    def of(self, term: Any) -> "Settings":
        """With what the population `term` has of its own."""
        if not term.settings:
            return self
        try:
            check_keys(term.settings, valid=POPULATION_KEYS)
            own = dataclasses.replace(self, **term.settings)
            return own if self.round is None else own.at(self.round)
        except MixflError as error:
            raise MixflError(f"settings of the population '{term.name}': {error}") from None

    def named_schedules(self, some: Iterable[str] = RATES) -> dict[str, str]:
        """Texts by which schedules are compared with those of another run."""
        found = {k: v for k, v in self.schedules.items() if k in some}
        return {k: named(k, v, self.rounds) for k, v in found.items()}

    def check_schedules(self) -> None:
        """An error if a rate is not above 0 in some round."""
        for name, schedule in self.schedules.items():
            rates(name, schedule, self.rounds)

    @property
    def private(self) -> bool:
        """Is the run differentially private?"""
        return self.dp_epsilon is not None or self.dp_noise_multiplier is not None

    @property
    def eta_c(self) -> float:
        """The rate of central steps: central_lr, or client_lr times server_lr."""
        own = self.central_lr
        return self.client_lr * self.server_lr if isinstance(own, str) else own

    @property
    def changing_eta_c(self) -> bool:
        """Does eta_c follow a schedule of another rate?"""
        follows = isinstance(self.central_lr, str) and self.central_lr == "auto"
        return follows and not {"client_lr", "server_lr"}.isdisjoint(self.schedules)

    @property
    def J(self) -> int:  # noqa: N802 (the paper's symbol)
        """The number of central steps in a round: central_steps, or local_steps."""
        return self.local_steps if self.central_steps == "auto" else self.central_steps


KEYS = {f.name: f for f in dataclasses.fields(Settings) if "checked" not in f.metadata}

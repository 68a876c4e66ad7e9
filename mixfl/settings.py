"""Every key of a run, once: the same in TOML, on the command line and in Python."""

import dataclasses
import sys
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from mixfl.errors import MixflError, unknown

Auto = Literal["auto"]
Clip = Literal["quantile", "off"]
WEIGHTINGS = ("examples", "steps", "uniform")
TABLES = ("auto", "rows", "dense")
FIRST_LAYERS = ("auto", "low-rank", "plain")
AGGREGATIONS = ("mean", "median", "trimmed-mean", "krum")
MEASURES = ("none", "dissimilarity")
LARGEST = {int: 2**63 - 1, float: sys.float_info.max}


def key(default, help: str, *, kind: type, least=None, above=None, below=None, auto=False,
        none=False, words=()):  # fmt: skip
    """A field with what its value must be."""
    meta = dict(help=help, kind=kind, least=least, above=above, below=below, auto=auto, none=none,
                words=words)  # fmt: skip
    return field(default=default, metadata=meta)


@dataclass(frozen=True)
class Settings:
    rounds: int = key(100, "rounds of training (T)", kind=int, least=1)
    seed: int = key(0, "seed of cohorts, batches and the initial model", kind=int, least=0)
    cohort_size: int = key(10, "clients per round and population (S)", kind=int, least=1)
    client_batch: int = key(10, "examples in a client's batch (|B_i|)", kind=int, least=1)
    local_steps: int = key(10, "most steps a client takes in a round (K)", kind=int, least=1)
    client_lr: float = key(0.1, "client learning rate (eta)", kind=float, above=0)
    server_lr: float = key(1.0, "server learning rate (eta_s)", kind=float, above=0)
    central_batch: int | Auto = key(
        "auto", "central batch (|B_c|); auto: S |B_i|, for 1wgt K S |B_i|", kind=int, least=1,
        auto=True,
    )  # fmt: skip
    central_steps: int | Auto = key(
        "auto", "central steps per round (J); auto: local_steps", kind=int, least=1, auto=True
    )
    central_lr: float | Auto = key(
        "auto", "central learning rate (eta_c); auto: eta eta_s", kind=float, above=0, auto=True
    )
    merge_lr: float | Auto = key(
        "auto", "merge learning rate (eta_m); auto: 1, for 2wgt 1/terms", kind=float, above=0,
        auto=True,
    )  # fmt: skip
    w_f: float | None = key(
        None, "weight of the federated term; unset: the problem's", kind=float, least=0, none=True
    )
    w_c: float | None = key(
        None, "weight of the central term; unset: the problem's", kind=float, least=0, none=True
    )
    client_opt: Any = key("sgd", "ClientOpt: an optax optimizer", kind=str)
    server_opt: Any = key("sgd", "ServerOpt", kind=str)
    central_opt: Any = key("sgd", "CentralOpt", kind=str)
    merge_opt: Any = key("sgd", "MergeOpt", kind=str)
    weighting: str = key("examples", "weight of a client: examples, steps or uniform", kind=str)
    clip: float | Clip = key(
        "quantile", "largest norm, per local step, of a client's own part of the change; quantile: "
        "3 times a running quantile of all clients'; off", kind=float, above=0,
        words=("quantile", "off"),
    )  # fmt: skip
    aggregation: str = key(
        "mean", "of the clients' changes: mean, or median, trimmed-mean, krum against bad clients",
        kind=str,
    )  # fmt: skip
    trim: float = key(
        0.2, "share of clients that trimmed-mean leaves out at each end, and krum in all",
        kind=float, least=0, below=0.5,
    )  # fmt: skip
    tables: str = key(
        "auto", "tables at clients: rows (their own only), dense; auto: rows where exact", kind=str
    )
    first_layer: str = key(
        "auto", "dense layers on raw inputs at clients: low-rank, plain; auto: what is faster",
        kind=str,
    )  # fmt: skip
    pretrain_rounds: int | Auto = key(
        "auto", "rounds of `central` before `fedavg`; auto: half", kind=int, least=0, auto=True
    )
    eval_every: int = key(10, "rounds between evaluations", kind=int, least=1)
    measure: str = key(
        "none", "measured with each evaluation: dissimilarity (theory/g2, theory/b2)", kind=str
    )
    checkpoint_every: int = key(50, "rounds between checkpoints", kind=int, least=1)
    cohort_chunk: int | Auto = key(
        "auto", "clients held in memory at once; auto: 256 MB of them", kind=int, least=1,
        auto=True,
    )  # fmt: skip
    central_chunk: int = key(
        512, "central examples in one gradient computation (summed exactly)", kind=int, least=1
    )
    devices: int | Auto = key(
        "auto", "JAX devices (of all processes) that share a cohort; see docs/simulator.md",
        kind=int, least=1, auto=True,
    )  # fmt: skip

    def __post_init__(self):
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, checked(f, getattr(self, f.name)))
        if self.weighting not in WEIGHTINGS:
            raise unknown("weighting", self.weighting, WEIGHTINGS)
        if self.aggregation not in AGGREGATIONS:
            raise unknown("aggregation", self.aggregation, AGGREGATIONS)
        if self.tables not in TABLES:
            raise unknown("value of tables", self.tables, TABLES)
        if self.first_layer not in FIRST_LAYERS:
            raise unknown("value of first_layer", self.first_layer, FIRST_LAYERS)
        if self.measure not in MEASURES:
            raise unknown("value of measure", self.measure, MEASURES)

    @property
    def eta_c(self) -> float:
        return self.client_lr * self.server_lr if self.central_lr == "auto" else self.central_lr

    @property
    def J(self) -> int:  # noqa: N802 (the paper's symbol)
        return self.local_steps if self.central_steps == "auto" else self.central_steps


KEYS = {f.name: f for f in dataclasses.fields(Settings)}


def checked(f: dataclasses.Field, value):
    """The value as its key wants it, or an error that says what was wrong."""
    meta = f.metadata
    if isinstance(value, str):
        if meta["kind"] is str or (meta["auto"] and value == "auto"):
            return value
        if value in meta["words"]:
            return value
    elif callable(value) and f.name.endswith("_opt"):
        return value
    elif value is None and meta["none"]:
        return value
    elif isinstance(value, Real) and not isinstance(value, bool):
        if meta["kind"] is float and _in_range(meta, value):
            return float(value)
        if meta["kind"] is int and isinstance(value, Integral) and _in_range(meta, value):
            return int(value)
    raise MixflError(f"{f.name} = {_short(value)}: expected {_expected(meta)} ({meta['help']}).")


def _in_range(meta, value) -> bool:
    most = LARGEST[meta["kind"]]
    return (
        -most <= value <= most
        and (meta["least"] is None or value >= meta["least"])
        and (meta["above"] is None or value > meta["above"])
        and (meta["below"] is None or value < meta["below"])
    )


def _short(value) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a number"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _expected(meta) -> str:
    noun = {int: "a whole number", float: "a finite number", str: "a name"}[meta["kind"]]
    if meta["least"] is not None:
        noun += f" of at least {meta['least']}"
    if meta["above"] is not None:
        noun += f" above {meta['above']}"
    if meta["below"] is not None:
        noun += f" and below {meta['below']}"
    words = [f"'{word}'" for word in (*meta["words"], *["auto"] * meta["auto"])]
    return ", or ".join([noun, *words])


def check_keys(given, *, valid, used=None, by: str = "") -> None:
    """An unknown key is an error, and so is one that would have no effect."""
    for name in given:
        if name not in valid:
            raise unknown("key", name, valid)
        if used is not None and name not in used:
            raise MixflError(
                f"key '{name}' has no effect on {by}. It uses: {', '.join(sorted(used))}."
            )

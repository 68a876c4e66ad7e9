"""The keys of a run for type checkers and editors: `mixfl.train(..., rounds=100)`.

Written by `python tests/support/typed_keys.py` from mixfl/settings.py, which has the checks.
"""

from collections.abc import Callable
from typing import Any, Literal, TypedDict


class Keys(TypedDict, total=False):
    """Every key, and the type of its value."""

    rounds: int
    seed: int
    cohort_size: int
    client_batch: int
    local_steps: int
    local_epochs: int | None
    sampling: Literal["uniform", "examples", "poisson"]
    cohort_cap: int | Literal["auto"]
    drop_rate: float
    late_rate: float
    min_speed: float
    client_lr: float | str | Callable[..., Any]
    server_lr: float | str | Callable[..., Any]
    central_batch: int | Literal["auto"]
    central_steps: int | Literal["auto"]
    central_lr: float | str | Callable[..., Any]
    merge_lr: float | str | Callable[..., Any]
    w_f: float | None
    w_c: float | None
    client_opt: str | Callable[..., Any]
    server_opt: str | Callable[..., Any]
    central_opt: str | Callable[..., Any]
    merge_opt: str | Callable[..., Any]
    weighting: Literal["examples", "steps", "uniform"]
    grad_clip: float | Literal["off"]
    weight_decay: float
    proximal: float
    clip: float | Literal["quantile", "off"]
    aggregation: Literal["mean", "median", "trimmed-mean", "krum"]
    trim: float
    upload: Literal["float32", "bfloat16", "int16", "int8", "int4", "int2"]
    download: Literal["float32", "bf16", "bfloat16", "int16", "int8"]
    download_gradient: Literal["auto", "float32", "bf16", "bfloat16", "int16", "int8"]
    tables: Literal["auto", "rows", "dense"]
    first_layer: Literal["auto", "low-rank", "plain"]
    convolutions: Literal["auto", "products", "plain"]
    compute: Literal["float32", "bfloat16"]
    loops: Literal["auto", "compiled", "host", "pytorch"]
    pretrain_rounds: int | Literal["auto"]
    eval_every: int
    eval_clients: int
    measure: Literal["none", "dissimilarity"]
    best_by: str
    keep_best: bool
    early_stop: int
    checkpoint_every: int
    cohort_chunk: int | Literal["auto"]
    central_chunk: int
    devices: int | Literal["auto"]
    dp_epsilon: float | None
    dp_noise_multiplier: float | None
    dp_delta: float | None
    dp_clip: float | Literal["adaptive"]
    dp_clip_start: float
    dp_clip_quantile: float
    dp_mechanism: Literal["gaussian", "banded", "distributed"]
    dp_sampling: Literal["poisson", "fixed", "none"]
    dp_min_sep: int
    dp_clients: int | Literal["auto"]
    dp_scale: int
    dp_seed: int | None

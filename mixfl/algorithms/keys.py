"""Which keys have an effect on which algorithms."""

from mixfl.settings import KEYS

__all__ = [
    "AUTO_KEYS",
    "BATCH_KEYS",
    "CENTRAL_KEYS",
    "CLIENT_KEYS",
    "MERGE_KEYS",
    "RUN_KEYS",
    "WITH_POPULATIONS",
]

RUN_KEYS = frozenset(
    {"rounds", "seed", "eval_every", "checkpoint_every", "devices", "measure", "convolutions",
     "loops", "compute", "best_by", "keep_best", "early_stop", "eval_clients"}
)  # fmt: skip
DP_KEYS = frozenset(k for k in KEYS if k.startswith("dp_"))
CLIENT_KEYS = DP_KEYS | frozenset(
    {"cohort_size", "client_batch", "local_steps", "client_lr", "client_opt", "weighting",
     "cohort_chunk", "server_lr", "server_opt", "w_f", "clip", "aggregation", "trim", "tables",
     "first_layer", "grad_clip", "weight_decay", "proximal", "local_epochs", "sampling",
     "cohort_cap", "drop_rate", "late_rate", "min_speed", "upload",
     "download", "download_gradient"}
)  # fmt: skip
BATCH_KEYS = frozenset({"central_batch", "central_chunk", "w_c"})
CENTRAL_KEYS = BATCH_KEYS | {"central_steps", "central_lr", "central_opt"}
# The `auto` values of the central keys are computed from these.
AUTO_KEYS = frozenset(
    {"cohort_size", "client_batch", "local_steps", "local_epochs", "client_lr", "server_lr"}
)
MERGE_KEYS = frozenset({"merge_lr", "merge_opt"})
# The algorithms whose populations may have settings of their own; `oracle` and `central` have no
# clients, and take those of the run.
WITH_POPULATIONS = frozenset(
    {"fedavg", "pt", "1wgt", "2wgt", "baseline", "pretrain", "oracle", "central"}
)

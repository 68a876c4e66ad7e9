"""The errors that end a run before its last round, in words."""

from pathlib import Path
from typing import Any

from mixfl.algorithms.contract import Recipe
from mixfl.errors import Diverged, Interrupted
from mixfl.settings import Settings


def diverged(recipe: Recipe, resolved: Settings, t: int, merge_lr: Any, saved: bool) -> Diverged:
    """`merge_lr`: as it was given."""
    now = resolved.at(t - 1)
    rates = {"client_lr": now.client_lr, "central_lr": now.eta_c, "server_lr": now.server_lr}
    lower = [f"{k} (now {v:g})" for k, v in rates.items() if k in recipe.uses]
    hint = f"lower {' or '.join(lower)}"
    if recipe.id == "2wgt" and merge_lr != "auto":
        hint += f", or set merge_lr = auto (now {now.merge_lr:g})"
    kept = " The last good checkpoint is kept." if saved else ""
    return Diverged(
        f"{recipe.id} diverged in round {t}: the model is no longer finite, or no client's "
        f"update is. To get on, {hint}.{kept}", t,
    )  # fmt: skip


def interrupted(t: int, rounds: int, out: Path | None, by_file: bool = False) -> Interrupted:
    """`by_file`: the file `stop` in its folder asked for it."""
    if out is None:
        return Interrupted(
            f"stopped after round {t}; nothing is saved, because no folder was given. In Python, "
            "the model and the metrics so far are the error's `result`."
        )
    on_request = " on request" if by_file else ""
    error = Interrupted(
        f"stopped{on_request} after round {t} of {rounds}; the state is saved in {out}. The same "
        "command with --resume goes on."
    )
    error.on_request = by_file
    return error

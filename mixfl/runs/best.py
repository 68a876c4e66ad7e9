"""Going back to the best model of a run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from mixfl.errors import MixflError
from mixfl.runs import manifest
from mixfl.runs.aside import Aside
from mixfl.runs.checkpoint import Checkpoints
from mixfl.runs.files import write_whole
from mixfl.runs.folder import locked
from mixfl.runs.reading import read_run_config


def rewind(path: Path, note: Callable[[str], None]) -> None:
    """`back_to_best` for a run that no process is making."""
    read_run_config(path)
    with locked(path):
        back_to_best(path, note)


def back_to_best(path: Path, note: Callable[[str], None]) -> None:
    """Moves aside what came after the best checkpoint, where the run then goes on."""
    checkpoints = Checkpoints(path / "checkpoints")
    best = checkpoints.best()
    if best is None:
        raise MixflError(
            f"{path} has no best checkpoint to go on from: none is from an evaluated round whose "
            "metrics have a loss, or the key best_by."
        )
    folder = path / "checkpoints" / str(best)
    if manifest.damage(folder):
        raise MixflError(f"{folder}, the best checkpoint, is damaged ({manifest.damage(folder)}).")
    later = [r for r in checkpoints.rounds() if r > best]
    if not later:
        note(f"the best checkpoint is the newest, of round {best}")
        return
    aside = Aside(path)
    aside.copy("metrics.jsonl")
    for name in ("model.safetensors", "mlflow.json", *(f"checkpoints/{r}" for r in later)):
        aside.move(name)
    status = {"status": "interrupted", "round": best, "saved": best}  # whatever it was
    write_whole(path / "status.json", (json.dumps(status) + "\n").encode())
    judged = manifest.judged(folder)
    assert judged is not None
    note(
        f"going back to the best checkpoint, of round {best} ({judged.by} {judged.value:.4g}): "
        f"what came after it is in {aside.path.name}"
    )


def remove_checkpoints(path: Path) -> None:
    """Of a run that is over: all but the best, if the run keeps that (keep_best, early_stop)."""
    checkpoints, config = Checkpoints(path / "checkpoints"), read_run_config(path)
    keep = config.get("keep_best") or config.get("early_stop")
    best = checkpoints.best() if keep else None
    for round in checkpoints.rounds():
        if round != best:
            shutil.rmtree(checkpoints.path / str(round), ignore_errors=True)
    if best is None:
        shutil.rmtree(checkpoints.path, ignore_errors=True)

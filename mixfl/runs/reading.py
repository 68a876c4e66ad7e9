"""Reading a run folder (its files: folder.py)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError
from mixfl.format_versions import RUN_FOLDER, check_format
from mixfl.runs.html import summary
from mixfl.runs.model_file import load_model, trained_with
from mixfl.tasks import read_toml


@dataclass(frozen=True)
class Run:
    """What `mixfl.load` returns."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    params: Any  # None while the run has not finished
    status: str
    frozen: str = ""  # the digest of the frozen arrays that the model was trained with
    state: Any = None  # of the model, if its problem has one

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return summary(self.config, self.metrics, [self.status])


def load(path: str | Path, like: Any = None, best: bool = False) -> Run:
    """A run's model, configuration and metrics.

    The model comes back as nested dicts and lists. To get another kind of pytree, give `like`: a
    model of the same structure, such as problem.init(key). `best`: of the saved models, the best by
    the run's key best_by, even if the run has not finished.

    >>> result = mixfl.train(problem, "fedavg", rounds=1, out="runs/mine")
    >>> run = mixfl.load("runs/mine")
    >>> run.status, bool((run.params["w"] == result.params["w"]).all())
    ('finished', True)
    """
    from mixfl.trees import Model, as_model, params_of  # with JAX, which reports do without

    path = Path(path)
    config = read_run_config(path)
    file = path / "model.safetensors"
    if best:
        params = best_model(path, like)
    else:
        params = load_model(file, like) if file.exists() else None
    status = read_status(path).get("status", "unknown")
    frozen = trained_with(file) if file.exists() else ""
    model = as_model(params)
    state = model.state if isinstance(model, Model) else None
    return Run(path, config, read_metrics(path), params_of(model), status, frozen, state)


def read_run_config(path: Path) -> dict[str, Any]:
    """The config.toml of a run folder, if this mixfl can read the folder."""
    if not (path / "config.toml").is_file():
        raise MixflError(f"{path} holds no run (no config.toml in it).")
    config = read_toml(path / "config.toml")
    check_format(path, config.get("format"), RUN_FOLDER, "make the run again in another folder")
    return config


def best_model(path: Path, like: Any = None) -> Any:
    from mixfl.runs.checkpoint import Checkpoints

    return Checkpoints(path / "checkpoints").model(best_round(path), like)


def best_round(path: Path) -> int:
    """Of the best checkpoint."""
    from mixfl.runs.checkpoint import Checkpoints

    round = Checkpoints(path / "checkpoints").best()
    if round is None:
        raise MixflError(
            f"{path} has no best model: no checkpoint is from an evaluated round whose metrics "
            "have a loss, or the key best_by."
        )
    return round


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without damaged lines or a last line cut off by a crash."""
    file = path / "metrics.jsonl"
    rows = map(_json, file.read_bytes().split(b"\n") if file.exists() else [])
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("round"), int)]


def read_status(path: Path) -> dict[str, Any]:
    try:
        content = _json((path / "status.json").read_bytes())
    except OSError:
        content = None
    return content if isinstance(content, dict) else {}


def _json(content: bytes) -> Any:
    """None if it is damaged."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None

"""A run's metrics in Weights & Biases."""

import json
import os
import secrets
from collections.abc import Callable
from typing import Any

from mixfl.errors import MixflError
from mixfl.runs.files import write_whole
from mixfl.runs.folder import RunFolder
from mixfl.runs.sinks.base import Sink
from mixfl.runs.sinks.tracker import Tracker, environment

FILE = "wandb.json"  # in the run folder: the run's id there, and the last round that it has
# For W&B, unless the user has set them.
ENVIRONMENT = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_ERROR_REPORTING": "false"}


def make() -> Callable[[RunFolder, Callable[[str], None]], Sink]:
    """How to make the sink, once there is a folder. If W&B is not installed, or would ask for a
    key: an error now."""
    try:
        with environment(ENVIRONMENT):
            import wandb
    except ImportError as error:
        raise MixflError(
            f"tracking with Weights & Biases: {error}. Install it: pip install 'mixfl[wandb]'"
        ) from None
    if os.environ.get("WANDB_MODE", "online") in ("online", "run") and not wandb.api.api_key:
        raise MixflError(
            "tracking with Weights & Biases: there is no key. Log in (wandb login), or set "
            "WANDB_MODE=offline to keep everything here; `wandb sync` sends it later."
        )
    return lambda folder, note: WandB(folder, note, wandb)


class WandB(Tracker):
    """The round is W&B's step."""

    name, option, variables = "Weights & Biases", "wandb", ENVIRONMENT

    def __init__(self, folder: RunFolder, note: Callable[[str], None], wandb: Any):
        super().__init__(folder, note)
        self.wandb, self.over = wandb, False

    def _begin(self, start):
        kept = self._kept()
        if kept.get("finished"):
            return
        self.id, self.logged = kept.get("id") or secrets.token_hex(4), kept.get("logged", 0)
        self.run = self.wandb.init(
            project=os.environ.get("WANDB_PROJECT") or start.experiment, id=self.id,
            name=os.environ.get("WANDB_NAME") or self.folder.path.resolve().name,
            config=dict(start.config), resume="allow", dir=os.environ.get("WANDB_DIR"),
            mode=os.environ.get("WANDB_MODE"),  # W&B itself reads these only once
            reinit="create_new",  # the caller may have a run of its own
        )  # fmt: skip
        self._keep()
        for row in start.rows:
            if row["round"] > self.logged:
                self._add(row)

    def _add(self, row):
        values = {k: v for k, v in row.items() if k != "round" and v is not None}
        self.run.log(values, step=row["round"], commit=True)  # not only at the next one
        self.logged = row["round"]
        self._keep()

    def _end(self, error):
        if error is None:
            artifact = self.wandb.Artifact(f"model-{self.id}", type="model")
            for name in (*self.folder.files, "config.toml", "model.safetensors"):
                artifact.add_file(str(self.folder.path / name))
            self.run.log_artifact(artifact)
        self.run.finish(exit_code=0 if error is None else 1)
        self.over = error is None
        self._keep()

    def _kept(self) -> dict[str, Any]:
        try:
            kept = json.loads((self.folder.path / FILE).read_bytes())
        except (OSError, ValueError):
            return {}
        good = isinstance(kept, dict) and isinstance(kept.get("id"), str)
        return kept if good and isinstance(kept.get("logged"), int) else {}

    def _keep(self) -> None:
        kept = {"id": self.id, "logged": self.logged} | ({"finished": True} if self.over else {})
        write_whole(self.folder.path / FILE, (json.dumps(kept) + "\n").encode())

"""Files in a run's way are moved aside, to a folder within the run folder, and never deleted."""

import shutil
from pathlib import Path

from mixfl.runs.files import disk_error

# In this order: while its metrics are there, it is known that the run had checkpoints.
CLIENTS = "clients"  # what clients keep between rounds
EVERYTHING = (
    "checkpoints", CLIENTS, "tensorboard", "mlflow.json", "wandb.json", "origin.json",
    "model.safetensors", "metrics.jsonl", "progress.json", "log.jsonl", "status.json",
)  # fmt: skip


class Aside:
    """A new folder, aside-1, aside-2, ..., that is made when something is moved to it."""

    def __init__(self, run: Path):
        self.run = run
        taken = [int(n) for p in run.glob("aside-*") if (n := p.name[6:]).isdigit()]
        self.path = run / f"aside-{max(taken, default=0) + 1}"

    def move(self, name: str) -> None:
        """Moves a file or folder of the run, if there is one."""
        if (self.run / name).exists():
            self._do(lambda: (self.run / name).rename(self._place(name)))

    def copy(self, name: str) -> None:
        if (self.run / name).exists():
            self._do(lambda: shutil.copy2(self.run / name, self._place(name)))

    def _do(self, action) -> None:
        try:
            action()
        except OSError as error:
            raise disk_error(self.path, error) from None

    def _place(self, name: str) -> Path:
        place = self.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

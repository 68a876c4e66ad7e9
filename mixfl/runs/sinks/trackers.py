"""Trackers, which get a run's metrics in addition to its folder."""

from collections.abc import Callable

from mixfl.errors import unknown
from mixfl.runs.folder import RunFolder
from mixfl.runs.sinks.base import Sink

TRACKERS = ("mlflow", "wandb")

MakeSink = Callable[[RunFolder, Callable[[str], None]], Sink]


def check(name: str | None) -> None:
    if name is not None and name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)


def tracker(name: str | None) -> MakeSink | None:
    """How to make the tracker's sink, once there is a folder. An unknown tracker, or one that is
    not installed, is an error now."""
    check(name)
    if name == "mlflow":
        from mixfl.runs.sinks import mlflow

        return mlflow.make()
    if name == "wandb":
        from mixfl.runs.sinks import wandb

        return wandb.make()
    return None

"""mixfl: mixed federated learning.

Train one model jointly on data that stays with clients and on a loss computed at the server.
Names are imported when first used, so that `mixfl --help` does not wait for JAX. Importing mixfl
changes nothing else in the process; `prepare_process` does, for speed, when you call it.
"""

import importlib
from typing import TYPE_CHECKING

_WHERE = {
    "ClientData": "mixfl.data.examples",
    "Examples": "mixfl.data.examples",
    "Ragged": "mixfl.data.columns",
    "StoreWriter": "mixfl.data.writer",
    "partition": "mixfl.data.partitioning",
    "picture": "mixfl.data.picture",
    "Problem": "mixfl.problem",
    "Federated": "mixfl.problem",
    "Central": "mixfl.problem",
    "per_example": "mixfl.randomness",
    "ClientEvaluation": "mixfl.client_evaluation",
    "Settings": "mixfl.settings",
    "DP": "mixfl.privacy.config",
    "MixflError": "mixfl.errors",
    "Diverged": "mixfl.errors",
    "Interrupted": "mixfl.errors",
    "train": "mixfl.runs.training",
    "tune": "mixfl.studies.tune",
    "Event": "mixfl.runs.callbacks",
    "Result": "mixfl.runs.result",
    "load": "mixfl.runs.reading",
    "prepare_process": "mixfl.process",
    "fed_avg": "mixfl.algorithms",
    "parallel_training": "mixfl.algorithms",
    "one_way_gt": "mixfl.algorithms",
    "two_way_gt": "mixfl.algorithms",
    "example_transfer": "mixfl.algorithms",
    "oracle": "mixfl.algorithms",
    "central": "mixfl.algorithms",
    "pretrain": "mixfl.algorithms",
    "baseline": "mixfl.algorithms",
    "server_learning": "mixfl.algorithms",
    "fedclg": "mixfl.algorithms",
    "mime_lite": "mixfl.algorithms",
    "scaffold": "mixfl.algorithms",
    "ALGORITHMS": "mixfl.algorithms",
}

__all__ = [*_WHERE, "__version__"]

if TYPE_CHECKING:
    __version__: str
    from mixfl.algorithms import (
        ALGORITHMS,
        baseline,
        central,
        example_transfer,
        fed_avg,
        fedclg,
        mime_lite,
        one_way_gt,
        oracle,
        parallel_training,
        pretrain,
        scaffold,
        server_learning,
        two_way_gt,
    )  # fmt: skip
    from mixfl.client_evaluation import ClientEvaluation
    from mixfl.data.columns import Ragged
    from mixfl.data.examples import ClientData, Examples
    from mixfl.data.partitioning import partition
    from mixfl.data.picture import picture
    from mixfl.data.writer import StoreWriter
    from mixfl.errors import Diverged, Interrupted, MixflError
    from mixfl.privacy.config import DP
    from mixfl.problem import Central, Federated, Problem
    from mixfl.process import prepare_process
    from mixfl.randomness import per_example
    from mixfl.runs.callbacks import Event
    from mixfl.runs.reading import load
    from mixfl.runs.result import Result
    from mixfl.runs.training import train
    from mixfl.settings import Settings
    from mixfl.studies.tune import tune


def __getattr__(name: str):
    if name == "__version__":
        return _version()
    if name not in _WHERE:
        raise AttributeError(f"module 'mixfl' has no attribute '{name}'")
    return getattr(importlib.import_module(_WHERE[name]), name)


def _version() -> str:
    """Of the installed package: from the tag, or from the last tag and the commits after it."""
    from importlib import metadata

    try:
        return metadata.version("mixfl")
    except metadata.PackageNotFoundError:
        return "0+unknown"  # a tree that is on the path, but not installed


def __dir__():
    return sorted(__all__)

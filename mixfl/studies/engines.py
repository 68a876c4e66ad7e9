"""`--on local|ray|slurm`: who makes the runs of a command."""

from collections.abc import Mapping
from typing import Any

from mixfl.errors import MixflError, unknown
from mixfl.process import cores
from mixfl.studies.trials import Crew
from mixfl.studies.worker_process import HUNG_SECONDS

ENGINES = ("local", "ray", "slurm")


def crew(
    on: str = "local", options: Mapping[str, Any] | None = None, jobs: int | None = None,
    hung: float = HUNG_SECONDS,
) -> Crew:  # fmt: skip
    """`jobs` at a time; by default as many as there are cores, here or in the Ray cluster."""
    if on not in ENGINES:
        raise unknown("--on", on, ENGINES)
    if on == "local":
        if options:
            raise MixflError("--on-option is for --on ray and --on slurm.")
        return Crew(jobs or cores(), hung)
    from mixfl.studies.launchers import LAUNCHERS
    from mixfl.studies.remote import Cluster

    return Crew(0, hung, Cluster(LAUNCHERS[on](jobs, options or {}), hung))

"""Ray and Slurm: what starts workers on other machines (`--on ray`, `--on slurm`).

Both run serving.serve as a job. They pickle that call and its arguments for their own machines;
mixfl itself sends lines of JSON (mailbox.py), and never reads what a job returns.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mixfl.errors import MixflError, unknown
from mixfl.studies import serving
from mixfl.studies.remote import Launcher

SLURM_JOBS = 4  # at a time, without --jobs
LAST_LINES = 3  # of a job's log, in a message


def number(options: Mapping[str, Any], key: str, default: float, least: float) -> float:
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
        raise MixflError(f"--on-option {key}={value}: expected a number from {least:g} on.")
    return value


class RayJobs:
    """Tasks of a Ray cluster: that of `address` or RAY_ADDRESS, else one that runs on this machine,
    else one that is started here and ends with the command."""

    OPTIONS = ("address", "cpus", "gpus", "memory")

    def __init__(self, jobs: int | None, options: Mapping[str, Any]):
        for key in options:
            if key not in self.OPTIONS:
                raise unknown("--on-option of ray:", key, self.OPTIONS)
        cpus = number(options, "cpus", 1, 0.1)
        self.resources: dict[str, Any] = {
            "num_cpus": cpus, "num_gpus": number(options, "gpus", 0, 0),
            "memory": number(options, "memory", 0, 0) * 1e9 or None,
        }  # fmt: skip
        self.devices = max(int(cpus), 1)
        try:
            import ray
        except ImportError:
            raise MixflError("--on ray needs Ray: pip install 'mixfl[ray]'.") from None
        self.ray = ray
        self.ours = not ray.is_initialized()
        if self.ours:
            self._connect(options.get("address"))
        found = ray.cluster_resources().get("CPU", 0)
        self.jobs = jobs or max(int(found / cpus), 1)
        self.serve: Any = ray.remote(serving.serve)

    def _connect(self, address: str | None) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        given = address or os.environ.get("RAY_ADDRESS")
        try:
            self.ray.init(address=given or "auto", **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            if given:
                raise MixflError(
                    f"no Ray cluster answers at {given}: {first_line(error)}"
                ) from None
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported home
            self.ray.init(address="local", include_dashboard=False, **quiet)

    def start(self, mailbox: Path, request: dict[str, Any]) -> "RayJob":
        task = self.serve.options(max_retries=0, **self.resources)
        return RayJob(self.ray, task.remote(**request))

    def close(self) -> None:
        if self.ours:
            self.ray.shutdown()


class RayJob:
    def __init__(self, ray: Any, task: Any):
        self.ray, self.task = ray, task

    def ended(self) -> str | None:
        try:
            over, _ = self.ray.wait([self.task], timeout=0)
        except (self.ray.exceptions.RayError, ConnectionError) as error:
            raise MixflError(
                f"the Ray cluster is gone ({first_line(error)}). The runs are saved; the same "
                "command with --resume goes on."
            ) from None
        if not over:
            return None
        try:
            self.ray.get(self.task)
        except self.ray.exceptions.RayTaskError as error:
            return f"its worker failed: {str(error).strip().splitlines()[-1]}"
        except self.ray.exceptions.RayError as error:
            return f"its node or process was lost ({type(error).__name__})"
        return "its worker ended"

    def cancel(self) -> None:
        self.ray.cancel(self.task, force=True)


class SlurmJobs:
    """Jobs of Slurm, or of submitit's stand-in on this machine (`cluster=local`)."""

    OWN = ("cluster", "cpus", "gpus", "memory", "time")  # anything else goes to sbatch as it is

    def __init__(self, jobs: int | None, options: Mapping[str, Any]):
        try:
            import submitit
        except ImportError:
            raise MixflError("--on slurm needs submitit: pip install 'mixfl[slurm]'.") from None
        self.submitit = submitit
        self.cluster = options.get("cluster", "slurm")
        if self.cluster not in ("slurm", "local"):
            raise unknown("--on-option cluster of slurm:", str(self.cluster), ("slurm", "local"))
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise MixflError(
                "--on slurm: there is no sbatch here. Run it on a machine that submits jobs, or "
                "try it out with --on-option cluster=local."
            )
        self.jobs = jobs or SLURM_JOBS
        self.devices = int(number(options, "cpus", 1, 1))
        self.parameters: dict[str, Any] = {
            "name": "mixfl", "nodes": 1, "tasks_per_node": 1, "cpus_per_task": self.devices,
            "timeout_min": minutes(str(options.get("time", "60"))),
        }  # fmt: skip
        if "gpus" in options:
            self.parameters["gpus_per_node"] = int(number(options, "gpus", 0, 0))
        if "memory" in options:
            self.parameters["mem_gb"] = number(options, "memory", 0, 0.1)
        others = {k.replace("-", "_"): v for k, v in options.items() if k not in self.OWN}
        if others:
            self.parameters["slurm_additional_parameters"] = others

    def start(self, mailbox: Path, request: dict[str, Any]) -> "SlurmJob":
        executor = self.submitit.AutoExecutor(folder=mailbox / "job", cluster=self.cluster)
        executor.update_parameters(**self.parameters)
        try:
            return SlurmJob(executor.submit(serving.serve, **request))
        except self.submitit.core.utils.FailedJobError as error:
            raise MixflError(f"Slurm refuses the job: {' '.join(str(error).split())}") from None

    def close(self) -> None: ...


class SlurmJob:
    def __init__(self, job: Any):
        self.job = job

    def ended(self) -> str | None:
        if not self.job.done():
            return None
        log = (self.job.stderr() or "").strip().splitlines()[-LAST_LINES:]
        return " ".join([f"its job {self.job.job_id} ended ({self.job.state}).", *log])

    def cancel(self) -> None:
        self.job.cancel(check=False)


LAUNCHERS: dict[str, Callable[..., Launcher]] = {"ray": RayJobs, "slurm": SlurmJobs}


def minutes(text: str) -> int:
    """As sbatch reads it: minutes, hours:minutes:seconds, or days-hours:minutes:seconds."""
    form = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if form is None:
        raise MixflError(
            f"--on-option time={text}: expected minutes, hours:minutes:seconds or days-hours."
        )
    days, *parts = form.groups()
    a, b, c = (int(p) if p else None for p in parts)
    assert a is not None
    if days is not None:  # days-hours[:minutes[:seconds]]
        seconds = int(days) * 86400 + a * 3600 + (b or 0) * 60 + (c or 0)
    elif c is not None:
        seconds = a * 3600 + (b or 0) * 60 + c
    else:  # minutes[:seconds]
        seconds = a * 60 + (b or 0)
    return max(-(-seconds // 60), 1)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

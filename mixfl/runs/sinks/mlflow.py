"""A run's metrics in MLflow."""

import contextlib
import fcntl
import json
import os
import posixpath
import re
import time
from collections.abc import Callable
from typing import IO, Any

from mixfl.errors import Interrupted, MixflError
from mixfl.process.compilation_cache import own_cache
from mixfl.runs.files import write_whole
from mixfl.runs.folder import RunFolder
from mixfl.runs.sinks.base import Sink
from mixfl.runs.sinks.tracker import Tracker, environment

# For MLflow, unless the user has set them.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",  # a server is given up after half a minute, not four
}


def make() -> Callable[[RunFolder, Callable[[str], None]], Sink]:
    """How to make the sink, once there is a folder. If MLflow is not installed: an error now."""
    try:
        with environment(ENVIRONMENT):
            from mlflow import MlflowClient
    except ImportError as error:
        raise MixflError(
            f"tracking with MLflow: {error}. Install it: pip install 'mixfl[mlflow]'"
        ) from None
    return lambda folder, note: MLflow(folder, note, MlflowClient)


class MLflow(Tracker):
    name, option, variables = "MLflow", "mlflow", ENVIRONMENT

    def __init__(self, folder: RunFolder, note: Callable[[str], None], client: Callable[[], Any]):
        super().__init__(folder, note)
        self.make_client = client  # and no mlflow.start_run(): the caller may have one

    def _begin(self, start):
        with one_at_a_time():
            self.client = self.make_client()
        run = self._earlier_run()
        if run is None:
            run = self.client.create_run(
                self._experiment(start.experiment), run_name=self.folder.path.resolve().name
            )
            content = json.dumps({"run_id": run.info.run_id}) + "\n"
            write_whole(self.folder.path / "mlflow.json", content.encode())
        elif run.info.status == "FINISHED":
            return
        self.run = run.info.run_id
        if run.info.status != "RUNNING":
            self.client.update_run(self.run, status="RUNNING")
        if not run.data.params:
            from mlflow.entities import Param

            params = [Param(key, str(value)) for key, value in start.config.items()]
            self.client.log_batch(self.run, params=params)
        # The last key of every row: a row that has it is complete.
        history = self.client.get_metric_history(self.run, "time/round_ms")
        self.logged = max((metric.step for metric in history), default=0)
        for row in start.rows:
            if row["round"] > self.logged:
                self._add(row)

    def _earlier_run(self) -> Any:
        """The run in MLflow that this run had before, if the store still has it."""
        from mlflow import MlflowException

        try:
            run_id = json.loads((self.folder.path / "mlflow.json").read_bytes())["run_id"]
            run = self.client.get_run(run_id)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self, name: str) -> str:
        from mlflow import MlflowException

        chosen = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if chosen:
            return chosen
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
        known = self.client.get_experiment_by_name(name)
        try:
            return known.experiment_id if known else self.client.create_experiment(name)
        except MlflowException:
            known = self.client.get_experiment_by_name(name)  # another process has made it
            if known is None:
                raise
            return known.experiment_id

    def _add(self, row):
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(metric_name(key), value, now, row["round"])
            for key, value in row.items()
            if key != "round" and value is not None
        ]
        self.client.log_batch(self.run, metrics=metrics)
        self.logged = row["round"]

    def _end(self, error):
        if error is None:
            for name in (*self.folder.files, "config.toml", "model.safetensors"):
                self.client.log_artifact(self.run, str(self.folder.path / name))
            status = "FINISHED"
        else:
            status = "KILLED" if isinstance(error, Interrupted | KeyboardInterrupt) else "FAILED"
        self.client.set_terminated(self.run, status)


@contextlib.contextmanager
def one_at_a_time():
    """A client creates MLflow's database if there is none. Runs that begin together, as in a
    comparison, would create it at the same time and leave it broken."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the file system may have no locks, or be read-only
            fcntl.flock(stack.enter_context(lock_file("mlflow")), fcntl.LOCK_EX)
        yield


def lock_file(name: str) -> IO:
    """In a folder that only the user can open: whoever can open a file can hold its lock."""
    folder = own_cache() / "locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    folder.chmod(0o700)
    return open(folder / name, "a")


def metric_name(key: str) -> str:
    """MLflow allows no @ (its own metrics are called recall_at_10) and no path like a//b."""
    name = re.sub(r"[^\w. :/-]", "_", key.replace("@", "_at_"))
    return name if posixpath.normpath(name) == name else name.replace("/", "_")

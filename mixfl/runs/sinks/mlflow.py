"""Trackers, which get a run's metrics besides its own folder: MLflow."""

import contextlib
import fcntl
import json
import os
import posixpath
import re
import shlex
import time
from collections.abc import Callable
from typing import IO, Any

from mixfl.errors import Interrupted, MixflError, unknown
from mixfl.process.compilation_cache import own_cache
from mixfl.runs.files import write_whole
from mixfl.runs.folder import RunDirectory

TRACKERS = ("mlflow",)
# For this process, where the user has not said otherwise.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "4",  # a server is given up after half a minute, not four
}


class Tracker:
    """No tracker, and what one has. None of it raises an error."""

    def begin(
        self, directory: RunDirectory, experiment: str, config: dict[str, Any],
        rows: list[dict[str, Any]], note: Callable[[str], None],
    ) -> None: ...  # fmt: skip
    def add(self, row: dict[str, Any]) -> None: ...
    def end(self, error: BaseException | None = None) -> None: ...


def check(name: str | None) -> None:
    if name is not None and name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)


def tracker(name: str | None) -> Tracker:
    check(name)
    return Tracker() if name is None else MLflow()


class MLflow(Tracker):
    """A run of MLflow's for each run. Its id is kept in the run's folder, and what MLflow has
    already is not logged again, so that a resumed run goes on in it."""

    def __init__(self):
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise MixflError(
                f"tracking with MLflow: {error}. Install it: pip install 'mixfl[mlflow]'"
            ) from None
        self.make_client = MlflowClient  # and no mlflow.start_run(): that one is the caller's
        self.run: str | None = None  # its id; None where nothing is logged (any more)

    def begin(self, directory, experiment, config, rows, note):
        self.directory, self.note = directory, note
        self._try(lambda: self._begin(experiment, config, rows))

    def add(self, row):
        if self.run is not None and row["round"] > self.logged:
            self._try(lambda: self._add(row))

    def end(self, error=None):
        if self.run is not None:
            self._try(lambda: self._end(error))
        self.run = None

    def _try(self, action: Callable[[], None]) -> None:
        """A store that is gone does not end the training."""
        try:
            action()
        except Exception as error:
            self.run = None
            lines = str(error).strip().splitlines() or [type(error).__name__]
            path = str(self.directory.path)
            later = ["mixfl", "run", "--config", f"{path}/config.toml", "--out", path]
            self.note(
                f"MLflow failed ({lines[0][:200]}): going on without it. What is missing there is "
                f"logged later by: {shlex.join(later)} --resume --track mlflow"
            )

    def _begin(self, experiment, config, rows):
        with one_at_a_time():
            self.client = self.make_client()
        found = self._found()
        if found is None:
            found = self.client.create_run(
                self._experiment(experiment), run_name=self.directory.path.resolve().name
            )
            content = json.dumps({"run_id": found.info.run_id}) + "\n"
            write_whole(self.directory.path / "mlflow.json", content.encode())
        elif found.info.status == "FINISHED":
            return
        self.run = found.info.run_id
        if found.info.status != "RUNNING":
            self.client.update_run(self.run, status="RUNNING")
        if not found.data.params:
            from mlflow.entities import Param

            params = [Param(key, str(value)) for key, value in config.items()]
            self.client.log_batch(self.run, params=params)
        # The last key of every row.
        history = self.client.get_metric_history(self.run, "time/round_ms")
        self.logged = max((metric.step for metric in history), default=0)
        for row in rows:
            if row["round"] > self.logged:
                self._add(row)

    def _found(self) -> Any:
        """The run that was begun earlier, if the store has it."""
        from mlflow import MlflowException

        try:
            run_id = json.loads((self.directory.path / "mlflow.json").read_bytes())["run_id"]
            found = self.client.get_run(run_id)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            return None
        return found if found.info.lifecycle_stage == "active" else None

    def _experiment(self, name: str) -> str:
        from mlflow import MlflowException

        chosen = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if chosen:
            return chosen
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or name
        found = self.client.get_experiment_by_name(name)
        try:
            return found.experiment_id if found else self.client.create_experiment(name)
        except MlflowException:
            found = self.client.get_experiment_by_name(name)  # another process has made it
            if found is None:
                raise
            return found.experiment_id

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
            for name in (*self.directory.files, "config.toml", "model.safetensors"):
                self.client.log_artifact(self.run, str(self.directory.path / name))
            status = "FINISHED"
        else:
            status = "KILLED" if isinstance(error, Interrupted | KeyboardInterrupt) else "FAILED"
        self.client.set_terminated(self.run, status)


@contextlib.contextmanager
def one_at_a_time():
    """A client makes MLflow's database if there is none. Runs that begin together, as those of a
    comparison, would do so together, and leave one that is broken."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # not every file system has locks, or can be written
            fcntl.flock(stack.enter_context(lock_file("mlflow")), fcntl.LOCK_EX)
        yield


def lock_file(name: str) -> IO:
    """In a folder that is the user's alone: whoever can open a file can hold its lock."""
    folder = own_cache() / "locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    folder.chmod(0o700)
    return open(folder / name, "a")


def metric_name(key: str) -> str:
    """MLflow allows no @ (its own metrics are called recall_at_10) and no path like a//b."""
    name = re.sub(r"[^\w. :/-]", "_", key.replace("@", "_at_"))
    return name if posixpath.normpath(name) == name else name.replace("/", "_")

"""Where a run writes and prints: its folder, its checkpoints and its sinks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mixfl.errors import MixflError
from mixfl.problem import Params
from mixfl.runs.best import back_to_best
from mixfl.runs.checkpoint import Checkpoints
from mixfl.runs.folder import RunFolder
from mixfl.runs.model_file import load_model
from mixfl.runs.reading import read_metrics, read_status
from mixfl.runs.sinks.base import Row, Sink, Sinks, Start
from mixfl.runs.sinks.folder import InFolder
from mixfl.runs.sinks.live import Live
from mixfl.runs.sinks.tensorboard import TensorBoard
from mixfl.runs.sinks.trackers import MakeSink


class Continue(NamedTuple):
    """What to do with the run that a folder holds. If nothing, it is an error that it holds one."""

    resume: bool = False
    restart: bool = False  # from the first round
    from_best: bool = False  # from the best checkpoint
    changed_data: bool = False  # with other data than before

    def check(self) -> None:
        if self.restart and (self.resume or self.from_best):
            raise MixflError("--restart starts over: leave out --resume and --from-best.")


@dataclass(frozen=True)
class Outputs:
    """This one is of a process that writes and prints nothing: any but the first (first.py)."""

    sinks: Sinks = Sinks()
    folder: RunFolder | None = None
    checkpoints: Checkpoints | None = None
    tracker: Sink | None = None

    def finished(self, start: Start, like: Any) -> tuple[list[Row], Params] | None:
        """The rows and the model of a run that had finished before; None if it had not."""
        if self.folder is None or not self.folder.finished:
            return None
        path = self.folder.path
        params = load_model(path / "model.safetensors", like)
        rows = read_metrics(path)
        if read_status(path).get("status") != "finished":  # killed just before it was written
            self.folder.set_status("finished", rows[-1]["round"] if rows else start.rounds)
        self.sinks.note(f"{path} is finished already")
        if self.tracker is not None:  # it may not have been tracked
            self.tracker.begin(start._replace(rows=rows))
            self.tracker.ended(None)
        return rows, params


def open_outputs(
    path: Path | None, config: dict[str, Any], then: Continue, *, report: Sink,
    make_tracker: MakeSink | None, files: Mapping[str, str], copies: Mapping[str, str],
    at_end: Callable[[Callable[[], None]], Any],
) -> Outputs:  # fmt: skip
    """`report`: the terminal. `files`: the problem's own; `copies`: kept for the record. `at_end`
    takes what to call then."""
    if path is None:
        return Outputs(Sinks([report]))
    again = then.resume or then.restart or then.from_best
    folder = RunFolder(path, config, again, files, copies)
    at_end(folder.close)
    if then.restart:
        folder.restart()
    if then.from_best:
        back_to_best(path, report.note)
    tracker = make_tracker(folder, report.note) if make_tracker is not None else None
    sinks = [
        InFolder(folder), Live(path), TensorBoard(path / "tensorboard"), tracker, report,
    ]  # fmt: skip
    checkpoints = Checkpoints(path / "checkpoints", report.note)
    return Outputs(Sinks([s for s in sinks if s is not None]), folder, checkpoints, tracker)

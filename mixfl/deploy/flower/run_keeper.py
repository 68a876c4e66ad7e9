"""Repeats a run with the same run folder until it is finished.

Many things can end a run that are not its fault: its server or superexec is killed, or the
SuperLink is down for longer than Flower waits. The run is then repeated, and continues from its
last checkpoint. A run that fails by itself again and again without a new round (a wrong setting, a
model that diverges) is given up. A full disk does not count as such a failure.

A keeper is a generator: the supervisor advances it between two checks of its processes.
"""

import contextlib
import errno
import json
import os
import tempfile
import time
import tomllib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mixfl.deploy.flower import processes
from mixfl.deploy.flower.flwr_command import FlwrCommand, Waiting
from mixfl.deploy.flower.registration import register_nodes
from mixfl.deploy.flower.supervisor import Keeper, Pause, say
from mixfl.errors import MixflError

GIVEN_UP = 3  # the exit code
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a run is repeated
FULL = (errno.ENOSPC, errno.EDQUOT)
TRIES = 5  # failures of the run itself, in a row and without a new round
ASK_EVERY, ASK_SELDOM = 5.0, 30.0  # seconds between two questions to the SuperLink
LINGER = 15.0  # seconds that the server of a finished run has to exit


def run_folder(project: Path, run_config: str) -> Path:
    """The run folder of the project's run: the key `out`."""
    from flwr.common.config import parse_config_args

    file = project / "pyproject.toml"
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    keys = config.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {})
    try:
        given = parse_config_args([run_config] if run_config else None)
    except Exception as error:  # flwr raises several kinds
        raise MixflError(f"--run-config {run_config}: {error}") from None
    out = given.get("out", keys.get("out"))
    if not isinstance(out, str) or not out:
        raise MixflError(
            f"--run needs a run folder: set out in [tool.flwr.app.config] of {file}, or with "
            "--run-config \"out='runs/mine'\"."
        )
    return project / out


@dataclass
class RunKeeper:
    flwr: FlwrCommand
    out: Path
    run_config: str = ""
    superexec_starts: Callable[[], int] = lambda: 0
    pause: Pause = field(default_factory=lambda: Pause(FIRST_PAUSE, LONGEST_PAUSE))

    def finish(self) -> Keeper:
        """Runs until the run is finished (0) or given up."""
        failures = 0
        while self._status().get("status") != "finished":
            yield from self._stop_earlier()
            self._kill_server()
            yield from self.flwr.until_reachable()
            round_before, starts_before = self._last_round(), self.superexec_starts()
            began = time.time()
            reason, own_fault = yield from self._try()
            if self._status().get("status") == "finished":
                break
            if self._stopped_on_request(began):
                self._kill_server()
                say(f"run: stopped on request; it is at round {self._last_round()}")
                return GIVEN_UP
            if own_fault is None:
                self._kill_server()
                say(f"run: stopped by `flwr stop`; it is at round {self._last_round()}")
                return GIVEN_UP
            if self._last_round() > round_before:
                failures = 0
                self.pause.reset()
            elif own_fault and self.superexec_starts() == starts_before:
                failures += not self._is_full(reason)
            if failures == TRIES:
                say(f"run: given up, {TRIES} failures without a new round. The last: {reason}")
                return GIVEN_UP
            seconds = self.pause.next()
            say(f"run: {reason}; repeating it from round {self._last_round()} in {seconds:g} s")
            yield from self.flwr.sleep(seconds)
        say(f"run: finished, in {self.out}")
        return 0

    def _is_full(self, reason: str) -> bool:
        """Whether the disk is full, by the run's message or by writing to it."""
        if any(os.strerror(number) in reason for number in FULL):
            return True
        folder = self.out if self.out.is_dir() else self.flwr.project
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 16))
        except OSError as error:
            return error.errno in FULL
        return False

    def _try(self) -> Generator[None, None, tuple[str, bool | None]]:
        """Makes one Flower run. Returns how it ended, and whether that was its own fault (None:
        the user stopped it)."""
        began = time.time()
        arguments = ["run", ".", "--format", "json"]
        arguments += ["--run-config", self.run_config] if self.run_config else []
        answer = yield from self.flwr.ask(*arguments)
        number = answer.json().get("run-id")
        if not answer.done or number is None:
            return f"can't be started: {answer.reason()}", self.flwr.is_reachable()
        self._note(number)
        say(f"run: {number} is started")
        yield from self._until_server_ends(str(number))
        listed = yield from self._listed(str(number))
        status = listed.get("status", "unknown")
        if status.startswith("finished"):
            self._note(None)
        if status == "finished:stopped":
            return "stopped", None
        if status == "finished:failed":
            return self._message(began) or listed.get("status-details") or "failed", True
        if status == "finished:completed":  # although its folder says otherwise
            return f"it ended, but {self.out} is not finished", True
        return "its server has ended", False

    def _until_server_ends(self, number: str) -> Waiting:
        """Waits for the end of a run's server: by its process, and by what the SuperLink says."""
        serving, seen, over, missed = processes.serving(self.out), False, 0.0, 0
        asked = time.monotonic()
        while True:
            yield from self.flwr.sleep(0.5)
            if processes.running(serving):
                seen = True
            elif seen:
                return
            if time.monotonic() - asked < (ASK_SELDOM if seen else ASK_EVERY):
                continue
            status = (yield from self._listed(number)).get("status", "")
            asked = time.monotonic()
            if status.startswith("finished"):
                if not seen or (over and asked - over > LINGER):
                    self._kill_server()
                    return
                over = over or asked
            elif status in ("starting", "running") and not self._any_server():
                missed += 1
                if missed == 2:  # killed before it locked its folder; Flower needs a minute
                    return
            else:
                missed = 0

    def _any_server(self) -> bool:
        ours = processes.marked(f"{self.flwr.project}/superexec")
        return processes.running(lambda process: processes.is_server(process) and ours(process))

    def _listed(self, number: str) -> Generator[None, None, dict[str, Any]]:
        """What the SuperLink says about a run; nothing while it is down."""
        if not self.flwr.is_reachable():
            return {}
        answer = yield from self.flwr.ask("list", "--run-id", number, "--format", "json")
        runs = answer.json().get("runs") or [{}]
        return runs[0] if answer.done else {}

    @property
    def _note_file(self) -> Path:
        return self.flwr.project / "state/run.json"

    def _stop_earlier(self) -> Waiting:
        """Tells the SuperLink that our earlier run is over. Otherwise nodes would work for it."""
        try:
            number = json.loads(self._note_file.read_text())["run-id"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        yield from self.flwr.until_reachable()
        yield from self.flwr.ask("stop", str(number))
        self._note(None)

    def _note(self, number: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk: the run is then not stopped, no more
            if number is None:
                self._note_file.unlink(missing_ok=True)
            else:
                self._note_file.write_text(json.dumps({"run-id": number}) + "\n")

    def _kill_server(self) -> None:
        """An orphan would keep the run folder locked, and may ignore SIGTERM."""
        if processes.kill(processes.serving(self.out)):
            say(f"run: a leftover server that held {self.out} was killed")

    def _last_round(self) -> int:
        """The round of the newest checkpoint."""
        checkpoints = self.out / "checkpoints"
        names = [p.name for p in checkpoints.iterdir()] if checkpoints.is_dir() else []
        return max([int(name) for name in names if name.isdecimal()], default=0)

    def _status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            status = json.loads((self.out / "status.json").read_bytes())
            return status if isinstance(status, dict) else {}
        return {}

    def _since(self, since: float) -> dict[str, Any]:
        """The run's status, if it was written after `since`."""
        with contextlib.suppress(OSError):
            if (self.out / "status.json").stat().st_mtime >= since:
                return self._status()
        return {}

    def _message(self, since: float) -> str:
        return self._since(since).get("message", "")

    def _stopped_on_request(self, since: float) -> bool:
        """By the file `stop` in its folder. A run that a signal stopped is repeated."""
        status = self._since(since)
        return status.get("status") == "interrupted" and bool(status.get("stopped"))


def keep_server(flwr: FlwrCommand, run: RunKeeper | None, keep: bool) -> Keeper:
    """The server's part: registers the nodes and, if there is a run, finishes it. With `keep`, or
    without a run, it continues until the supervisor is stopped."""
    yield from register_nodes(flwr)
    code = (yield from run.finish()) if run is not None else 0
    while code == 0 and (keep or run is None):
        yield
    return code

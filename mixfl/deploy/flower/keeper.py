"""Registers the nodes, and repeats a run with the same folder until it is finished.

A run ends for many reasons that are not its own: its server is killed, superexec is, the SuperLink
was away for longer than Flower waits. Repeated, it goes on from its last checkpoint. One that ends
by itself again and again without a new round (a wrong setting, a model that diverges) is given up;
not so where the disk is full.

A `Keeper` is a generator: the supervisor goes on with it between two looks at its processes.
"""

import contextlib
import errno
import hashlib
import json
import os
import socket
import tempfile
import time
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mixfl.deploy.flower import processes
from mixfl.deploy.flower.supervisor import Keeper, Pause, say, start
from mixfl.errors import MixflError

FLWR = ("sh", "-c", '. ./env.sh && exec flwr "$@"', "flwr")
GIVEN_UP = 3  # the exit code
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a run is repeated
NOTED = "state/registered"  # lines with a node's id in Flower and its key's digest
REFUSED = 3  # times that a key may be refused
FULL = (errno.ENOSPC, errno.EDQUOT)
TRIES = 5  # failures of its own, without a new round between them
HUNG = 120.0  # seconds after which a command of Flower's is ended
ASK_EVERY, ASK_SELDOM = 5.0, 30.0  # seconds between two questions to the SuperLink
LINGER = 15.0  # seconds in which the server of a run that is over may end

Waiting = Generator[None, None, None]


class Told(NamedTuple):
    done: bool
    text: str

    def json(self) -> dict[str, Any]:
        """Flower prints notes before it."""
        with contextlib.suppress(ValueError):
            found = json.loads(self.text[self.text.index("{") :])
            return found if isinstance(found, dict) else {}
        return {}

    @property
    def succeeded(self) -> bool:
        """Flower may say that it has failed and end with code 0."""
        return self.done and self.json().get("success") is not False

    def reason(self) -> str:
        message = self.json().get("error-message")
        lines = [line.strip() for line in str(message or self.text).splitlines() if line.strip()]
        return " ".join(lines[-3:]) or "no reason given"


def run_folder(project: Path, run_config: str) -> Path:
    """Where a run of the project is kept: the key `out`."""
    from flwr.common.config import parse_config_args

    file = project / "pyproject.toml"
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    keys = config.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {})
    try:
        given = parse_config_args([run_config] if run_config else None)
    except Exception as error:  # of flwr's own kinds
        raise MixflError(f"--run-config {run_config}: {error}") from None
    out = given.get("out", keys.get("out"))
    if not isinstance(out, str) or not out:
        raise MixflError(
            f"a run that is kept up needs its folder: set out in [tool.flwr.app.config] of {file}, "
            "or by --run-config \"out='runs/mine'\"."
        )
    return project / out


@dataclass
class RunKeeper:
    project: Path
    address: str  # of the SuperLink
    out: Path | None = None  # the run's folder; None: there is no run to keep
    run_config: str = ""
    keep: bool = False  # go on serving after the run
    restarts: Callable[[], int] = lambda: 0  # of superexec
    flwr: Sequence[str] = FLWR
    environment: Mapping[str, str] = field(default_factory=dict)
    pause: Pause = field(default_factory=lambda: Pause(FIRST_PAUSE, LONGEST_PAUSE))
    sleep: Callable[[float], Waiting] = lambda seconds: waiting(seconds)

    def kept(self) -> Keeper:
        yield from self._registered()
        code = (yield from self._finished()) if self.out is not None else 0
        while code == 0 and (self.keep or self.out is None):
            yield
        return code

    # The nodes' keys

    def _registered(self) -> Waiting:
        known = yield from self._known()
        for key in sorted(self.project.glob("keys/node-*.pub")):
            try:
                digest = hashlib.sha256(key.read_bytes()).hexdigest()
            except OSError as error:
                say(f"{key.stem}: its key can't be read: {error.strerror}; going on without it")
                continue
            if digest not in known:
                yield from self._register(key, digest)

    def _known(self) -> Generator[None, None, set[str]]:
        """The digests of the keys that were registered, where the SuperLink still has their nodes:
        another database knows nobody."""
        try:
            lines = (self.project / NOTED).read_text(errors="replace").splitlines()
        except OSError:
            return set()
        yield from self._reachable()
        told = yield from self._ask("supernode", "list", "--format", "json")
        listed = {str(node.get("node-id")) for node in told.json().get("nodes") or []}
        noted = [line.partition(" ") for line in lines]
        return {digest for number, _, digest in noted if number in listed}

    def _register(self, key: Path, digest: str) -> Waiting:
        pause, refused = Pause(), 0
        while refused < REFUSED:
            yield from self._reachable()
            told = yield from self._ask("supernode", "register", str(key), "--format", "json")
            if told.succeeded or "already in use" in told.text:
                say(f"{key.stem}: its key is registered")
                number = told.json().get("node-id")
                if number is not None:
                    with contextlib.suppress(OSError), open(self.project / NOTED, "a") as file:
                        file.write(f"{number} {digest}\n")
                return
            refused += self._is_reachable()
            say(f"{key.stem}: its key can't be registered: {told.reason()}")
            yield from self.sleep(pause.next())
        say(f"{key.stem}: going on without it; mend {key} and start again")

    # The run

    def _finished(self) -> Keeper:
        assert self.out is not None
        failures, superexec = 0, self.restarts()
        while self._status().get("status") != "finished":
            yield from self._stopped()
            self._end_server()
            yield from self._reachable()
            before, superexec = self._rounds(), self.restarts()
            reason, own = yield from self._tried()
            if self._status().get("status") == "finished":
                break
            if own is None:
                self._end_server()
                say(f"run: stopped by `flwr stop`; it is at round {self._rounds()}")
                return GIVEN_UP
            if self._rounds() > before:
                failures = 0
                self.pause.reset()
            elif own and self.restarts() == superexec and not self._is_full(reason):
                failures += 1
            if failures == TRIES:
                say(f"run: given up, {TRIES} failures without a new round. The last: {reason}")
                return GIVEN_UP
            seconds = self.pause.next()
            say(f"run: {reason}; repeated from round {self._rounds()} in {seconds:g} s")
            yield from self.sleep(seconds)
        say(f"run: finished, in {self.out}")
        return 0

    def _is_full(self, reason: str) -> bool:
        """The disk, as the run said or as it is: that is not the run's fault, and passes."""
        if any(os.strerror(number) in reason for number in FULL):
            return True
        folder = self.out if self.out is not None and self.out.is_dir() else self.project
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 16))
        except OSError as error:
            return error.errno in FULL
        return False

    def _tried(self) -> Generator[None, None, tuple[str, bool | None]]:
        """One run of Flower's: how it ended, and whether by itself; None: by the user's wish."""
        began = time.time()
        arguments = ["run", ".", "--format", "json"]
        arguments += ["--run-config", self.run_config] if self.run_config else []
        told = yield from self._ask(*arguments)
        number = told.json().get("run-id")
        if not told.done or number is None:
            return f"can't be started: {told.reason()}", self._is_reachable()
        self._note(number)
        say(f"run: {number} is started")
        yield from self._served(str(number))
        found = yield from self._found(str(number))
        status = found.get("status", "unknown")
        if status.startswith("finished"):
            self._note(None)
        if status == "finished:stopped":
            return "stopped", None
        if status == "finished:failed":
            return self._message(began) or found.get("status-details") or "failed", True
        if status == "finished:completed":  # and yet its folder does not say so
            return f"it is over, and {self.out} is not finished", True
        return "its server has ended", False

    def _served(self, number: str) -> Waiting:
        """Waits for the end of a run's server, by what the machine says and what Flower does."""
        assert self.out is not None
        held, served, over, missed = processes.serving(self.out), False, 0.0, 0
        asked = time.monotonic()
        while True:
            yield from self.sleep(0.5)
            if processes.running(held):
                served = True
            elif served:
                return
            if time.monotonic() - asked < (ASK_SELDOM if served else ASK_EVERY):
                continue
            status = (yield from self._found(number)).get("status", "")
            asked = time.monotonic()
            if status.startswith("finished"):
                if not served or (over and asked - over > LINGER):
                    self._end_server()
                    return
                over = over or asked
            elif status in ("starting", "running") and not self._any_server():
                missed += 1
                if missed == 2:  # it was killed before it had its folder; Flower needs a minute
                    return
            else:
                missed = 0

    def _any_server(self) -> bool:
        ours = processes.marked(f"{self.project}/superexec")
        return processes.running(lambda process: processes.is_server(process) and ours(process))

    def _found(self, number: str) -> Generator[None, None, dict[str, Any]]:
        """What the SuperLink says about a run; nothing while it is away."""
        if not self._is_reachable():
            return {}
        told = yield from self._ask("list", "--run-id", number, "--format", "json")
        runs = told.json().get("runs") or [{}]
        return runs[0] if told.done else {}

    def _stopped(self) -> Waiting:
        """Tells the SuperLink that an earlier run of ours is over, or nodes would work for it."""
        note = self.project / "state/run.json"
        try:
            number = json.loads(note.read_text())["run-id"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        yield from self._reachable()
        yield from self._ask("stop", str(number))
        self._note(None)

    def _note(self, number: Any) -> None:
        note = self.project / "state/run.json"
        with contextlib.suppress(OSError):  # a full disk; all that is lost is the telling
            if number is None:
                note.unlink(missing_ok=True)
            else:
                note.write_text(json.dumps({"run-id": number}) + "\n")

    def _end_server(self) -> None:
        """An orphan would keep the folder's lock, and may not listen to SIGTERM."""
        assert self.out is not None
        if processes.kill(processes.serving(self.out)):
            say(f"run: a server that was left with {self.out} is ended")

    def _rounds(self) -> int:
        """The newest round that is kept."""
        assert self.out is not None
        kept = self.out / "checkpoints"
        names = [p.name for p in kept.iterdir()] if kept.is_dir() else []
        return max([int(name) for name in names if name.isdecimal()], default=0)

    def _status(self) -> dict[str, Any]:
        assert self.out is not None
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.out / "status.json").read_bytes())
            return found if isinstance(found, dict) else {}
        return {}

    def _message(self, since: float) -> str:
        """The run's own words, if they are of this time."""
        assert self.out is not None
        with contextlib.suppress(OSError):
            if (self.out / "status.json").stat().st_mtime >= since:
                return self._status().get("message", "")
        return ""

    # Flower's command line

    def _is_reachable(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except (OSError, ValueError):
            return False
        return True

    def _reachable(self) -> Waiting:
        while not self._is_reachable():
            yield from self.sleep(0.5)

    def _ask(self, *arguments: str) -> Generator[None, None, Told]:
        mark, end = f"{self.project}/flwr", time.monotonic() + HUNG
        try:
            with tempfile.TemporaryFile() as output:
                command = [*self.flwr, *arguments]
                process = start(command, self.project, mark, self.environment, output)
                try:
                    while process.poll() is None and time.monotonic() < end:
                        yield
                finally:
                    if process.poll() is None:
                        process.kill()
                        process.wait()
                output.seek(0)
                text = output.read().decode(errors="replace")
        except OSError as error:
            return Told(False, f"flwr can't be asked: {error.strerror or error}")
        return Told(process.returncode == 0, text)


def waiting(seconds: float) -> Waiting:
    end = time.monotonic() + seconds
    yield
    while time.monotonic() < end:
        yield

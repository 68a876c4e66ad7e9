"""Flower's command line, `flwr`, called without blocking.

Calls are generators: the supervisor advances them between two checks of its processes.
"""

import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mixfl.deploy.flower.supervisor import start

FLWR = ("sh", "-c", '. ./env.sh && exec flwr "$@"', "flwr")
HUNG = 120.0  # seconds after which a command is killed

Waiting = Generator[None, None, None]


class Answer(NamedTuple):
    """What a command printed."""

    done: bool  # it ended with code 0
    text: str

    def json(self) -> dict[str, Any]:
        """The JSON object in the output. Flower prints notes before it."""
        with contextlib.suppress(ValueError):
            content = json.loads(self.text[self.text.index("{") :])
            return content if isinstance(content, dict) else {}
        return {}

    @property
    def succeeded(self) -> bool:
        """Flower may report a failure in JSON and still end with code 0."""
        return self.done and self.json().get("success") is not False

    def reason(self) -> str:
        message = self.json().get("error-message")
        lines = [line.strip() for line in str(message or self.text).splitlines() if line.strip()]
        return " ".join(lines[-3:]) or "no reason given"


def wait(seconds: float) -> Waiting:
    end = time.monotonic() + seconds
    yield
    while time.monotonic() < end:
        yield


@dataclass
class FlwrCommand:
    project: Path
    address: str  # of the SuperLink
    command: Sequence[str] = FLWR
    environment: Mapping[str, str] = field(default_factory=dict)
    sleep: Callable[[float], Waiting] = wait

    def is_reachable(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except (OSError, ValueError):
            return False
        return True

    def until_reachable(self) -> Waiting:
        while not self.is_reachable():
            yield from self.sleep(0.5)

    def ask(self, *arguments: str) -> Generator[None, None, Answer]:
        mark, end = f"{self.project}/flwr", time.monotonic() + HUNG
        try:
            with tempfile.TemporaryFile() as output:
                command = [*self.command, *arguments]
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
            return Answer(False, f"flwr can't be run: {error.strerror or error}")
        return Answer(process.returncode == 0, text)

"""Messages between a command and its workers on other machines, as files in the folder of results.

A mailbox is a folder of its own for each worker. Both files have lines of JSON, and each is written
by one side:

    requests.jsonl   from the command: runs to make, answers to evaluations, interrupt, close
    answers.jsonl    from the worker: ready, rounds done, notes, evaluations, how a run ended
    ../alive         a number that the command changes every few seconds
"""

import json
from pathlib import Path
from typing import Any

WORKERS = ".workers"  # in the folder of results
REQUESTS, ANSWERS, ALIVE = "requests.jsonl", "answers.jsonl", "alive"
LOOK_SECONDS = 0.1  # between two looks into a mailbox


class Lines:
    """A file of messages, written at one end and read at the other."""

    def __init__(self, path: Path):
        self.path, self.at = path, 0

    def write(self, **message: Any) -> None:
        with open(self.path, "ab") as file:
            file.write((json.dumps(message) + "\n").encode())

    def read(self) -> list[dict[str, Any]]:
        """Those that came since the last look. The file is opened again each time: only then do
        network file systems show what another machine wrote."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.at)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]  # a line may be half-written
        self.at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

"""A worker on another machine, started there by Ray or Slurm; the command's end is remote.py.

It has a process that makes the runs (worker.py), as a local command has, and passes messages on
between that process and its mailbox. If the command falls silent, the run under way is saved and
the worker ends.
"""

import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

from mixfl.studies.mailbox import ALIVE, ANSWERS, LOOK_SECONDS, REQUESTS, Lines
from mixfl.studies.trials import Trial
from mixfl.studies.worker_process import Worker

SILENT_SECONDS = 120.0  # after which the command is taken for dead


def serve(
    mailbox: str, folder: str, devices: int, hung: float, silent: float = SILENT_SECONDS
) -> None:
    """Makes the runs that the mailbox asks for, until it says close. `folder`: the command's
    working directory, to which paths are relative."""
    box = Path(mailbox)
    answers, requests = Lines(box / ANSWERS), Lines(box / REQUESTS)
    if not os.path.isdir(folder):
        where = socket.gethostname()
        answers.write(error=f"{where} does not see the folder {folder}: it must be shared.")
        return
    os.chdir(folder)
    worker = Worker(None, devices, hung)
    asked: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
    watching = threading.Thread(
        target=watch, args=(requests, box.parent / ALIVE, worker, asked, silent), daemon=True
    )
    watching.start()

    def judge(row: dict[str, Any]) -> str:
        answers.write(row=row)
        reply = asked.get()
        return reply.get("stop", "") if reply is not None else ""

    answers.write(ready=socket.gethostname())
    try:
        while (request := asked.get()) is not None:
            if "run" not in request:
                continue
            ended = worker.run(
                Trial(**request["run"]), Path(request["out"]),
                lambda round: answers.write(round=round),
                lambda message, once: answers.write(note=message, once=once),
                judge if request["judged"] else None,
            )  # fmt: skip
            if "died" in ended:
                worker.replace()
            answers.write(**ended)
    finally:
        worker.close()


def watch(requests: Lines, alive: Path, worker: Worker, asked: Any, silent: float) -> None:
    """Hands on what the command sends; None is the end."""
    pulse, changed = b"", time.monotonic()
    while True:
        for request in requests.read():
            if "interrupt" in request or "close" in request:
                worker.interrupt()
            if "close" in request:
                end(asked)
                return
            if "interrupt" not in request:
                asked.put(request)
        try:
            now = alive.read_bytes()
        except OSError:
            now = pulse
        if now != pulse:
            pulse, changed = now, time.monotonic()
        if time.monotonic() - changed > silent:
            worker.interrupt()
            end(asked)
            return
        time.sleep(LOOK_SECONDS)


def end(asked: Any) -> None:
    asked.put(None)  # a run may be waiting for an answer
    asked.put(None)

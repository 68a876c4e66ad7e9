"""A process that makes runs, as its parent sees it; the other end is worker.py."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

HUNG_SECONDS = 1800.0  # without any progress


class Worker:
    """Requests and answers are lines of JSON."""

    def __init__(self, core: int | None, one_device: bool, hung: float = HUNG_SECONDS):
        self.one_device, self.hung = one_device, hung
        self.command = [sys.executable, "-m", "mixfl.studies.worker", str(os.getpid())]
        if core is not None:
            self.command.append(str(core))
        self._start()

    def _start(self) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            start_new_session=True,  # Ctrl-C reaches it through its parent only
        )  # fmt: skip
        self.answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=listen, args=(self.process, self.answers), daemon=True).start()

    def replace(self) -> None:
        self.close()
        self._start()

    def run(
        self, trial: Any, out: Path, tell: Callable[[int], None], note: Callable[[str, bool], None]
    ) -> dict[str, Any]:
        """How it ended. `died` says why, if the process ended first. `note` takes a message, and
        whether it is the same for all trials."""
        keys = {**trial.keys, **({"devices": 1} if self.one_device else {})}
        with contextlib.suppress(BrokenPipeError):
            request = json.dumps({**asdict(trial), "out": str(out), "keys": keys}) + "\n"
            self.process.stdin.write(request)  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        while True:
            try:
                line = self.answers.get(timeout=self.hung or None)
            except queue.Empty:
                return {"died": f"it made no progress for {self.hung:g} s (--hung)"}
            if line is None:
                return {"died": self._died(self.process.wait())}
            answer = json.loads(line)
            if "round" in answer:
                tell(answer["round"])
            elif "note" in answer:
                note(answer["note"], answer.get("once", False))
            else:
                return answer

    def _died(self, code: int) -> str:
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-3:]
        reason = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
        hint = ", as the system does when memory is short" if code == -signal.SIGKILL else ""
        return f"its process was {reason}{hint}. {' '.join(last)}".strip()

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Call it when there is nothing left to do or to save."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.log):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def listen(process: subprocess.Popen, answers: "queue.SimpleQueue[str | None]") -> None:
    """Collects its answers; a None is the end of the process."""
    with process.stdout as lines:  # type: ignore[union-attr]
        for line in lines:
            answers.put(line)
    answers.put(None)

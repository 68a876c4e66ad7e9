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
    """Requests and answers are lines of JSON. `devices` of each run; None: as many as it likes."""

    def __init__(self, core: int | None, devices: int | None, hung: float = HUNG_SECONDS):
        self.devices, self.hung = devices, hung
        self.command = [sys.executable, "-m", "mixfl.studies.worker", str(os.getpid())]
        if core is not None:
            self.command.append(str(core))
        self._start()

    def _start(self) -> None:
        self.closed = False
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

    def ready(self, out: Path, wanted: Callable[[], bool]) -> bool:
        """Whether it is wanted. If it was closed, it starts again."""
        if wanted() and self.closed:
            self._start()
        return wanted()

    def run(
        self, trial: Any, out: Path, tell: Callable[[int], None],
        note: Callable[[str, bool], None], judge: Callable[[dict], str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """How it ended. `died` says why, if the process ended first. `note` takes a message, and
        whether it is the same for all trials. `judge` is asked after each evaluation why the run is
        to stop now; "" if it is not."""
        keys = {**trial.keys, **({"devices": self.devices} if self.devices else {})}
        self._send({**asdict(trial), "out": str(out), "keys": keys, "judged": judge is not None})
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
            elif "row" in answer:
                assert judge is not None
                self._send({"stop": judge(answer["row"])})
            else:
                return answer

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # `run` finds out why
            self.process.stdin.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def _died(self, code: int) -> str:
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-3:]
        reason = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
        hint = ", as the system does when memory is short" if code == -signal.SIGKILL else ""
        return f"its process was {reason}{hint}. {' '.join(last)}".strip()

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """Call it when there is nothing left to do or to save."""
        self.closed = True
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

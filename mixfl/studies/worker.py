"""A process that makes one run after the other for trials.py.

    python -m mixfl.studies.worker PARENT [CORE]

It reads each run to make as a line of JSON from stdin, and writes lines of JSON to stdout: rounds
done, notes, and how the run ended. If the run is `judged`, each evaluation is written too, and the
run goes on when the answer has come. It ends when its input or its parent does.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

TELL_SECONDS = 0.5  # between two messages about rounds


def main() -> None:
    parent = int(sys.argv[1])
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, {int(sys.argv[2])})
    # What Ray starts has Ctrl-C blocked; here it is how a run is asked to save and stop.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # A run has its own handler, which saves; between runs there is nothing to save.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    threading.Thread(target=watch, args=(parent,), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # anything else that is printed goes to the log

    def answer(**said) -> None:
        print(json.dumps(said), file=answers, flush=True)

    from mixfl.process import prepare_process

    prepare_process()
    import mixfl.runs.training  # noqa: F401 (takes a second or two)

    problems: dict = {}
    for line in sys.stdin:
        given = json.loads(line)
        devices = given["keys"].get("devices", "auto")
        prepare_process(devices if isinstance(devices, int) else "auto")  # until the first run
        answer(**make(given, problems, answer))


def watch(parent: int) -> None:
    """Ends this process with its parent: no one needs its runs. The last checkpoint is on disk."""
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


def make(given: dict, problems: dict, answer) -> dict:
    from mixfl.errors import Diverged, Interrupted, MixflError
    from mixfl.runs.folder import Busy
    from mixfl.runs.plan import plan
    from mixfl.runs.sinks.base import Sink
    from mixfl.runs.training import run

    class Telling(Sink):
        said = 0.0

        def begin(self, start):
            for message in start.notes:
                answer(note=message, once=True)

        def within(self, progress):
            self.advance(progress.round)

        def advance(self, round):
            if time.monotonic() - self.said > TELL_SECONDS:
                self.said = time.monotonic()
                answer(round=round)

        def note(self, message):
            answer(note=message)

    def judged(event):
        answer(row=event.metrics)
        reason = json.loads(sys.stdin.readline())["stop"]
        if reason:
            event.stop(reason)

    if len(problems) > 1:  # their data is in memory
        problems.pop(next(iter(problems)))
    try:
        planned = plan(
            given["task"], given["algorithm"], preset=given["preset"], data=given["data"],
            given=given["keys"], problems=problems,
        )  # fmt: skip
        folder = Path(given["out"]) / given["folder"]
        run(
            planned, folder, True, Telling(), given["label"], given["track"],
            callbacks=[judged] if given["judged"] else [],
        )  # fmt: skip
    except Diverged as error:
        return {"diverged": error.round}
    except Interrupted as error:
        return {"error": str(error), "on_request": error.on_request}
    except Busy:
        return {"busy": True}
    except Exception as error:
        if out_of_memory(error):
            return {"died": f"out of memory: {error}"}
        if isinstance(error, MixflError):
            return {"error": str(error)}
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"finished": True}


def out_of_memory(error: BaseException | None) -> bool:
    """Is that the error, or its cause? XLA raises a RuntimeError."""
    if error is None or isinstance(error, MemoryError):
        return error is not None
    full = isinstance(error, RuntimeError) and "Out of memory" in str(error)
    return full or out_of_memory(error.__context__)


if __name__ == "__main__":
    main()

"""A process that makes one run after the other, as trials.py tells it.

    python -m mixfl.studies.worker PARENT [CORE]

Reads a run to make as a line of JSON from stdin, writes lines of JSON to stdout: rounds done,
notes, and how it ended. It ends with its input, and with its parent.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

TELL_SECONDS = 0.5  # between two words about rounds


def main() -> None:
    parent = int(sys.argv[1])
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, {int(sys.argv[2])})
    # Within a run it saves; otherwise there is nothing to save.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    threading.Thread(target=watch, args=(parent,), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed goes to the log

    def answer(**said) -> None:
        print(json.dumps(said), file=answers, flush=True)

    import mixfl.runs.training  # noqa: F401 (takes a second or two, with JAX)
    from mixfl.cli import start_jax

    problems: dict = {}
    for line in sys.stdin:
        given = json.loads(line)
        start_jax(given["keys"])
        answer(**make(given, problems, answer))


def watch(parent: int) -> None:
    """Nobody is left to make runs for: the state of the last checkpoint is on the disk."""
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


def make(given: dict, problems: dict, answer) -> dict:
    from mixfl.errors import Diverged, Interrupted, MixflError
    from mixfl.runs.folder import Busy
    from mixfl.runs.plan import plan
    from mixfl.runs.sinks.terminal import Quiet
    from mixfl.runs.training import run

    class Telling(Quiet):
        said = 0.0

        def within(self, round, part, words):
            self.advance(round)

        def advance(self, done):
            if time.monotonic() - self.said > TELL_SECONDS:
                self.said = time.monotonic()
                answer(round=done)

        def note(self, message):
            answer(note=message)

    if len(problems) > 1:  # their data is in memory
        problems.pop(next(iter(problems)))
    try:
        planned = plan(
            given["task"], given["algorithm"], preset=given["preset"], data=given["data"],
            given=given["keys"], problems=problems,
        )  # fmt: skip
        folder = Path(given["out"]) / given["folder"]
        run(planned, folder, True, Telling(), given["label"], given["track"])
    except Diverged as error:
        return {"diverged": error.round}
    except Interrupted as error:
        return {"error": str(error)}
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
    """It, or what it came of. XLA says it by a RuntimeError."""
    if error is None or isinstance(error, MemoryError):
        return error is not None
    full = isinstance(error, RuntimeError) and "Out of memory" in str(error)
    return full or out_of_memory(error.__context__)


if __name__ == "__main__":
    main()

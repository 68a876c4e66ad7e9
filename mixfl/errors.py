"""Errors that users can fix. The command line shows them without a traceback."""

import difflib
from collections.abc import Iterable
from typing import Any


class MixflError(Exception):
    """The user's input, or the state of the machine, makes the work impossible.

    >>> mixfl.Settings(rounds=0)
    Traceback (most recent call last):
    mixfl.errors.MixflError: rounds = 0: expected a whole number of at least 1 (rounds of ...
    """

    exit_code = 2
    everywhere = False  # every process of the run raises it


class Diverged(MixflError):
    """Training produced non-finite numbers. The run folder keeps the last good state.

    >>> try:
    ...     mixfl.train(problem, "fedavg", rounds=1, client_lr=1e38, clip="off")
    ... except mixfl.Diverged as error:
    ...     error.round
    1
    """

    exit_code = 3
    everywhere = True

    def __init__(self, message: str, round: int):
        super().__init__(message)
        self.round = round


class Interrupted(MixflError):
    """Ctrl-C or SIGTERM: what a run folder has is saved, and the message says how to continue.

    `result` has the model and the metrics so far (a `mixfl.Result`), with and without a run folder.

    >>> try:
    ...     result = mixfl.train(problem, "fedavg", rounds=1)
    ... except mixfl.Interrupted as stopped:
    ...     result = stopped.result
    """

    exit_code = 130
    everywhere = True
    result: Any = None
    on_request = False  # by a file in the run folder, not by a signal

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback."""
        return [f"Interrupted: {self} Here: `import sys; result = sys.last_value.result`."]


MANY = 20  # names that an error lists


def unknown(kind: str, given: object, valid: Iterable[str], all_of: str = "") -> MixflError:
    """`unknown task 'simle'. Did you mean 'smile'?` and the list of all valid names. If they are
    many, `all_of` says in its place where they are listed."""
    names = sorted(valid)
    many = len(names) > MANY and all_of != ""
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    listed = f"{all_of} lists all." if many else f"Valid: {', '.join(names)}."
    return MixflError(f"unknown {kind} '{given}'.{hint} {listed}")

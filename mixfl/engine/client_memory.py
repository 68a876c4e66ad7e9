"""The clients' states (client_states.py) around the rounds of the simulator: read for a cohort when
its round starts, written when it is done. Does nothing for algorithms without client state.
"""

import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.algorithms.contract import Algorithm
from mixfl.engine.client_states import ClientStates
from mixfl.engine.feeding import Piece
from mixfl.engine.first_states import first_state
from mixfl.errors import MixflError
from mixfl.problem import Problem
from mixfl.settings import Settings


class ClientMemory:
    def __init__(self, problem: Problem, algorithm: Algorithm, s: Settings):
        self.first = first_state(problem, algorithm)
        self.populations = len(problem.populations)
        self.states: ClientStates | None = None
        self.kept = False  # in a run folder
        if self.first is not None:
            check_allowed(s)

    def keep(self, folder: Path, round: int) -> None:
        """In a folder from now on, and as they were after `round`."""
        if self.first is None:
            return
        if self.states is not None:
            self.states.close()
        self.states = ClientStates(folder, [self.first] * self.populations)
        self.states.restore(round)
        self.kept = True

    def begin(self, start: int) -> None:
        """Before round `start`. Without a run folder, the states are in a temporary one."""
        if self.first is None or self.kept:
            return
        if start:
            if self.states is None:
                raise MixflError(f"rounds from {start} on need the clients' states: call keep.")
            return
        self.temporary = tempfile.TemporaryDirectory(prefix="mixfl-clients-")
        self.states = ClientStates(Path(self.temporary.name), [self.first] * self.populations)

    def fed(self, piece: Piece) -> Piece:
        """With the states of its clients."""
        if self.first is None or not piece.who:
            return piece
        assert self.states is not None
        clients = tuple(
            tuple(
                feed._replace(state=self.states.read(j, who))
                for feed, who in zip(feeds, sizes, strict=True)
            )
            for j, (feeds, sizes) in enumerate(zip(piece.clients, piece.who, strict=True))
        )
        return piece._replace(clients=clients)

    def take(self, round: int, piece: Piece, new: Any) -> None:
        """Writes the states after a round. `new` has, per population and size, the states
        [clients, ...] and who has changed."""
        if self.first is None or not piece.who:
            return
        assert self.states is not None
        for j, (sizes, after) in enumerate(zip(piece.who, jax.device_get(new), strict=True)):
            for who, (states, changed) in zip(sizes, after, strict=True):
                self.states.write(round, j, np.asarray(who), states, changed)

    def flush(self) -> None:
        if self.states is not None:
            self.states.flush()

    def saved(self, round: int, kept: Collection[int]) -> None:
        if self.states is not None:
            self.states.saved(round, kept)


def check_allowed(s: Settings) -> None:
    if jax.process_count() > 1:
        raise MixflError("an algorithm with client state trains in one process.")
    if s.aggregation != "mean":
        raise MixflError(
            f"aggregation = {s.aggregation} does not go with client state: clients that it leaves "
            "out would keep states of their own. Use aggregation = mean."
        )
    if getattr(s, "private", False):
        raise MixflError(
            "differential privacy does not go with client state: what a client has kept from "
            "earlier rounds is in all that it sends, so that no single round bounds its part."
        )

"""What clients keep between rounds, for algorithms that need it (`Algorithm.client_state`).

One file per population has a row for each client: the round in which it was last written, and its
arrays. A row that was never written is a hole in the file, and stands for the first state. So
neither memory nor disk grow with the population, but only the disk with the clients that took part.

A run may go back to any checkpoint that it has kept. So before a row is overwritten for the first
time since a checkpoint, the old row is appended to that checkpoint's journal:

    rows-J           the states of population J
    old-J-ROUND      rows of population J as they were at the checkpoint of ROUND (0: at the start)
    last             the last round that wrote anything

To go back to a checkpoint, the old rows of all journals since then are put back, newest first. That
may be repeated, and a process may be killed at any moment: a row is only overwritten when its old
content is in the journal.
"""

import os
import struct
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.errors import MixflError

HEAD = struct.Struct("<q")  # the round, or a client's number


class Rows:
    """The states of one population."""

    def __init__(self, folder: Path, population: int, first: Any):
        self.folder, self.population = folder, population
        leaves, self.tree = jax.tree.flatten(first)
        self.first = [np.asarray(a) for a in leaves]
        self.size = HEAD.size + sum(a.nbytes for a in self.first)
        self.file = os.open(folder / f"rows-{population}", os.O_RDWR | os.O_CREAT, 0o644)

    def close(self) -> None:
        os.close(self.file)

    def row(self, client: int) -> bytes:
        """Empty, or all zeros, if it was never written."""
        return os.pread(self.file, self.size, client * self.size).ljust(self.size, b"\0")

    def put(self, client: int, row: bytes) -> None:
        os.pwrite(self.file, row, client * self.size)

    def read(self, clients: Sequence[int]) -> Any:
        """Their states, [clients, ...]. -1 is no client: it has the first state."""
        every = [np.repeat(a[None], len(clients), axis=0) for a in self.first]
        for i, client in enumerate(clients):
            row = self.row(client) if client >= 0 else b"\0" * self.size
            if not HEAD.unpack_from(row)[0]:
                continue
            at = HEAD.size
            for all_, a in zip(every, self.first, strict=True):
                part = np.frombuffer(row, a.dtype, a.size, at)
                all_[i], at = part.reshape(a.shape), at + a.nbytes
        return jax.tree.unflatten(self.tree, every)

    def write(self, round: int, client: int, leaves: Sequence[np.ndarray]) -> None:
        self.put(client, HEAD.pack(round) + b"".join(a.tobytes() for a in leaves))

    def journal(self, base: int) -> Path:
        return self.folder / f"old-{self.population}-{base}"

    def old_rows(self, base: int) -> Iterator[tuple[int, bytes]]:
        """A journal's clients and rows. The last record may be cut off: its row was not changed."""
        try:
            content = self.journal(base).read_bytes()
        except FileNotFoundError:
            return
        step = HEAD.size + self.size
        for at in range(0, len(content) - step + 1, step):
            (client,) = HEAD.unpack_from(content, at)
            yield client, content[at + HEAD.size : at + step]

    def append(self, base: int, records: Iterator[tuple[int, bytes]]) -> None:
        """Adds records to a journal, after its last whole one."""
        step = HEAD.size + self.size
        with open(self.journal(base), "ab", buffering=0) as journal:
            journal.truncate(journal.seek(0, os.SEEK_END) // step * step)
            for client, row in records:
                journal.write(HEAD.pack(client) + row)


class ClientStates:
    """The states of all populations, in a folder. `first` has the first state of a client."""

    def __init__(self, folder: Path, first: Sequence[Any]):
        self.folder, self.base = folder, 0
        self.begun = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = [Rows(folder, j, state) for j, state in enumerate(first)]
        self.journaled: list[set[int]] = [set() for _ in first]  # clients, since the checkpoint

    def close(self) -> None:
        for rows in self.rows:
            rows.close()

    def read(self, population: int, clients: Sequence[int]) -> Any:
        return self.rows[population].read(clients)

    def write(self, round: int, population: int, clients, states: Any, changed) -> None:
        """The states [clients, ...] after round number `round`, counted from 1, of those clients
        that have `changed`. -1 is no client."""
        leaves = [np.asarray(a) for a in jax.tree.leaves(states)]
        who = np.flatnonzero(np.asarray(changed) & (np.asarray(clients) >= 0))
        rows, known = self.rows[population], self.journaled[population]
        self._say_last(round)
        new = [client for client in (int(clients[i]) for i in who) if client not in known]
        rows.append(self.base, ((client, rows.row(client)) for client in new))
        known.update(new)
        for i in who:
            rows.write(round, int(clients[i]), [a[i] for a in leaves])

    def restore(self, round: int) -> None:
        """Back to the states at a checkpoint, or to the start."""
        if round and not self.begun:
            raise MixflError(
                f"{self.folder} is missing: it has what clients keep between rounds. Restore it, "
                "or start over with --restart."
            )
        bases = self._bases()
        if self._last() > round and round not in bases:
            raise MixflError(
                f"{self.folder} can't go back to round {round}: it has no journal since then. "
                "Start over with --restart."
            )
        for base in sorted((b for b in bases if b >= round), reverse=True):
            for rows in self.rows:
                for client, row in rows.old_rows(base):
                    rows.put(client, row)
            self._say_last(base)
            for rows in self.rows:
                rows.journal(base).unlink(missing_ok=True)
        self._from(round)

    def flush(self) -> None:
        """To the disk, before a checkpoint that goes with these states."""
        for rows in self.rows:
            os.fsync(rows.file)

    def saved(self, round: int, kept: Collection[int]) -> None:
        """There is a checkpoint of this round; `kept` are the rounds of all that are left."""
        self._from(round)
        for base in sorted(self._bases() - {round, *kept}):
            older = max((k for k in kept if k < base), default=None)
            for rows in self.rows:
                if older is not None:
                    _merge(rows, base, older)
                rows.journal(base).unlink(missing_ok=True)

    def _from(self, round: int) -> None:
        self.base = round
        self.journaled = [{client for client, _ in rows.old_rows(round)} for rows in self.rows]

    def _bases(self) -> set[int]:
        return {int(p.name.rsplit("-", 1)[1]) for p in self.folder.glob("old-*-*")}

    def _last(self) -> int:
        try:
            return int((self.folder / "last").read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _say_last(self, round: int) -> None:
        partial = self.folder / ".last"
        partial.write_text(str(round))
        partial.replace(self.folder / "last")


def _merge(rows: Rows, base: int, older: int) -> None:
    """The journal of a checkpoint that is gone joins the one before it, which has a client's oldest
    row already if it has one."""
    known = {client for client, _ in rows.old_rows(older)}
    rows.append(older, (record for record in rows.old_rows(base) if record[0] not in known))

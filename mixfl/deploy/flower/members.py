"""What the server knows about its nodes and keeps to itself: `deployment.json` in the run folder.

Only its owner can read the file. It has the secret from which cohorts are drawn, the key that each
client's number belongs to, the nodes in quarantine, and how often the run was started again.
"""

import contextlib
import hashlib
import hmac
import json
import os
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from mixfl.deploy.flower.config import Deployment
from mixfl.deploy.flower.messages import Rejected
from mixfl.deploy.flower.quarantine import Quarantine
from mixfl.errors import MixflError, unknown
from mixfl.problem import Problem

FILE = "deployment.json"
Place = tuple[str, int | None]  # a population, and a client's number if it is fixed


class Members:
    def __init__(
        self, problem: Problem, d: Deployment, out: Path | None, note: Callable[[str], None]
    ):
        names = [p.name for p in problem.populations]
        self.places = read_places(Path(d.populations), names) if d.populations else None
        self.fixed = {place: who for who, place in (self.places or {}).items()}
        self.file = out / FILE if out is not None else None
        self.note, self.begun = note, False
        self.several = len(names) > 1 and self.places is None
        self.secret, self.quarantine = os.urandom(32), Quarantine()
        self.numbers: dict[tuple[str, int], str] = {}  # (population, number): its owner's key
        self.restarts = 0  # of the run
        self.saved = ""

    def begin(self) -> None:
        """Reads or makes the file. To be called when the run folder exists."""
        if self.begun:
            return
        self.begun = True
        if self.several:
            self.note(
                "each node chooses its own population. If you don't trust all of them to, assign "
                "populations to keys (see `populations` in docs/flower.md)"
            )
        if self.file is not None and self.file.exists():
            try:
                kept = json.loads(self.file.read_bytes())
                self.secret = bytes.fromhex(kept["secret"])
                self.numbers = {(place, number): who for place, number, who in kept["numbers"]}
                self.quarantine = Quarantine(kept["quarantine"])
                self.restarts = int(kept.get("restarts", 0)) + 1
            except (ValueError, KeyError, TypeError):
                self.restarts = 1  # at least
                damaged = self.file.rename(self.file.with_name(f"{FILE}.damaged"))
                self.note(f"{self.file} was damaged: renamed it to {damaged.name}, made a new one")
        self.save()

    def seed(self, round: int, population: int) -> int:
        """The seed of a cohort. Nobody can predict it without the secret."""
        what = f"cohort {round} {population}".encode()
        return int.from_bytes(hmac.digest(self.secret, what, "sha256")[:16], "big")

    def place(self, who: str) -> int:
        """A number of the node's own, which stays the same in all rounds."""
        return int.from_bytes(hmac.digest(self.secret, who.encode(), "sha256")[:8], "big")

    def check(self, who: str, population: str, number: int, connected: Collection[str]) -> None:
        """Checks a node's population and number against what its key may claim. The node gets the
        number if nobody has it, or if its owner is not connected. Its earlier number becomes
        free."""
        if self.places is not None:
            if who not in self.places:
                raise Rejected("impostor", "its key is not assigned to a population")
            wanted, fixed = self.places[who]
            if population != wanted or fixed not in (None, number):
                raise Rejected("impostor", "it claims a population or number that is not its key's")
        place = population, number
        owner, fixed_owner = self.numbers.get(place, who), self.fixed.get(place, who)
        if fixed_owner != who or (owner != who and owner in connected):
            raise Rejected("impostor", f"number {number} belongs to another node: give it its own "
                           "partition-id")  # fmt: skip
        if owner != who:
            self.note(f"number {number} of '{population}' now belongs to another key: its last "
                      "owner is not connected")  # fmt: skip
        self.numbers = {p: key for p, key in self.numbers.items() if key != who} | {place: who}

    def save(self) -> None:
        """Writes the file if anything has changed."""
        numbers = [[*place, who] for place, who in sorted(self.numbers.items())]
        kept = json.dumps({
            "secret": self.secret.hex(), "numbers": numbers, "quarantine": self.quarantine.kept(),
            "restarts": self.restarts,
        })  # fmt: skip
        if self.file is None or kept == self.saved:
            return
        partial = self.file.with_name(f".{FILE}.partial")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as f:
                f.write(kept)
                f.flush()
                os.fsync(f.fileno())
            partial.replace(self.file)
            self.saved = kept
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise MixflError(f"{self.file} could not be written: {error.strerror}.") from None


def fingerprint(node: int, key: bytes) -> str:
    """Identifies a node: by its key, or by its number in Flower if it has no key."""
    return hashlib.sha256(key).hexdigest()[:32] if key else f"node {node}"


def read_places(path: Path, populations: list[str]) -> dict[str, Place]:
    """Reads a TOML file with lines such as `node-1 = "phones"` or
    `node-1 = {population = "phones", number = 0}`. The key is in node-1.pub in the same folder."""
    try:
        entries = tomllib.loads(path.read_text())
        return {
            _key(path.parent / f"{name}.pub"): _place(f"{path}: {name}", entry, populations)
            for name, entry in entries.items()
        }
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MixflError(f"populations = {path}: {error}.") from None


def _key(path: Path) -> str:
    try:
        key: Any = serialization.load_ssh_public_key(path.read_bytes())
    except ValueError as error:
        raise MixflError(f"{path} is not a public key: {error}.") from None
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return fingerprint(0, key.public_bytes(serialization.Encoding.PEM, form))


def _place(where: str, entry: Any, populations: list[str]) -> Place:
    entry = entry if isinstance(entry, dict) else {"population": entry}
    number = entry.get("number")
    if entry.keys() - {"population", "number"} or (number is not None and type(number) is not int):
        raise MixflError(f'{where}: expected {{population = "...", number = 0}}, got {entry}.')
    if entry.get("population") not in populations:
        raise unknown(f"population in {where}", entry.get("population"), populations)
    return entry["population"], number

"""What the server knows of its nodes and does not tell them, kept in the run's folder.

`deployment.json`, readable by its owner alone, has the secret from which cohorts are drawn, the
key that each client's number belongs to, and who is in quarantine.
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
        self.numbers: dict[tuple[str, int], str] = {}  # of a population -> whose it is
        self.saved = ""

    def begin(self) -> None:
        """Not before the run has its folder."""
        if self.begun:
            return
        self.begun = True
        if self.several:
            self.note(
                "each node chooses its population: name them by their keys (populations in "
                "docs/flower.md) if they are not all trusted with that"
            )
        if self.file is not None and self.file.exists():
            try:
                kept = json.loads(self.file.read_bytes())
                self.secret = bytes.fromhex(kept["secret"])
                self.numbers = {(place, number): who for place, number, who in kept["numbers"]}
                self.quarantine = Quarantine(kept["quarantine"])
                return
            except (ValueError, KeyError, TypeError):
                damaged = self.file.rename(self.file.with_name(f"{FILE}.damaged"))
                self.note(f"{self.file} is damaged: it is {damaged.name} now, and made anew")
        self.save()

    def seed(self, round: int, population: int) -> int:
        """Of a cohort, which nobody can foresee without the secret."""
        what = f"cohort {round} {population}".encode()
        return int.from_bytes(hmac.digest(self.secret, what, "sha256")[:16], "big")

    def check(self, who: str, population: str, number: int, connected: Collection[str]) -> None:
        """A node's population and number, against what belongs to its key. A number that nobody
        has, or somebody who is not connected, is its own from now on, and the one that it had
        before is free."""
        if self.places is not None:
            if who not in self.places:
                raise Rejected("impostor", "its key is of no population")
            wanted, fixed = self.places[who]
            if population != wanted or fixed not in (None, number):
                raise Rejected("impostor", "it says that it is what its key is not")
        place = population, number
        owner, fixed_owner = self.numbers.get(place, who), self.fixed.get(place, who)
        if fixed_owner != who or (owner != who and owner in connected):
            raise Rejected("impostor", f"the number {number} is another node's: give it a "
                           "partition-id of its own")  # fmt: skip
        if owner != who:
            self.note(f"the number {number} of '{population}' is another key's now: the one that "
                      "had it is not connected")  # fmt: skip
        self.numbers = {p: key for p, key in self.numbers.items() if key != who} | {place: who}

    def save(self) -> None:
        """What has changed."""
        numbers = [[*place, who] for place, who in sorted(self.numbers.items())]
        kept = json.dumps({
            "secret": self.secret.hex(), "numbers": numbers, "quarantine": self.quarantine.kept(),
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
    """By which a node is known: its key's, or its number in Flower where it has no key."""
    return hashlib.sha256(key).hexdigest()[:32] if key else f"node {node}"


def read_places(path: Path, populations: list[str]) -> dict[str, Place]:
    """From a TOML file with lines such as `node-1 = "phones"`, or
    `node-1 = {population = "phones", number = 0}`; the key is in node-1.pub beside it."""
    try:
        given = tomllib.loads(path.read_text())
        return {
            _key(path.parent / f"{name}.pub"): _place(f"{path}: {name}", told, populations)
            for name, told in given.items()
        }
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MixflError(f"populations = {path}: {error}.") from None


def _key(path: Path) -> str:
    try:
        key: Any = serialization.load_ssh_public_key(path.read_bytes())
    except ValueError as error:
        raise MixflError(f"{path} is no public key: {error}.") from None
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return fingerprint(0, key.public_bytes(serialization.Encoding.PEM, form))


def _place(where: str, told: Any, populations: list[str]) -> Place:
    told = told if isinstance(told, dict) else {"population": told}
    number = told.get("number")
    if told.keys() - {"population", "number"} or (number is not None and type(number) is not int):
        raise MixflError(f'{where}: expected {{population = "...", number = 0}}, got {told}.')
    if told.get("population") not in populations:
        raise unknown(f"population in {where}", told.get("population"), populations)
    return told["population"], number

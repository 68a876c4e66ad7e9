"""Registers the nodes' public keys (keys/node-*.pub) with the SuperLink."""

import contextlib
import hashlib
from collections.abc import Generator
from pathlib import Path

from mixfl.deploy.flower.flwr_command import FlwrCommand, Waiting
from mixfl.deploy.flower.supervisor import Pause, say

REGISTERED = "state/registered"  # lines with a node's id in Flower and its key's digest
TRIES = 3  # times that the SuperLink may refuse a key


def register_nodes(flwr: FlwrCommand) -> Waiting:
    known = yield from _known(flwr)
    for key in sorted(flwr.project.glob("keys/node-*.pub")):
        try:
            digest = hashlib.sha256(key.read_bytes()).hexdigest()
        except OSError as error:
            say(f"{key.stem}: its key can't be read: {error.strerror}; continuing without it")
            continue
        if digest not in known:
            yield from _register(flwr, key, digest)


def _known(flwr: FlwrCommand) -> Generator[None, None, set[str]]:
    """The digests of registered keys whose nodes the SuperLink still lists. A SuperLink with a new
    database lists none."""
    try:
        lines = (flwr.project / REGISTERED).read_text(errors="replace").splitlines()
    except OSError:
        return set()
    yield from flwr.until_reachable()
    answer = yield from flwr.ask("supernode", "list", "--format", "json")
    listed = {str(node.get("node-id")) for node in answer.json().get("nodes") or []}
    noted = [line.partition(" ") for line in lines]
    return {digest for number, _, digest in noted if number in listed}


def _register(flwr: FlwrCommand, key: Path, digest: str) -> Waiting:
    pause, refused = Pause(), 0
    while refused < TRIES:
        yield from flwr.until_reachable()
        answer = yield from flwr.ask("supernode", "register", str(key), "--format", "json")
        if answer.succeeded or "already in use" in answer.text:
            say(f"{key.stem}: its key is registered")
            number = answer.json().get("node-id")
            if number is not None:
                with contextlib.suppress(OSError), open(flwr.project / REGISTERED, "a") as file:
                    file.write(f"{number} {digest}\n")
            return
        refused += flwr.is_reachable()
        say(f"{key.stem}: its key can't be registered: {answer.reason()}")
        yield from flwr.sleep(pause.next())
    say(f"{key.stem}: continuing without it; fix {key} and start again")

"""A node's part of secure aggregation: which requests it answers, and the state that it keeps.

The state is in Flower's context, which the SuperNode keeps between messages of a run, and nobody
else sees. Requests without training (keys, shares, unmasking) come as `query` messages: they need
neither JAX nor the data.

A node's own configuration may ask for more than the run does:

    secure-min    fewest clients in a roster; without secure aggregation, it trains nothing
    secure-key    its private key: signs the keys of each round
    secure-peers  a folder with all nodes' public keys: nobody else may be in a roster
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from mixfl.deploy.secure import client, graph, keys
from mixfl.deploy.secure.parts import Refused, packed, parsed
from mixfl.errors import MixflError

STATE, RECORD = "mixfl.secure", "secure"
FORMAT = "mixfl.masked"


def loaded(context: Context) -> client.State:
    run, kept = str(context.run_id), context.state.get(STATE)
    if isinstance(kept, ConfigRecord):
        state = parsed(kept["state"], client.State)
        if state.run == run:
            return state
    return client.State(run)


def stored(context: Context, state: client.State) -> None:
    context.state[STATE] = ConfigRecord({"state": msgspec.msgpack.encode(state)})


def asked(content: RecordDict) -> bool:
    return RECORD in content


def answer(content: RecordDict, context: Context) -> RecordDict:
    """To a request without training: shares of the survivors' masks, a place in the next roster;
    and, in any case, keys for the round after that."""
    request, found = _request(content), dict[str, Any]()
    state, node = loaded(context), context.node_config
    if "survivors" in request:
        state, found["shares"] = client.reveal(state, request["survivors"])
    if "roster" in request:
        check, least = peers(node), fewest(node)
        try:
            state, found["boxes"] = client.share(state, request["roster"], check, least)
        except Refused:
            if "shares" not in found:  # a roster that is refused must not cost the round before
                raise
    state, advert = client.advertise(state, sign(node))
    stored(context, state)
    return RecordDict({RECORD: ConfigRecord({**found, "advert": packed(advert)})})


def train(trained: Any, content: RecordDict, context: Context) -> RecordDict:
    """`trained` is this node's Client. The boxes are opened before anything is computed."""
    from mixfl.deploy.flower import messages  # needs JAX

    request = _request(content)
    form = [request.get(name) for name in ("bits", "both", "steps")]
    if list(map(type, form)) != [int, bool, int]:
        raise Refused("a request to train without saying in which form.")
    state = client.receive(loaded(context), request.get("boxes"))
    assert state.entered is not None
    round = messages.config(content, "train", round=int)[0]
    client.check_training(state, round, trained.apart)
    layout, vector = trained.secured(content, state.entered.clients, *form)
    if vector is None:
        return layout
    state, masked = client.mask(state, round, digest(content), layout, vector)
    stored(context, state)
    array = Array("uint8", (len(masked),), FORMAT, masked)
    return RecordDict({"masked": ArrayRecord({"masked": array})})


def _request(content: RecordDict) -> ConfigRecord:
    record = content.get(RECORD)
    if not isinstance(record, ConfigRecord):
        raise Refused("a request of secure aggregation without its record.")
    return record


def digest(content: RecordDict) -> bytes:
    """Of everything that all clients of a population get in a round."""
    parts: list[Any] = []
    for name in sorted(set(content) - {RECORD}):
        record = content[name]
        if isinstance(record, ArrayRecord):
            parts.append([name, [
                [n, a.dtype, list(a.shape), a.stype, hashlib.sha256(a.data).digest()]
                for n, a in sorted(record.items())
            ]])  # fmt: skip
        else:
            parts.append([name, sorted((n, v) for n, v in record.items())])  # type: ignore[union-attr]
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


# What the node's own configuration asks for


def fewest(node: Mapping[str, Any]) -> int:
    given = node.get("secure-min", graph.LEAST)
    if type(given) is not int or given < 1:
        raise MixflError(f"secure-min = {given!r}: expected a number of clients, at least 1.")
    return given


def demanded(node: Mapping[str, Any]) -> bool:
    """Does the node train only under secure aggregation?"""
    return "secure-min" in node or "secure-peers" in node


def sign(node: Mapping[str, Any]) -> keys.Sign | None:
    return _signer(str(node["secure-key"])) if "secure-key" in node else None


def peers(node: Mapping[str, Any]) -> keys.Check | None:
    return _peers(str(node["secure-peers"])) if "secure-peers" in node else None


@functools.cache
def _signer(file: str) -> keys.Sign:
    return keys.signer(Path(file))


@functools.cache
def _peers(folder: str) -> keys.Check:
    return keys.known_signers(sorted(Path(folder).glob("*.pub")))

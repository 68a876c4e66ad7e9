"""Stands in for Flower's programs where the supervisor is tested: small processes that start at
once. The test copies this file into a project as flwr, flwr-serverapp, superlink and superexec."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(__file__).parent
PROJECT = BIN.parent
RUNS = PROJECT / "fake"  # a file per run: its status
NODES = PROJECT / "nodes"  # those that are registered


def wish() -> str:
    """What the test wants of the servers."""
    file = PROJECT / "wish"
    return file.read_text() if file.exists() else ""


def superlink():
    host, port = os.environ["SUPERLINK"].split(":")
    with socket.create_server((host, int(port))) as server:
        while True:
            server.accept()[0].close()


def superexec():
    while True:
        for run in sorted(RUNS.glob("*")):
            if run.read_text() == "pending":
                run.write_text("running")
                options = {"start_new_session": True, "env": {}} if wish() == "orphan" else {}
                program = [sys.executable, BIN / "flwr-serverapp", run.name]
                process = subprocess.Popen(program, **options)
                (PROJECT / "server.pid").write_text(str(process.pid))
        time.sleep(0.05)


def serverapp(run: str):
    """Goes on from the last round, a round at a time, up to the tenth."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    out = PROJECT / "runs/fake"
    (out / "checkpoints").mkdir(parents=True, exist_ok=True)
    lock = open(out / ".lock", "a")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if wish() == "diverge":
        (out / "status.json").write_text(json.dumps({"status": "diverged", "message": "too far"}))
        (RUNS / run).write_text("finished:failed")
        return
    start = max((int(p.name) for p in (out / "checkpoints").iterdir()), default=0)
    stuck = wish() == "orphan"
    for t in range(start + 1, 11):
        while (stuck or wish() == "hang") and t > start + 1:
            time.sleep(0.05)
        (out / "checkpoints" / str(t)).mkdir()
        time.sleep(0.05)
    (out / "status.json").write_text(json.dumps({"status": "finished", "round": 10}))
    (RUNS / run).write_text("finished:completed")


def flwr(command: str, *arguments: str):
    with open(PROJECT / "asked", "a") as file:
        print(command, *arguments, file=file)
    if command == "run":
        number = str(len(list(RUNS.glob("*"))) + 1)
        (RUNS / number).write_text("pending")
        print("a note of Flower's")
        print(json.dumps({"success": True, "run-id": number}))
    elif command == "list":
        number = arguments[arguments.index("--run-id") + 1]
        status = (RUNS / number).read_text()
        print(json.dumps({"runs": [{"status": status, "status-details": "in Flower's words"}]}))
    elif command == "stop":
        (RUNS / arguments[0]).write_text("finished:stopped")
    elif arguments[0] == "list":
        names = NODES.read_text().split() if NODES.exists() else []
        print(json.dumps({"success": True, "nodes": [{"node-id": name} for name in names]}))
    elif arguments[1] in (PROJECT / "known").read_text():
        sys.exit("Error: Public key already in use.")
    else:
        number = str(time.time_ns())
        with open(NODES, "a") as file:
            print(number, file=file)
        print(json.dumps({"success": True, "node-id": number}))


if __name__ == "__main__":
    programs = {"flwr": flwr, "flwr-serverapp": serverapp}
    {**programs, "superlink": superlink, "superexec": superexec}[Path(__file__).name](*sys.argv[1:])

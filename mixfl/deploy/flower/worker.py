"""A node's worker: one process that answers every message of its node.

Flower starts a process per message, which imports Flower, JAX and the project, loads the data and
compiles anew. A SuperNode with `--isolation process` leaves the starting to another process, as a
rule flower-superexec. `watch` is such a process: it hands each message's token to a worker, which
runs the project's ClientApp and keeps what it has imported, loaded and compiled. The worker reads
tokens from its standard input and ends with it. It is replaced when it has died, when a run
brings other code, and when it has not answered long after the server gave up waiting.

What comes from flwr's inner modules here is what its own flwr-clientapp and flower-superexec are
made of; with another version of flwr, use these (docs/deploy.md).
"""

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from mixfl.deploy.flower.processes import started
from mixfl.errors import MixflError

try:
    from flwr.app import Error, Message
    from flwr.cli.install import install_from_fab
    from flwr.clientapp.utils import get_load_client_app_fn
    from flwr.common.constant import ErrorCode, SubStatus
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore import log
    from flwr.supercore.constant import TaskType
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        RuntimeVersionHttpInterceptor,
        SuperExecAuthHttpInterceptor,
    )
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.runtime.run_clientapp import (
        pull_task_input,
        push_message,
        push_task_output,
    )
except ImportError as error:
    raise MixflError(
        f"the worker needs flwr 1.41 ({error}): pip install 'mixfl[flower]', or start the node "
        "without a worker (docs/deploy.md)."
    ) from None

LOOK_EVERY = 0.1  # seconds between two looks for a message
PATIENCE = 3.0  # times the seconds that the server waits for an answer
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def watch(address: str, secret: Path | None = None, until: int | None = None) -> None:
    """Serves the SuperNode whose Runtime API is at `address`; `until` a process, given by its
    number, has ended."""
    if until is not None:
        threading.Thread(target=_end_with, args=(until,), daemon=True).start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    acquire = SuperExecAuthHttpInterceptor(
        master_secret=secret.read_bytes(), protected_methods=frozenset({ACQUIRE})
    ) if secret else None  # fmt: skip
    client = _client(address, "SuperExec", acquire)
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    worker, code = None, None
    try:
        while True:
            found = client.AcquireTask(request)
            if not (found.HasField("task") and found.token):
                time.sleep(LOOK_EVERY)
                continue
            if worker is None or worker.poll() is not None or code != found.task.fab_hash:
                _end(worker)
                worker, code = _started(address), found.task.fab_hash
            try:
                print(found.token, file=worker.stdin, flush=True)
            except BrokenPipeError:  # it has just died; Flower gives the message up
                pass
    except KeyboardInterrupt:
        pass
    finally:
        _end(worker)


def _end_with(process: int) -> None:
    since = started(process)
    while since is not None and started(process) == since:
        time.sleep(0.2)
    os._exit(0)  # the worker ends with its standard input


def _started(address: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "mixfl.deploy.flower.worker", address]
    return subprocess.Popen(command, stdin=subprocess.PIPE, text=True)


def _end(worker: subprocess.Popen | None) -> None:
    if worker is not None:
        worker.kill()
        worker.wait()


def _client(address: str, component: str, *more) -> RuntimeHttpClient:
    interceptors = [RuntimeVersionHttpInterceptor(component_name=component), *filter(None, more)]
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # the node's own machine; a secret or a token goes with each call
        root_certificates=None,
        interceptors=interceptors,
        retry_invoker=make_simple_http_retry_invoker(),
    )


def work(address: str) -> None:
    """Answers the messages whose tokens come line by line, and ends with the process that sends
    them, whatever it is doing then."""
    tokens: queue.Queue[str] = queue.Queue()

    def read():
        for line in sys.stdin:
            tokens.put(line.strip())
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    app = None
    while True:
        client = _client(address, "flwr-clientapp", RuntimeTokenHttpInterceptor(tokens.get()))
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heartbeat.start()
        try:
            app = _answer(client, app)
        except Exception:  # of the connection to the SuperNode, which then gives the message up
            log(logging.ERROR, "a message could not be answered", exc_info=True)
        finally:
            signal.alarm(0)
            heartbeat.stop()
            client.close()


def _answer(client: RuntimeHttpClient, app):
    message, context, run, fab = pull_task_input(client)
    # By then it hangs, and nobody waits. The signal ends the process, and the node goes on.
    signal.alarm(int(PATIENCE * message.metadata.ttl) + 1)
    try:
        if app is None:
            install_from_fab(fab.content, skip_prompt=True)
            load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
            app = load(run.fab_id, run.fab_version, fab.hash_str)
        reply, status, details = app(message=message, context=context), SubStatus.COMPLETED, ""
    except Exception as error:
        # To the node's log only: the text of an error may have the node's data in it.
        log(logging.ERROR, "the ClientApp failed", exc_info=True)
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        if app is None:
            code = ErrorCode.LOAD_CLIENT_APP_EXCEPTION
        reply = Message(Error(code, type(error).__name__), reply_to=message)
        status, details = SubStatus.FAILED, type(error).__name__
    push_message(client, reply, context)
    push_task_output(client, context, status, details)
    return app


if __name__ == "__main__":
    work(sys.argv[1])

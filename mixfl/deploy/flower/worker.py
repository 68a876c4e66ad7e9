"""A node's worker: one long-lived process that answers all messages of its node.

By default, Flower starts a process for each message, which imports Flower, JAX and the project,
loads the data and compiles again. With `--isolation process`, a SuperNode leaves starting processes
to another program, usually flower-superexec. `watch` takes its place. It passes each message's
token to a worker, which runs the project's ClientApp and keeps everything imported, loaded and
compiled. The worker reads tokens from its standard input and exits when that closes. It is replaced
if it dies, if a run brings other code, or if it is still busy long after the server gave up.

This uses the internal modules of flwr 1.41 that its own flwr-clientapp and flower-superexec are
made of. With another version of flwr, use those instead (docs/deploy.md).
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

LOOK_EVERY = 0.1  # seconds between two checks for a message
PATIENCE = 3.0  # a worker may take this many times the server's deadline
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def watch(address: str, secret: Path | None = None, until: int | None = None) -> None:
    """Serves the SuperNode whose Runtime API is at `address`, until the process `until` ends."""
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
            acquired = client.AcquireTask(request)
            if not (acquired.HasField("task") and acquired.token):
                time.sleep(LOOK_EVERY)
                continue
            if worker is None or worker.poll() is not None or code != acquired.task.fab_hash:
                _end(worker)
                worker, code = _started(address), acquired.task.fab_hash
            try:
                print(acquired.token, file=worker.stdin, flush=True)
            except BrokenPipeError:  # it has just died; Flower gives up the message
                pass
    except KeyboardInterrupt:
        pass
    finally:
        _end(worker)


def _end_with(process: int) -> None:
    since = started(process)
    while since is not None and started(process) == since:
        time.sleep(0.2)
    os._exit(0)  # the worker exits when its standard input closes


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
        insecure=True,  # on the node's own machine, with a secret or a token in each call
        root_certificates=None,
        interceptors=interceptors,
        retry_invoker=make_simple_http_retry_invoker(),
    )


def work(address: str) -> None:
    """Answers the messages whose tokens arrive on standard input, one per line. Exits at once when
    the sender does."""
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
        except Exception:  # the connection to the SuperNode failed; it gives up the message
            log(logging.ERROR, "a message could not be answered", exc_info=True)
        finally:
            signal.alarm(0)
            heartbeat.stop()
            client.close()


def _answer(client: RuntimeHttpClient, app):
    message, context, run, fab = pull_task_input(client)
    # By then the app hangs and nobody waits for it. The signal ends this process, not the node.
    signal.alarm(int(PATIENCE * message.metadata.ttl) + 1)
    try:
        if app is None:
            install_from_fab(fab.content, skip_prompt=True)
            load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
            app = load(run.fab_id, run.fab_version, fab.hash_str)
        reply, status, details = app(message=message, context=context), SubStatus.COMPLETED, ""
    except Exception as error:
        # Only to the node's log: the text of an error may contain the node's data.
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

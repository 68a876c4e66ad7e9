"""Flower's ServerApp and ClientApp for a problem.

Give the problem itself, a function that returns it, or the text "module:attribute". The text is
imported only when a message arrives: Flower starts a process per message, and steps that need no
JAX should not wait for it.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from mixfl.deploy.flower.lingering import LINGER
from mixfl.errors import MixflError
from mixfl.problem import Problem

try:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
except ImportError as error:
    raise MixflError(f"Flower: {error}. Install it: pip install 'mixfl[flower]'") from None

ProblemLike = Problem | Callable[[], Problem] | str
Answer = Callable[[ProblemLike, str, RecordDict, Context], RecordDict]


def server_app(problem: ProblemLike, callbacks: Iterable[Any] = ()) -> ServerApp:
    """Flower's ServerApp, which trains the problem. `callbacks`: as of `mixfl.train`, called at the
    server.

    >>> app = mixfl.flower.server_app(problem)
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        prepare()
        from mixfl.deploy.flower.server import serve

        serve(load(problem), grid, context.run_config, callbacks)

    return app


def answer(problem: ProblemLike, kind: str, content: RecordDict, context: Context) -> RecordDict:
    """A node's answer to a message of the kind `query` or `train`, computed in this process."""
    if LINGER in content:
        return RecordDict({})
    from mixfl.deploy.flower import secure_node

    if kind == "query" and secure_node.asked(content):
        return secure_node.answer(content, context)
    prepare()
    from mixfl.deploy.flower import frozen, messages
    from mixfl.deploy.flower.client import client_of

    node = {**context.node_config, "node-id": context.node_id}
    client = client_of(load(problem), context.run_config, node, content)
    if client is None:  # it is sent the frozen arrays when it is asked who it is
        return frozen.LACKS if kind == "query" else messages.STALE
    if kind == "query":
        return client.hello()
    if secure_node.asked(content):
        return secure_node.train(client, content, context)
    return client.train(content)


@functools.cache
def prepare() -> None:
    """An app has a process of its own: memory and compiled programs are kept there, as by
    `mixfl.prepare_process`, which would also set the number of devices."""
    from mixfl.process.memory import keep_freed_memory

    keep_freed_memory()  # before JAX starts threads
    from mixfl.process.compilation_cache import keep_programs

    keep_programs()


def client_app(problem: ProblemLike, answer: Answer = answer) -> ClientApp:
    """Flower's ClientApp, which trains at a node. `answer` may be replaced by a function that does
    the same elsewhere, for example in a long-lived process.

    >>> app = mixfl.flower.client_app(problem)
    """
    app = ClientApp()

    def reply(kind: str, message: Message, context: Context) -> Message:
        return Message(answer(problem, kind, message.content, context), reply_to=message)

    app.query()(functools.partial(reply, "query"))
    app.train()(functools.partial(reply, "train"))
    return app


def load(problem: ProblemLike) -> Problem:
    given: Any = problem
    if isinstance(given, str):
        module, colon, attribute = given.partition(":")
        try:
            given = getattr(importlib.import_module(module), attribute if colon else "problem")
        except (ImportError, AttributeError) as error:
            raise MixflError(f"the problem '{problem}' can't be imported: {error}.") from error
    if not isinstance(given, Problem) and callable(given):
        given = given()
    if not isinstance(given, Problem):
        raise MixflError(
            f"expected a mixfl.Problem, a function without arguments that returns one, or its name "
            f"as 'module:problem', got {type(given).__name__}."
        )
    return given

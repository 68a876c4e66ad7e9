"""Looks at a problem before anything is computed or written, so that a mistake in it gets a
sentence and not a traceback from inside a compiled round."""

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithm import Message
from mixfl.engine.simulator import check_params
from mixfl.errors import MixflError
from mixfl.optimizers import make
from mixfl.problem import Federated, Problem, Term
from mixfl.settings import Settings
from mixfl.sparse import renumber, restrict, tables

BATCH = 3  # unlike most sizes in a model, so that a wrong axis shows


def preflight(problem: Problem, s: Settings) -> None:
    hint = ". It must return floating-point arrays only (see docs/models.md)"
    x = attempt("init", lambda: jax.eval_shape(problem.init, jax.random.key(s.seed)), hint)
    check_params(x)
    for term in problem.terms:
        check_loss(term, x)
        if isinstance(term, Federated) and term.rows:
            check_rows(term, problem.init(jax.random.key(s.seed)))
    for key, lr in (
        ("client_opt", s.client_lr), ("server_opt", s.server_lr), ("central_opt", s.eta_c),
        ("merge_opt", 1.0),
    ):  # fmt: skip
        opt = make(getattr(s, key), lr)
        attempt(
            f"{key} = {getattr(s, key)}",
            lambda opt=opt: jax.eval_shape(lambda x: opt.step(x, x, opt.init(x)), x),
            ". It must work with a gradient, its state and the parameters alone",
        )
        state = jax.tree.leaves(jax.eval_shape(opt.init, x))
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in state):
            raise MixflError(
                f"{key} = {getattr(s, key)}: optimizers that draw at random don't work."
            )


def check_loss(term: Term, x) -> None:
    """One floating-point loss per example, or one number for a regularizer."""
    name = f"the loss of term '{term.name}'"
    if term.examples is None:
        found = attempt(name, lambda: jax.eval_shape(term.loss, x))
        if getattr(found, "shape", None) != ():
            raise MixflError(f"{name} must return one number (it has no data), got {found}.")
        return
    rows = term.examples.take(np.arange(BATCH) % len(term.examples))
    found = attempt(name, lambda: jax.eval_shape(term.loss, x, rows))
    if getattr(found, "shape", None) != (BATCH,):
        raise MixflError(
            f"{name} returned {_shape(found)} for a batch of {BATCH} examples: it must return one "
            f"loss per example, shape ({BATCH},). Leave out the mean or sum over the batch."
        )
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise MixflError(f"{name} returned {found.dtype}: it must return floating-point numbers.")


def check_rows(term: Federated, x) -> None:
    """The loss of a client that holds only the rows of tables that its data names is the same."""
    marked = tables(term, x)
    batch = term.examples.take(np.arange(BATCH)[None] % len(term.examples))  # one client's
    most = {name: table.rows for name, table in marked.items()}
    local, ids = renumber(batch, marked, most)
    held = {name: rows[0][rows[0] < marked[name].rows] for name, rows in ids.items()}
    own = restrict(Message(x), held).x
    expected, found = (
        attempt(f"the loss of term '{term.name}'", lambda p=p, b=b: np.asarray(term.loss(p, b)))
        for p, b in (
            (x, {k: v[0] for k, v in batch.items()}),
            (own, {k: v[0] for k, v in local.items()}),
        )
    )
    if not np.allclose(expected, found, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise MixflError(
            f"the loss of term '{term.name}' is another one when {', '.join(marked)} has only the "
            "rows that the batch names: use the table only as "
            f"params[...][batch['{marked[next(iter(marked))].columns[0]}']] (no number of its own, "
            "no other rows), or leave out rows=... in mixfl.Federated."
        )


def _shape(found) -> str:
    return f"shape {found.shape}" if hasattr(found, "shape") else f"a {type(found).__name__}"


def attempt(name: str, function, hint: str = ""):
    """Calls a function of the user's; its error becomes a message with the place in the file."""
    try:
        return function()
    except MixflError:
        raise
    except Exception as error:
        raise MixflError(f"{name} failed: {_describe(error)}{hint}") from error


def _describe(error: Exception) -> str:
    """The error's first line, and the user's line that it came from."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    own = [f for f in frames if not any(p in f[0] for p in ("site-packages", "/mixfl/", "<"))]
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    first = lines[0] if lines else ""
    where = f" ({own[-1][0]}, line {own[-1][1]})" if own else ""
    return f"{type(error).__name__}: {first}{where}"

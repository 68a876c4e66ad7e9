"""Checks a problem before anything is computed or written. A mistake in it then gets a sentence,
not a traceback from inside a compiled round."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms.contract import Broadcast
from mixfl.engine.captured import captured
from mixfl.engine.dispatch import QUICK
from mixfl.engine.first_model import first_model
from mixfl.engine.params import check_params
from mixfl.engine.purity import check_pure
from mixfl.errors import MixflError
from mixfl.forms.half import in_half
from mixfl.forms.rows import renumber, restrict, tables
from mixfl.frozen import frozen_arrays, with_arrays
from mixfl.model_state import carries_state
from mixfl.optimizers import has_schedule, make
from mixfl.problem import Federated, Problem, Term
from mixfl.randomness import takes_key, trial_batch
from mixfl.schedules import shown
from mixfl.settings import Settings

ROWS_BATCH = 50
BATCH = 3  # unlike most sizes in a model, so that a wrong axis shows
OTHERS = 1e-3  # of a loss: what rounding may change if other examples are in its batch


def preflight(problem: Problem, s: Settings, row_sparse: bool = False) -> None:
    hint = ". It must return floating-point arrays only (see docs/models.md)"
    x = attempt("init", lambda: jax.eval_shape(problem.init, jax.random.key(s.seed)), hint)
    check_params(x)
    for term in problem.terms:
        if isinstance(term, Federated) and not term.here:
            continue  # its nodes check it
        check_loss(term, x)
        if s.compute != "float32":
            check_loss(in_half(problem, s).terms[problem.terms.index(term)], x, f" in {s.compute}")
        initial = functools.partial(first_model, problem, s.seed)
        check_purity(term, x, initial)
        apart, values = problem.kept.setdefault("apart", {}), captured(term.loss)
        if apart.get(term.name) != values:  # another run of the problem compiles nothing
            check_apart(term, x)
            apart[term.name] = values
        if row_sparse and isinstance(term, Federated) and term.rows:
            check_rows(term, initial())
    for own in {id(own): own for own in (s, *map(s.of, problem.populations))}.values():
        check_optimizers(own, x)


def check_optimizers(s: Settings, x) -> None:
    first = s.at(0)
    for key, lr in (
        ("client_opt", first.client_lr), ("server_opt", first.server_lr),
        ("central_opt", first.eta_c), ("merge_opt", 1.0),
    ):  # fmt: skip
        opt = make(getattr(s, key), lr)
        attempt(
            f"{key} = {getattr(s, key)}",
            lambda opt=opt: jax.eval_shape(lambda x: opt.step(x, x, opt.init(x)), x),
            ". It must work with a gradient, its state and the parameters alone",
        )
        if key == "client_opt" and has_schedule(opt, x):
            raise MixflError(
                f"client_opt = {shown(s.client_opt)} has a schedule inside, which would start over "
                "at each client in each round. Give the schedule to client_lr, as a function of "
                "the round, and let client_opt take the rate: client_opt=optax.sgd, "
                'client_lr="cosine(0.1, 500)".'
            )
        state = jax.tree.leaves(jax.eval_shape(opt.init, x))
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in state):
            raise MixflError(
                f"{key} = {getattr(s, key)}: optimizers that draw at random don't work."
            )


def check_loss(term: Term, x, how: str = "") -> None:
    """One floating-point loss per example, or one number for a regularizer."""
    name, batch = _name(term) + how, _few(term)
    if not batch:
        value = attempt(name, lambda: jax.eval_shape(term.loss, x))
        if getattr(value, "shape", None) != ():
            raise MixflError(f"{name} must return one number (it has no data), got {value}.")
        return
    losses = attempt(name, lambda: jax.eval_shape(term.loss, x, *batch), _hint(term))
    losses = losses[0] if carries_state(term.loss) else losses
    if getattr(losses, "shape", None) != (BATCH,):
        raise MixflError(
            f"{name} returned {_shape(losses)} for a batch of {BATCH} examples: it must return one "
            f"loss per example, shape ({BATCH},). Leave out the mean or sum over the batch."
        )
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise MixflError(f"{name} returned {losses.dtype}: it must return floating-point numbers.")


def check_purity(term: Term, x, initial: Callable) -> None:
    """The same inputs give the same loss. `initial()` returns parameters of the shapes x."""
    batch, frozen = _few(term), frozen_arrays(term)

    def loss(frozen, *args):
        return with_arrays(term, frozen).loss(*args)

    attempt(
        _name(term),
        lambda: check_pure(
            _name(term), loss, (frozen, x, *batch), lambda: (frozen, initial(), *batch)
        ),
    )


def check_apart(term: Term, x) -> None:
    """An example's loss is the same whatever else is in its batch: batches have padding, and are
    cut. A loss with a state depends on its batch by design; one in PyTorch is checked there
    (pytorch/trial.py)."""
    losses, n = term.loss, 0 if term.examples is None else len(term.examples)
    if n < 2 or carries_state(losses) or hasattr(losses, "in_pytorch"):
        return
    rows = np.linspace(0, n - 1, BATCH).astype(np.int64)
    batches = [trial_batch(term, np.full(BATCH, rows[i])) for i in (0, -1)]
    given = frozen_arrays(term), _noise(x), trial_batch(term, rows)

    def compared():
        traced = jax.jit(lambda frozen, *args: with_arrays(term, frozen).loss(*args)).trace(*given)
        loss = traced.lower().compile(QUICK if jax.default_backend() == "cpu" else None)
        together = np.asarray(loss(*given), np.float32)
        first, last = (np.asarray(loss(*given[:2], batch), np.float32) for batch in batches)
        return together[[0, -1]], np.array([first[0], last[-1]])

    together, alone = attempt(_name(term), compared, _hint(term))
    if not np.allclose(together, alone, OTHERS, 1e-6, equal_nan=True):
        raise MixflError(
            f"{_name(term)} of an example depends on the other examples of its batch, which may be "
            "padding or in another part. Compute each example's loss from that example alone, "
            "without batch norm, in-batch negatives or a mean over the batch; what it is compared "
            "with, such as other examples, can be columns of it. Batch norm needs a state "
            "(docs/models.md)."
        )


def _noise(x):
    """A model of these shapes whose layers neither vanish nor overflow."""
    rng = np.random.default_rng(0)

    def drawn(a):
        inputs = max(1, a.size // max(1, a.shape[-1])) if len(a.shape) > 1 else 4
        return jnp.asarray(rng.normal(size=a.shape) * inputs**-0.5, a.dtype)

    return jax.tree.map(drawn, x)


def _name(term: Term) -> str:
    return f"the loss of term '{term.name}'"


def _few(term: Term) -> tuple:
    """A few examples; nothing for a loss without data."""
    n = 0 if term.examples is None else len(term.examples)
    return (trial_batch(term, np.arange(BATCH) % n),) if n else ()


def _hint(term: Term) -> str:
    if not takes_key(term.loss) or hasattr(term.loss, "in_pytorch"):
        return ""
    return (
        ". Its third parameter is an array of JAX keys, one per example: use jax.vmap, or "
        "mixfl.per_example"
    )


def check_rows(term: Federated, x) -> None:
    """A client that holds only the table rows that its data names must have the same loss.

    Checked at a model with noise, because zeros would hide mistakes. Checked with two orders of the
    rows, because the numbers in a batch are then positions, which mean nothing by themselves.
    """
    rng = np.random.default_rng(0)
    x = jax.tree.map(lambda a: a + jnp.asarray(0.5 * rng.normal(size=a.shape), a.dtype), x)
    marked = tables(term, x)
    chosen = np.linspace(0, len(term.examples) - 1, ROWS_BATCH).astype(np.int64)
    batch = trial_batch(term, chosen[None])  # one client's
    local, ids = renumber(batch, marked, {name: table.rows for name, table in marked.items()})
    held = {name: rows[0][rows[0] < marked[name].rows] for name, rows in ids.items()}

    def loss(params, columns):
        what = f"the loss of term '{term.name}' of a client that holds only its own rows"
        return attempt(what, lambda: np.asarray(term.loss(params, columns), np.float32))

    expected = loss(x, {name: column[0] for name, column in batch.items()})
    named = {c: len(held[n]) for n, table in marked.items() for c in table.columns}
    for reverse in (False, True):
        order = slice(None, None, -1 if reverse else 1)
        own = restrict(Broadcast(x), {name: rows[order] for name, rows in held.items()}).x
        columns = {
            name: named[name] - 1 - column[0] if reverse and name in named else column[0]
            for name, column in local.items()
        }
        if not np.allclose(expected, loss(own, columns), rtol=1e-3, atol=1e-5, equal_nan=True):
            raise MixflError(
                f"the loss of term '{term.name}' is another one when {', '.join(marked)} has only "
                "the rows that the batch names: use it only as "
                f"params[...][batch['{marked[next(iter(marked))].columns[0]}']] (no other rows), "
                "and these columns for nothing else (another table, a mask), or leave out rows=..."
            )


def _shape(value) -> str:
    return f"shape {value.shape}" if hasattr(value, "shape") else f"a {type(value).__name__}"


def attempt(name: str, function, hint: str = ""):
    """Calls a function of the user's. Its error becomes a message with the user's file and line."""
    try:
        return function()
    except MixflError:
        raise
    except Exception as error:
        raise MixflError(f"{name} failed: {_describe(error)}{hint}") from error


def _describe(error: Exception) -> str:
    """The error's first line, and the line of the user's code that it came from."""
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

"""`mixfl check`: the paper's debugging aid (Appendix A, K = 1) on the user's own problem.

With one local step and the same batches the algorithms must agree in known ways. Each term is
checked alone first: a loss that breaks the contract breaks the identities too, and the user can
only fix the loss.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms import ALGORITHMS
from mixfl.algorithms.contract import Batches, Broadcast, ClientFeed
from mixfl.algorithms.steps import client_update, gradient
from mixfl.engine import Simulator
from mixfl.engine.params import check_params
from mixfl.engine.preflight import attempt, check_loss, check_purity, check_rows
from mixfl.engine.purity import ImpureLoss
from mixfl.errors import MixflError
from mixfl.frozen import frozen_arrays, with_arrays
from mixfl.model_state import carries_state
from mixfl.problem import Central, Problem, Term
from mixfl.randomness import takes_key, trial_batch
from mixfl.settings import SENT_EXACTLY, Settings

TOLERANCE = 1e-3  # of the step's length, in float32
COHORT = 20
BATCH = 8
STATISTICS = (
    "the loss uses batch statistics (batch norm, in-batch negatives, a mean over the batch): use a "
    "norm without them, such as layer or group norm (mixfl.pytorch.with_group_norm converts a "
    "PyTorch module)"
)
KEY_OF_ANOTHER = (
    "the loss uses one example's key for others: draw for each example with its own key (jax.vmap, "
    f"mixfl.per_example); or {STATISTICS}"
)


class Finding(NamedTuple):
    good: bool
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.good else 'FAIL'}  {self.what:<58} {self.detail}"


def check(problem: Problem, s: Settings) -> tuple[list[str], bool]:
    """Lines to print, and whether all checks passed."""
    return said(list(check_problem(problem, s)))


def said(findings: list[Finding]) -> tuple[list[str], bool]:
    bad = [f for f in findings if not f.good]
    verdict = (
        f"All {len(findings)} checks passed."
        if not bad
        else f"{len(bad)} of {len(findings)} checks failed; fix the first one first."
    )
    return [*map(str, findings), verdict], not bad


def check_problem(problem: Problem, s: Settings) -> Iterator[Finding]:
    s = Settings(
        seed=s.seed, client_lr=s.at(0).client_lr, local_steps=1, weighting="uniform", rounds=2,
        cohort_size=min([s.cohort_size, COHORT, *(len(t.clients) for t in problem.populations)]),
        client_batch=min(s.client_batch, BATCH),
        central_batch=min([BATCH, *(len(t.examples) for t in problem.central if t.examples)]),
    )  # fmt: skip
    problem = problem.with_equal_populations()
    x = attempt("init", lambda: problem.init(jax.random.key(s.seed)))
    check_params(x)
    near = perturbed(x)  # an initial model can be a special point, such as 0
    well = True
    for term in problem.terms:
        for finding in check_term(term, x, near, s):
            well &= finding.good
            yield finding
    if well and problem.state is None:
        yield from identities(dataclasses.replace(problem, init=lambda _: near), s)


def perturbed(x):
    leaves, structure = jax.tree.flatten(x)
    rng = np.random.default_rng(0)
    moved = [a + 0.1 * rng.standard_normal(np.shape(a)).astype(a.dtype) for a in leaves]
    return jax.tree.unflatten(structure, moved)


def check_term(term: Term, x, near, s: Settings) -> Iterator[Finding]:
    """What a term's loss must satisfy; a mistake is reported before others that it causes."""
    name = f"'{term.name}'"
    what = f"{name}: one loss per example" if term.examples else f"{name}: one number"
    pure = f"{name}: the same inputs give the same loss"
    try:
        check_loss(term, x)
        check_purity(term, x, lambda: x)
    except ImpureLoss as error:
        yield Finding(False, pure, str(error))
        return
    except MixflError as error:
        yield Finding(False, what, str(error))
        return
    yield Finding(True, what, ". ".join(getattr(term.loss, "notes", ())))
    if term.examples is None:
        batch = Batches(None, jnp.ones(1))
        loss, g = attempt(f"the loss of term {name}", lambda: gradient(term, x, batch))
        yield _finite(name, loss, g)
        return

    n = min(len(term.examples), BATCH)
    rows = np.random.default_rng(s.seed).choice(len(term.examples), n, replace=False)
    data = trial_batch(term, rows)
    frozen = frozen_arrays(term)
    of = jax.jit(lambda frozen, x, batch: gradient(with_arrays(term, frozen), x, batch))
    grad = functools.partial(of, frozen)
    whole = Batches(data, np.ones(n, np.float32))
    both = attempt(f"the loss of term {name}", lambda: (grad(x, whole), grad(near, whole)))
    finding = min((_finite(name, loss, g) for loss, g in both), key=lambda f: f.good)
    yield finding
    if not finding.good:
        return

    x = near
    loss = (lambda *a: term.loss(*a)[0]) if carries_state(term.loss) else term.loss
    together = np.asarray(loss(x, data))
    if not carries_state(term.loss):  # that it depends on the batch is what a state is for
        finding = _by_itself(term, x, data, together)
        yield finding
        if not finding.good:
            return
    again = np.asarray(loss(x, data))
    yield Finding(
        bool((again == together).all()), pure,
        "" if (again == together).all() else "the loss draws without a key: it must be pure",
    )  # fmt: skip
    if isinstance(term, Central):
        return
    yield _padding(term, x, s, data, n)
    if term.rows:
        try:
            check_rows(term, x)
            wrong = ""
        except MixflError as error:
            wrong = str(error)
        yield Finding(not wrong, f"{name}: the rows that a batch names are all it uses", wrong)


def _finite(name: str, loss, g) -> Finding:
    bad = [
        jax.tree_util.keystr(path) or "params"
        for path, leaf in jax.tree_util.tree_leaves_with_path(g)
        if not bool(jnp.isfinite(leaf).all())
    ]
    if not bool(jnp.isfinite(loss)):
        bad.insert(0, "the loss itself")
    detail = f"not finite: {', '.join(bad)} (a square root, log or division at 0?)" if bad else ""
    return Finding(not bad, f"{name}: loss and gradient are finite", detail)


def _by_itself(term, x, data, together) -> Finding:
    """An example's loss is the same alone and in a batch."""
    what = f"'{term.name}': an example's loss does not depend on its batch"
    ones = [{k: a[i : i + 1] for k, a in data.items()} for i in range(len(together))]
    name = f"the loss of term '{term.name}' of one example"
    try:
        alone = attempt(name, lambda: np.array([np.asarray(term.loss(x, one))[0] for one in ones]))
    except MixflError as error:
        return Finding(False, what, f"{str(error).rstrip('.')}. {STATISTICS}")
    off = np.abs(together - alone).max() / (np.abs(alone).max() + 1e-12)
    good = bool(off < TOLERANCE)
    why = KEY_OF_ANOTHER if takes_key(term.loss) else STATISTICS
    return Finding(good, what, _deviation(off) + ("" if good else f": {why}"))


def _padding(term, x, s, data, n) -> Finding:
    """A client's update with padded rows and a padded step is the update without."""
    rows = {k: a[None] for k, a in data.items()}
    plain = ClientFeed(Batches(rows, np.ones((1, n), np.float32)))
    wide = {k: np.stack([np.concatenate([a, a[:1].repeat(n, 0)])] * 2) for k, a in data.items()}
    mask = np.zeros((2, 2 * n), np.float32)
    mask[0, :n] = 1
    frozen = frozen_arrays(term)
    of = jax.jit(lambda frozen, f: client_update(with_arrays(term, frozen), s, Broadcast(x), f))
    update = functools.partial(of, frozen)
    off = relative(update(plain).own, update(ClientFeed(Batches(wide, mask))).own)
    return Finding(off < TOLERANCE, f"'{term.name}': padding changes nothing", _deviation(off))


def identities(problem: Problem, s: Settings) -> Iterator[Finding]:
    """The identities between algorithms, over two rounds with K = 1 and the same batches."""
    if not problem.populations:
        return
    m, s = len(problem.terms), dataclasses.replace(s, **SENT_EXACTLY)
    x0, *pt = models("pt", problem, s)
    two_way = models("2wgt", problem, dataclasses.replace(s, merge_lr=1.0))
    step = jax.tree.map(lambda new, old: (m - 1) * (new - old), pt[0], x0)
    # Each of m terms carries the whole gradient; the other terms' part is from the round before.
    expected = jax.tree.map(jnp.add, pt[1], step)
    if problem.central:
        one_way = models("1wgt", problem, s)
        off = max(relative(one_way[1], pt[0], x0), relative(one_way[2], pt[1], pt[0]))
        yield Finding(off < TOLERANCE, "PT and 1-way take the same step", _deviation(off))
    off = max(relative(two_way[1], pt[0], x0), relative(two_way[2], expected, pt[0]))
    what = f"2-way takes the {'doubled' if m == 2 else f'{m}-fold'} and lagged one"
    yield Finding(off < TOLERANCE, what, _deviation(off))
    if problem.central:
        terms = [
            dataclasses.replace(t, weight=0.0) if isinstance(t, Central) else t
            for t in problem.terms
        ]
        without = dataclasses.replace(problem, terms=terms)
        fed_avg = models("fedavg", without, s)
        for name in ("pt", "1wgt"):
            off = relative(models(name, without, s)[2], fed_avg[2], fed_avg[1])
            what = f"f_c = 0: {name} is FedAvg"
            yield Finding(off < TOLERANCE, what, _deviation(off))


def models(algorithm: str, problem: Problem, s: Settings) -> list:
    """The model at the start and after each of two rounds. Compiled, whatever is faster: models
    are compared, and two ways to compute them differ by rounding."""
    s = dataclasses.replace(s, loops="compiled")
    simulator = Simulator(problem, ALGORITHMS[algorithm].build(problem, s), s)
    state = simulator.init()
    xs = [jax.tree.map(np.array, state.x)]
    for result in simulator.rounds(state, 0, s.rounds):
        xs.append(jax.tree.map(np.array, result.state.x))
    return xs


def relative(a, b, origin=None) -> float:
    """The largest difference of a and b, relative to the largest step, beyond rounding of x."""
    from jax.flatten_util import ravel_pytree

    flat_a, flat_b = (np.asarray(ravel_pytree(t)[0], np.float64) for t in (a, b))
    start = 0.0 if origin is None else np.asarray(ravel_pytree(origin)[0], np.float64)
    step = np.abs(flat_b - start).max()
    rounding = 4 * np.finfo(np.float32).eps * (0 if origin is None else np.abs(flat_b))
    off = np.maximum(np.abs(flat_a - flat_b) - rounding, 0).max()
    if not np.isfinite(off):
        return float("inf")
    return float(off / step) if step > 0 else float(off > 0)


def _deviation(off: float) -> str:
    return f"largest deviation {off:.1e}"

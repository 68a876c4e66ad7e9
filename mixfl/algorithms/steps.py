"""The paper's verbs: gradient at a point, local steps, aggregation, server step."""

import contextlib
import contextvars
import functools

import jax
import jax.numpy as jnp

from mixfl.algorithms.contract import (
    Batches,
    CentralUpdate,
    ClientFeed,
    Draw,
    Message,
    Sums,
    Upload,
)
from mixfl.errors import MixflError
from mixfl.forms.lookups import Lookups, looked_up
from mixfl.optimizers import Optimizer, make
from mixfl.problem import Central, Problem, Term
from mixfl.settings import Settings

# Up to this many steps are written out one by one in the compiled program: faster than a loop.
UNROLL = 4

_after_chunk: contextvars.ContextVar = contextvars.ContextVar("after_chunk", default=None)


@contextlib.contextmanager
def after_each_chunk(call):
    """Programs traced within call `call()` after each chunk of a batch drawn at the server."""
    token = _after_chunk.set(call)
    try:
        yield
    finally:
        _after_chunk.reset(token)


def add(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)


def scale(factor, tree):
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def gradient(term: Term, x, batch: Batches):
    """w_j f_j(x; B) and its gradient, the mean taken over the unmasked examples of the batch."""
    whole = None
    if isinstance(term.loss, Lookups):
        term, x, whole = looked_up(term, x, batch.data)
    loss, g = jax.value_and_grad(lambda x: _loss(term, x, batch, jnp.sum(batch.mask)))(x)
    return loss, whole(g) if whole else g


def _loss(term: Term, x, batch: Batches, count):
    if batch.data is None:
        return term.weight * term.loss(x)
    losses = term.loss(x, batch.data)
    if losses.shape != batch.mask.shape:
        raise MixflError(
            f"the loss of term '{term.name}' returned shape {losses.shape} for a batch of "
            f"{batch.mask.shape[0]} examples: it must return one loss per example, no mean or sum."
        )
    return term.weight * jnp.sum(losses * batch.mask) / jnp.maximum(count, 1)


def chunked_gradient(term: Term, x, batch: Batches):
    """As `gradient`, for a batch [chunks, chunk, ...]: the same sum, one chunk at a time."""
    if batch.mask.shape[0] == 1:
        return gradient(term, x, jax.tree.map(lambda a: a[0], batch))
    count, tell = jnp.sum(batch.mask), _after_chunk.get()

    def part(total, chunk):
        loss, g = jax.value_and_grad(lambda x: _loss(term, x, chunk, count))(x)
        if tell is not None:  # it gets the loss only so as to wait for it
            jax.debug.callback(lambda _: tell(), loss)
        return add(total, (loss, g)), None

    return jax.lax.scan(part, (jnp.zeros(()), zeros(x)), batch)[0]


def descend(grad, opt: Optimizer, x, batches, opt_state, active=None, aug=None, collect=False):
    """x_{k+1} = Opt(x_k, grad(x_k, B_k) + aug) over the steps of `batches`.

    A step whose `active` [steps] is 0 is padding and changes nothing. Returns the last x and
    optimizer state, the sum of the gradients without `aug` (if `collect`) and of the losses.
    """

    def step(carry, inputs):
        x, opt_state, grads, loss_sum = carry
        batch, active = inputs
        loss, g = grad(x, batch)
        total = g if aug is None else add(aug, g)  # g may have Additions
        x, opt_state = opt.step(x, total, opt_state, active)
        if active is not None:
            # Not a product: in a padded step they need not be finite.
            loss, g = jax.tree.map(lambda a: jnp.where(active > 0, a, 0), (loss, g))
        return (x, opt_state, add(grads, g) if collect else None, loss_sum + loss), None

    carry = (x, opt_state, zeros(x) if collect else None, jnp.zeros(()))
    inputs = (batches, active)
    steps = jax.tree.leaves(inputs)[0].shape[0]
    if steps <= UNROLL:
        for k in range(steps):
            carry, _ = step(carry, jax.tree.map(lambda a, k=k: a[k], inputs))
        return carry
    return jax.lax.scan(step, carry, inputs)[0]


def client_update(term: Term, s: Settings, message: Message, feed: ClientFeed, grad=None,
                  collect=False) -> Upload:  # fmt: skip
    """The paper's ClientUpdate: K_i steps of a fresh ClientOpt from x.

    `grad(x, ClientFeed of one step)` is the client's own gradient, by default that of its term.
    """
    grad = grad or (lambda x, feed: gradient(term, x, feed.batches))
    opt = make(s.client_opt, s.client_lr)
    mask = feed.batches.mask
    active = jnp.any(mask > 0, axis=1).astype(jnp.float32)
    x, _, grads, loss = descend(
        grad, opt, message.x, feed, opt.init(message.x), active, message.aug, collect
    )
    steps = jnp.sum(active)
    weight = {
        "examples": lambda: jnp.sum(mask),
        "steps": lambda: steps,
        "uniform": lambda: jnp.minimum(steps, 1.0),
    }[s.weighting]()
    delta = jax.tree.map(lambda new, old: new - old, x, message.x)
    return Upload(delta, weight, steps, grads, loss)


def weighted_summand(upload: Upload) -> Sums:
    """What FedAvg needs of one client."""
    weighted = scale(upload.weight, upload.delta)
    return Sums(
        weighted, upload.weight, None, upload.grads, upload.steps, upload.weight * upload.steps,
        upload.loss, jnp.minimum(upload.steps, 1.0),
    )  # fmt: skip


def mean_delta(sums: Sums):
    """Delta = sum p_i Delta_i / sum p_i, and 0 where no client is left."""
    return scale(1 / jnp.maximum(sums.weight, 1e-30), sums.weighted)


def central_update(term: Central, s: Settings, x, batches: Batches, opt_state, aug=None,
                   collect=False) -> CentralUpdate:  # fmt: skip
    """J steps of CentralOpt on the term from x; the optimizer keeps its state."""
    grad = functools.partial(chunked_gradient, term)
    opt = make(s.central_opt, s.eta_c)
    x_c, opt_state, grads, loss = descend(grad, opt, x, batches, opt_state, None, aug, collect)
    delta = jax.tree.map(lambda new, old: new - old, x_c, x)
    return CentralUpdate(delta, opt_state, grads, loss / batches.mask.shape[0])


def central_shares(problem: Problem) -> list[float]:
    """The part of the central terms that each population carries where clients compute with
    them: in full at each, they would count as often as there are populations."""
    weights = [term.weight for term in problem.populations]
    return [w / sum(weights) if sum(weights) else 1 / len(weights) for w in weights]


def central_batches(problem: Problem, drawn) -> list[Batches]:
    return [b for t, b in zip(problem.terms, drawn, strict=True) if isinstance(t, Central)]


def draw_central(problem: Problem, s: Settings, steps: int, auto: int) -> tuple[Draw | None, ...]:
    """Batches of |B_c| for each central term; `auto` is the batch where the settings say so."""
    return tuple(
        Draw(steps, central_batch(t, s, auto)) if isinstance(t, Central) else None
        for t in problem.terms
    )


def central_batch(term: Term, s: Settings, auto: int) -> int:
    if term.examples is None:
        return 1
    n = len(term.examples)
    if s.central_batch != "auto" and s.central_batch > n:
        raise MixflError(
            f"central_batch = {s.central_batch}, but the term '{term.name}' has only {n} examples: "
            f"lower it to at most {n}."
        )
    return min(n, auto if s.central_batch == "auto" else s.central_batch)


def report(problem: Problem, sums, central=()) -> dict:
    """Info that every algorithm gives: each term's loss (its weight included), and counts."""
    info = {}
    for population, s in zip(problem.populations, sums, strict=True):
        info[f"train/{population.name}/loss"] = s.loss / jnp.maximum(s.steps, 1)
        info[f"clients/{population.name}"] = s.clients
    for term, c in zip(problem.central, central, strict=False):  # none in fedavg and 1wgt
        info[f"train/{term.name}/loss"] = c.loss
    return info

"""The paper's verbs: gradient at a point, local steps, aggregation, server step."""

import functools

import jax
import jax.numpy as jnp

from mixfl.algorithms.client_opt import ClientOpt, client_opt, plain_steps, shortened
from mixfl.algorithms.contract import (
    Batches,
    Broadcast,
    CentralUpdate,
    ClientFeed,
    Draw,
    Drawn,
    Sums,
    Upload,
)
from mixfl.algorithms.loops import once_traced, scan, scan_first
from mixfl.errors import MixflError
from mixfl.model_state import MASK, carries_state
from mixfl.optimizers import Optimizer, make
from mixfl.problem import Central, Problem, Term
from mixfl.settings import Settings
from mixfl.trees import Model

# Up to this many steps are written out one by one in the compiled program: faster than a loop, if
# the model has few arrays and a step few operations. Otherwise a loop is as fast, and compiles
# sooner.
UNROLL = 4
FEW_ARRAYS = 16
FEW_OPERATIONS = 400


def add(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *trees)


def scale(factor, tree):
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def difference(new, old):
    return jax.tree.map(lambda a, b: a - b, new, old)


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def at(tree, k: int):
    return jax.tree.map(lambda a: a[k], tree)


def gradient(term: Term, x, batch: Batches | Drawn):
    """w_j f_j(x; B) and its gradient, the mean taken over the unmasked examples of the batch."""
    return _gradient(term, x, batch, jnp.sum(batch.mask))


def _gradient(term: Term, x, batch, count):
    if batch.data is None:
        return jax.value_and_grad(lambda x: term.weight * term.loss(x))(x)

    def mean(losses):
        if losses.shape != batch.mask.shape:
            raise MixflError(
                f"the loss of term '{term.name}' returned shape {losses.shape} for a batch of "
                f"{batch.mask.shape[0]} examples: it must return one loss per example, no mean or "
                "sum."
            )
        return term.weight * jnp.sum(losses * batch.mask) / jnp.maximum(count, 1)

    if carries_state(term.loss):
        return _with_change_of_state(term.loss, x, batch, mean)
    # A form's loss has its own, faster gradient (see forms/).
    own_way = getattr(term.loss, "gradient_in_form", None)
    if own_way is not None:
        return own_way(mean, x, batch)
    return jax.value_and_grad(lambda x: mean(term.loss(x, batch.data)))(x)


def _with_change_of_state(loss, x, batch, mean):
    """In place of the state's gradient: the old state minus the next one (model_state.py)."""

    def value(x):
        losses, state = loss(x, {**batch.data, MASK: batch.mask})
        return mean(losses), state

    (value_at_x, state), g = jax.value_and_grad(value, has_aux=True)(x)
    return value_at_x, Model(g.params, difference(x.state, state))


def joined(terms, trees):
    """The sum of the terms' gradients or changes; of the state, the mean by the terms' weights."""
    total = add(*trees)
    if not isinstance(total, Model):
        return total
    weights = [float(t.weight) if carries_state(t.loss) else 0.0 for t in terms]
    every = sum(weights) or 1.0
    parts = [scale(w / every, tree.state) for w, tree in zip(weights, trees, strict=True)]
    return Model(total.params, add(*parts))


def chunked_gradient(term: Term, x, drawn: Drawn):
    """Like `gradient`, for a batch [chunks, chunk, ...]: the same sum, one chunk at a time."""
    if drawn.mask.shape[0] == 1:
        return gradient(term, x, jax.tree.map(lambda a: a[0], drawn))
    if carries_state(term.loss):
        raise MixflError(
            f"the batches of '{term.name}' are cut into {drawn.mask.shape[0]} chunks, and its loss "
            "has a state, which depends on the whole batch: set central_chunk = central_batch."
        )
    count = jnp.sum(drawn.mask)

    def part(total, chunk):
        loss, g = _gradient(term, x, chunk, count)
        if drawn.after_chunk is not None:
            drawn.after_chunk(loss)
        return add(total, (loss, g)), None

    return scan(part, (jnp.zeros(()), zeros(x)), drawn)[0]


def gradient_at_x(term: Term, x, feed: ClientFeed):
    """The client's gradient at x on all examples that it processes in the round; 0 if none."""
    data, mask = feed.batches.data, feed.batches.mask
    g = chunked_gradient(term, x, Drawn(data, mask))[1]
    # Not a product: in a padded place it may not be finite.
    return jax.tree.map(lambda a: jnp.where(jnp.any(mask > 0), a, 0), g)


def written_out(steps: int, x, operations: int = 0) -> bool:
    """Are the steps written out in the program? Otherwise they are a loop."""
    few = len(jax.tree.leaves(x)) <= FEW_ARRAYS and operations <= FEW_OPERATIONS
    return few and steps <= UNROLL


def descend(
    grad, opt: Optimizer | ClientOpt, x, batches, opt_state, active=None, aug=None, collect=False
):
    """x_{k+1} = Opt(x_k, grad(x_k, B_k) + aug) over the steps of `batches`.

    A step whose `active` [steps] is 0 is padding, comes after all others, and changes nothing (many
    steps are a loop that ends before the padding). Returns the last x and
    optimizer state, the sum of the gradients without `aug` (if `collect`) and of the losses.
    """

    def step(carry, inputs):
        x, opt_state, grads, loss_sum = carry
        batch, active = inputs
        loss, g = grad(x, batch)
        total = g if aug is None else add(aug, g)  # in this order: a form's g may not be an array
        x, opt_state = opt.step(x, total, opt_state, active)
        if active is not None:
            # Not a product: in a padded step they may not be finite.
            loss, g = jax.tree.map(lambda a: jnp.where(active > 0, a, 0), (loss, g))
        return (x, opt_state, add(grads, g) if collect else None, loss_sum + loss), None

    carry = (x, opt_state, zeros(x) if collect else None, jnp.zeros(()))
    inputs = (batches, active)
    steps = jax.tree.leaves(inputs)[0].shape[0]
    if written_out(steps, x):
        once = once_traced(step, carry, at(inputs, 0))
        step = once.call
        if written_out(steps, x, once.operations):
            for k in range(steps):
                carry, _ = step(carry, at(inputs, k))
            return carry
    if active is None:
        return scan(step, carry, inputs)[0]
    return scan_first(jnp.sum(active > 0), step, carry, inputs)[0]


def client_update(term, s: Settings, broadcast: Broadcast, feed: ClientFeed, grad=None,
                  collect=False, after=None) -> Upload:  # fmt: skip
    """The paper's ClientUpdate: K_i steps of a fresh ClientOpt from x.

    `grad(x, ClientFeed of one step)` is the client's own gradient, by default that of its term.
    client_opt.py says what the settings add to a step. `after` changes the gradient after
    `grad_clip`.
    """
    s = s.of(term)
    mask = feed.batches.mask
    active = jnp.any(mask > 0, axis=1).astype(jnp.float32)
    # A loss may take plain steps by itself, all in one call.
    at_once = getattr(term.loss, "steps_in_form", None)
    if at_once and plain_steps(s) and s.grad_clip == "off" and not (grad or after or collect):
        x, loss = at_once(term.weight, s.client_lr, broadcast.x, feed.batches, broadcast.aug)
        grads = None
    else:
        own = shortened(s, grad or (lambda x, feed: gradient(term, x, feed.batches)))
        opt = client_opt(s, broadcast.x)

        def changed(x, feed):
            loss, g = own(x, feed)
            return loss, after(g) if after else g

        x, _, grads, loss = descend(
            changed, opt, broadcast.x, feed._replace(state=None),  # it has no axis of steps
            opt.init(broadcast.x), active, broadcast.aug, collect,
        )  # fmt: skip
    steps = jnp.sum(active)
    weight = {
        "examples": lambda: jnp.sum(mask),
        "steps": lambda: steps,
        "uniform": lambda: jnp.minimum(steps, 1.0),
    }[s.weighting]()
    delta = difference(x, broadcast.x)
    return Upload(own_part(s, broadcast, delta, steps), weight, steps, grads, loss)


# The augmenting gradient comes from the server. The client takes out what that gradient alone
# changes, and the server puts it back. So an upload is the client's own part: the part to clip,
# noise, compress or mask.


def own_part(s: Settings, broadcast: Broadcast, delta, steps):
    """u_i = Delta_i without what K_i steps on the augmenting gradient alone would change."""
    if broadcast.aug is None:
        return delta
    if plain_steps(s):
        return jax.tree.map(
            lambda d, a: (d + s.client_lr * steps * a).astype(d.dtype), delta, broadcast.aug
        )
    drift = with_drift(s, broadcast).drift
    last = jnp.maximum(steps, 1).astype(jnp.int32) - 1
    return jax.tree.map(lambda d, all: jnp.where(steps > 0, d - all[last], d), delta, drift)


def with_drift(s: Settings, broadcast: Broadcast) -> Broadcast:
    """With the change after 1, 2, ... K steps of ClientOpt on the augmenting gradient alone, unless
    plain SGD makes that trivial. It is the same for all clients of a population."""
    if broadcast.aug is None or broadcast.drift is not None or plain_steps(s):
        return broadcast
    opt = client_opt(s, broadcast.x)

    def step(carry, _):
        x, opt_state = opt.step(carry[0], broadcast.aug, carry[1])
        return (x, opt_state), difference(x, broadcast.x)

    start = (broadcast.x, opt.init(broadcast.x))
    return broadcast._replace(drift=jax.lax.scan(step, start, length=s.local_steps)[1])


def carried(s: Settings, broadcast: Broadcast, by_steps):
    """The sum over clients of p_i times what the augmenting gradient changed in K_i steps."""
    if plain_steps(s):
        k = jnp.arange(1, len(by_steps) + 1)
        return scale(-s.client_lr * jnp.sum(by_steps * k), broadcast.aug)
    drift = with_drift(s, broadcast).drift
    own = by_steps[: s.local_steps]  # other populations may take more steps
    return jax.tree.map(lambda all: jnp.tensordot(own, all, axes=1), drift)


def weighted_summand(s: Settings, upload: Upload) -> Sums:
    """What one client adds to the sums of FedAvg."""
    most = s.most_steps or s.local_steps
    by_steps = jnp.where(jnp.arange(1, most + 1) == upload.steps, upload.weight, 0.0)
    return Sums(
        scale(upload.weight, upload.own), upload.weight, None, upload.grads, upload.steps,
        by_steps, upload.loss, jnp.minimum(upload.steps, 1.0), upload.extra,
    )  # fmt: skip


def mean_delta(s: Settings, broadcast: Broadcast, sums: Sums):
    """Delta = sum p_i Delta_i / sum p_i, or 0 if no client is left. `s` is the population's."""
    total = sums.weighted
    if broadcast.aug is not None:
        total = add(total, carried(s, broadcast, sums.by_steps))
    return scale(1 / jnp.maximum(sums.weight, 1e-30), total)


def central_update(term: Central, s: Settings, x, drawn: Drawn, opt_state, aug=None,
                   collect=False) -> CentralUpdate:  # fmt: skip
    """J steps of CentralOpt on the term from x; the optimizer keeps its state."""
    grad = functools.partial(chunked_gradient, term)
    opt = make(s.central_opt, s.eta_c)
    x_c, opt_state, grads, loss = descend(grad, opt, x, drawn, opt_state, None, aug, collect)
    return CentralUpdate(difference(x_c, x), opt_state, grads, loss / drawn.mask.shape[0])


def central_shares(problem: Problem) -> dict[str, float]:
    """Each population's share of the central terms, for algorithms whose clients use them. In full
    at every population, the central terms would count once per population."""
    weights = {term.name: term.weight for term in problem.populations}
    total = sum(weights.values())
    return {name: w / total if total else 1 / len(weights) for name, w in weights.items()}


def central_batches(problem: Problem, drawn) -> list[Drawn]:
    return [b for t, b in zip(problem.terms, drawn, strict=True) if isinstance(t, Central)]


def draw_central(problem: Problem, s: Settings, steps: int, auto: int) -> tuple[Draw | None, ...]:
    """Batches of |B_c| for each central term; `auto` is the batch if the settings say `auto`."""
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
    """Info that every algorithm returns: each term's loss (including its weight), and counts."""
    info = {}
    for population, s in zip(problem.populations, sums, strict=True):
        info[f"train/{population.name}/loss"] = s.loss / jnp.maximum(s.steps, 1)
        info[f"clients/{population.name}"] = s.clients
    for term, c in zip(problem.central, central, strict=False):  # none in fedavg and 1wgt
        info[f"train/{term.name}/loss"] = c.loss
    return info

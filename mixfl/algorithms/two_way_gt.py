"""2-way Gradient Transfer: Parallel Training in which each term's steps add the gradients that
the other terms had in the round before.

Every delta then carries the whole mixed gradient, and the merge adds them: with m terms the
step is m times as long, so merge_lr defaults to 1/m.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mixfl.algorithms.client_opt import plain_steps
from mixfl.algorithms.contract import (
    AUTO_KEYS,
    CENTRAL_KEYS,
    CLIENT_KEYS,
    MERGE_KEYS,
    Algorithm,
    Broadcast,
    algorithm,
)  # fmt: skip
from mixfl.algorithms.marks import own_loss_only
from mixfl.algorithms.parallel_training import State as PTState
from mixfl.algorithms.parallel_training import parallel_training
from mixfl.algorithms.steps import (
    add,
    central_update,
    client_update,
    difference,
    scale,
    weighted_summand,
    zeros,
)  # fmt: skip
from mixfl.optimizers import is_plain
from mixfl.problem import Federated, Params, Problem
from mixfl.settings import Settings
from mixfl.trees import without_state


class State(NamedTuple):
    pt: PTState
    gt: tuple  # per term, its gradient in the last round (the paper's g~)

    @property
    def x(self) -> Params:
        return self.pt.x


@algorithm(
    "2wgt", CLIENT_KEYS, CENTRAL_KEYS, AUTO_KEYS, MERGE_KEYS,
    merge_lr=lambda problem, s: 1 / len(problem.terms),
)  # fmt: skip
def two_way_gt(problem: Problem, s: Settings) -> Algorithm:
    """2-way Gradient Transfer: clients and server train with each other's gradients.

    >>> mixfl.two_way_gt(client_lr=0.2, merge_lr=0.5).settings
    {'client_lr': 0.2, 'merge_lr': 0.5}
    """
    terms = problem.terms
    # With plain SGD the gradients follow from the deltas. Otherwise they are summed on the way.
    uniform = all(s.of(term).weighting == "uniform" for term in problem.populations)
    collect_c = not is_plain(s.central_opt)

    def augment(gt):
        """Per term, the sum of the other terms' gradients."""
        if len(gt) == 1:
            return [None]
        return [add(*(g for k, g in enumerate(gt) if k != j)) for j in range(len(gt))]

    def init(x):
        return State(parallel.init(x), tuple(zeros(x) for _ in terms))

    def broadcast(state, drawn):
        return [
            Broadcast(state.x, aug)
            for term, aug in zip(terms, augment(state.gt), strict=True)
            if isinstance(term, Federated)
        ]

    @own_loss_only
    def client(term, broadcast, feed):
        return client_update(term, s, broadcast, feed, collect=not plain_steps(s.of(term)))

    @own_loss_only
    def summand(upload):
        # sum u_i is needed as well as sum p_i u_i, unless they are equal or gradients are sent.
        sums = weighted_summand(s, upload)
        same = upload.grads is not None or uniform
        return sums if same else sums._replace(unweighted=upload.own)

    def central(state, drawn):
        aug = augment(state.gt)
        opt_states = iter(state.pt.central)
        return [
            central_update(term, s, state.x, batches, next(opt_states), aug_j, collect_c)
            for term, batches, aug_j in zip(terms, drawn, aug, strict=True)
            if not isinstance(term, Federated)
        ]

    def update(state, broadcasts, sums, central):
        merged, info = parallel.update(state.pt, broadcasts, sums, central)
        aug = augment(state.gt)
        fed, cent = iter(sums), iter(central)
        gt = tuple(
            without_state(
                federated_gt(s.of(term), next(fed), gt_j)
                if isinstance(term, Federated)
                else central_gt(next(cent), aug_j)
            )
            for term, aug_j, gt_j in zip(terms, aug, state.gt, strict=True)
        )
        return State(merged, gt), info

    def central_gt(c, aug):
        """gt_c' = -Delta_c / (eta_c J) - gt_f, or the mean of the gradients themselves."""
        if collect_c:
            return scale(1 / s.J, c.grads)
        mean = scale(-1 / (s.eta_c * s.J), c.delta)
        return mean if aug is None else difference(mean, aug)

    def federated_gt(s, sums, gt):
        """gt_f' = -sum Delta_i / (eta sum K_i) - gt_c. It stays as it was if no client took a step.

        Each client has already taken gt_c out of its Delta_i, which leaves u_i.
        """
        steps = jnp.maximum(sums.steps, 1)
        if sums.grads is not None:
            new = scale(1 / steps, sums.grads)
        else:
            own = sums.weighted if sums.unweighted is None else sums.unweighted
            new = scale(-1 / (s.client_lr * steps), own)
        return jax.tree.map(
            lambda new, old: jnp.where(sums.steps > 0, new.astype(old.dtype), old), new, gt
        )

    parallel = parallel_training.build(problem, s)
    return parallel._replace(
        init=init, broadcast=broadcast, client=client, summand=summand, central=central,
        update=update,
    )  # fmt: skip

"""A slow reference of every algorithm in float64 NumPy: the judge of the fast simulator.

It is written from the paper's Algorithms 1 and 2 and Appendix A, and from section 2 of the
design, not from the code that it judges. Nothing is padded, masked, batched over clients or
compiled: a client is a Python loop over its own list of batches, and a model is one vector x.

Chance is not part of it. Whoever calls draws the data; a `Round` holds the batches of one round,
and `train` says which models follow from them.

    f(x) = sum over the terms j of w_j f_j(x)

Every gradient below contains its term's weight w_j. An optimizer takes what the paper gives it:
a gradient at the clients and for the central steps, a negative delta for ServerOpt and MergeOpt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

Model = np.ndarray  # [d], as are its gradients and deltas
Batch = Any  # what Term.loss takes; None for a regularizer


@dataclass(frozen=True)
class Term:
    """One summand w_j f_j of the mixed loss."""

    kind: str  # "federated" or "central"
    # (x, batch) -> per-example losses [n], gradient [d] of their plain mean;
    # of a regularizer, (x, None) -> the loss, its gradient [d]
    loss: Callable
    weight: float = 1.0  # w_j


@dataclass(frozen=True)
class Settings:
    """A learning rate may be a function of the round, 0, 1, ..."""

    client_lr: Any
    server_lr: Any = 1.0
    central_lr: Any = None  # None: client_lr * server_lr
    merge_lr: Any = None  # None: 1/m for 2wgt with m terms, otherwise 1
    client_opt: str = "sgd"  # "sgd", "momentum" or "adam", as the three that follow
    server_opt: str = "sgd"
    central_opt: str = "sgd"
    merge_opt: str = "sgd"
    weighting: str = "examples"  # p_i: "examples", "steps" or "uniform"
    clip: float | str = "quantile"  # largest norm per step of a client's own part, or "off"
    pretrain_rounds: int = 0
    grad_clip: float | str = "off"  # largest norm of a client's own gradient
    weight_decay: float = 0.0  # decoupled: a client's step also takes off eta weight_decay x
    proximal: float = 0.0  # mu of FedProx: a client's step adds mu (x - x_t) to its gradient
    momentum: float = 0.9  # of mimelite
    correction: str = "client"  # of fedclg: at the "client" or at the "server"

    # What populations have of their own, by the place of their term: {0: {"client_lr": 0.1}}.
    apart: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, j: int) -> Settings:
        return replace(self, **self.apart.get(j, {}))

    @property
    def determined(self) -> bool:
        """Does a client's change say what the sum of its gradients was?"""
        return self.client_opt == "sgd" and not self.proximal and not self.weight_decay


@dataclass(frozen=True)
class Round:
    """The data of one round."""

    clients: list  # [federated term][client of the cohort][step] -> batch
    drawn: list  # [term][step] -> batch drawn at the server; None: a regularizer, or not needed
    shares: list | None = None  # [federated term][client][step] -> batch of central examples
    who: list | None = None  # [federated term][client of the cohort] -> its number
    all_clients: list | None = None  # [federated term] -> how many clients there are
    central_steps: int = 1  # the number of steps where nothing is drawn: J, for the oracle K


def train(
    algorithm: str, terms: list[Term], x0, settings: Settings, rounds: list[Round]
) -> list[Model]:
    """The model after each round."""
    assert all(term.kind in ("federated", "central") for term in terms)
    return ALGORITHMS[algorithm](terms, np.array(x0, dtype=np.float64), settings, rounds)


# Optimizers ---------------------------------------------------------------------------------------


class Optimizer:
    """An optimizer together with its state: make a new one to start fresh."""

    def __init__(self, name: str, lr: float):
        if name not in ("sgd", "momentum", "adam"):
            raise ValueError(f"unknown optimizer {name!r}: expected sgd, momentum or adam")
        self.name, self.lr = name, lr
        self.t, self.mean, self.square = 0, 0.0, 0.0

    def step(self, x: Model, g: Model) -> Model:
        if self.name == "sgd":
            return x - self.lr * g
        if self.name == "momentum":
            self.mean = 0.9 * self.mean + g
            return x - self.lr * self.mean
        self.t += 1
        self.mean = 0.9 * self.mean + 0.1 * g
        self.square = 0.999 * self.square + 0.001 * g**2
        mean_hat = self.mean / (1 - 0.9**self.t)
        square_hat = self.square / (1 - 0.999**self.t)
        return x - self.lr * mean_hat / (np.sqrt(square_hat) + 1e-8)


def in_round(s: Settings, t: int) -> Settings:
    """With the rates of a round."""
    rates = {k: getattr(s, k) for k in ("client_lr", "server_lr", "central_lr", "merge_lr")}
    return replace(s, **{k: rate(t) for k, rate in rates.items() if callable(rate)})


def central_lr(s: Settings) -> float:
    return s.client_lr * s.server_lr if s.central_lr is None else s.central_lr


# The paper's verbs --------------------------------------------------------------------------------


def gradient(term: Term, x: Model, batch: Batch) -> Model:
    return term.weight * np.asarray(term.loss(x, batch)[1], dtype=np.float64)


def examples(term: Term, x: Model, batch: Batch) -> int:
    return np.size(term.loss(x, batch)[0])


def total(vectors: Iterable[Model], x: Model) -> Model:
    """Their sum; where there are none, a zero of the shape of x."""
    return sum(vectors, np.zeros_like(x))


class constant:  # noqa: N801
    """To add the same gradient in every step, which the server sent (or not: `none`)."""

    def __init__(self, g: Model, none: bool = False):
        self.g, self.none = g, none

    def __call__(self, *step) -> Model:
        return self.g


@dataclass(frozen=True)
class Steps:
    """What a client, or a central term, did in one round."""

    delta: Model  # from the first model to the last
    own: Model  # the sum of its own gradients, without what augmented them
    K: int  # steps
    n: int  # examples processed


def local_steps(term, x, batches, opt, augment) -> Steps:
    """The central steps of Algorithm 1. Step k adds augment(k, x_k)."""
    x_k, own, n = x, np.zeros_like(x), 0
    for k, batch in enumerate(batches):
        g = gradient(term, x_k, batch)
        own = own + g
        n = n + examples(term, x_k, batch)
        x_k = opt.step(x_k, g + augment(k, x_k))
    return Steps(x_k - x, own, len(batches), n)


def client_step(s: Settings, opt: Optimizer, x: Model, x_k: Model, g: Model) -> Model:
    """With FedProx's term and weight decay. The gradient g contains what was sent."""
    pulled = opt.step(x_k, g + s.proximal * (x_k - x))
    return pulled - s.client_lr * s.weight_decay * x_k


def client_update(term, x, batches, s, augment, sent: bool) -> Steps:
    """ClientUpdate of Algorithm 1. Step k adds augment(k, x_k), which the server sent, or else the
    client computed itself: then it is clipped too."""
    x_k, own, n, opt = x, np.zeros_like(x), 0, Optimizer(s.client_opt, s.client_lr)
    for k, batch in enumerate(batches):
        g = gradient(term, x_k, batch)
        more = augment(k, x_k)
        if not sent:
            g, more = g + more, 0.0
        if s.grad_clip != "off":
            g = g * min(1, s.grad_clip / max(np.linalg.norm(g), 1e-300))
        own = own + g
        n = n + examples(term, x_k, batch)
        x_k = client_step(s, opt, x, x_k, g + more)
    return Steps(x_k - x, own, len(batches), n)


def cohort(term, x, clients, s, augment) -> list[Steps]:
    """The clients that have data, each from x. Step k of client i adds augment(i, k, x_k)."""
    return [
        client_update(term, x, batches, s, partial(augment, i), isinstance(augment, constant))
        for i, batches in enumerate(clients)
        if batches
    ]


class Clip:
    """A population's: a client's own part, per step, is no longer than 3 times what the norms of
    the last 32 rounds came to: the median of each round's upper quartile, or the median of this
    round's, if it is larger. So is, by a limit of its own, the sum of gradients that is sent beside
    the change where ClientOpt is not plain SGD."""

    def __init__(self, s: Settings):
        self.s, self.before = s, ([], [])

    def __call__(self, x: Model, clients: list[Steps], augment, s: Settings) -> list[Steps]:
        self.s = s
        if self.s.clip == "off":
            return clients
        carried = [self.carried(x, i.K, augment) for i in clients]
        own = [i.delta - c for i, c in zip(clients, carried, strict=True)]
        short = self.shortened(0, own, clients, None if self.s.clip == "quantile" else self.s.clip)
        grads = [i.own for i in clients]
        if not self.s.determined:
            grads = self.shortened(1, grads, clients, None)
        return [
            Steps(c + u, g, i.K, i.n)
            for i, c, u, g in zip(clients, carried, short, grads, strict=True)
        ]

    def carried(self, x: Model, K: int, augment) -> Model:
        """What K steps on the gradient that was sent, and on nothing else, would have done."""
        if not isinstance(augment, constant) or augment.none:
            return np.zeros_like(x)
        opt, x_k = Optimizer(self.s.client_opt, self.s.client_lr), x
        for _ in range(K):
            x_k = client_step(self.s, opt, x, x_k, augment.g)
        return x_k - x

    def shortened(self, kind, vectors, clients, limit):
        norms = [np.linalg.norm(v) / i.K for v, i in zip(vectors, clients, strict=True)]
        before = self.before[kind]
        known = list(before[-32:])
        counted = sorted(n for n in norms if n > 0)
        if counted:
            before.append(counted[int(0.75 * len(counted) - 0.5)])
        if limit is None and known and counted:
            limit = 3 * max(np.median(known), counted[(len(counted) - 1) // 2])
        elif limit is None:
            limit = 3 * np.median(known or before or [np.inf])
        return [v * min(1, limit / max(n, 1e-300)) for v, n in zip(vectors, norms, strict=True)]


def aggregate(x, clients: list[Steps], s) -> Model:
    """Delta = sum p_i Delta_i / sum p_i, and 0 if no client took a step."""
    if not clients:
        return np.zeros_like(x)
    p = [{"examples": i.n, "steps": i.K, "uniform": 1}[s.weighting] for i in clients]
    return total((p_i * i.delta for p_i, i in zip(p, clients, strict=True)), x) / sum(p)


def average_gradient(
    done: list[Steps], determined: bool, lr: float, aug: Model, gt: Model
) -> Model:
    """gt' of 2wgt: the mean of a term's own gradients over all its steps (Appendix A).

    The deltas are summed without their weights p_i: that is what makes it a mean over steps.
    """
    K = sum(i.K for i in done)
    if K == 0:
        return gt
    if not determined:
        return total((i.own for i in done), gt) / K
    return -total((i.delta for i in done), gt) / (lr * K) - aug


def places(kind: str, terms: list[Term]) -> list[int]:
    """Where in the list of terms those of a kind are."""
    return [j for j, term in enumerate(terms) if term.kind == kind]


def drawn(r: Round, j: int) -> list[Batch]:
    return [None] * r.central_steps if r.drawn[j] is None else r.drawn[j]


# FedAvg, and Algorithm 2 with others that only change the clients' gradients ----------------------


def nothing(r, x, population):
    return constant(np.zeros_like(x), none=True)


def fedavg(terms, x, s, rounds, augmenting=nothing, first=0):
    given, server = s, Optimizer(s.server_opt, s.server_lr)
    clip = [Clip(s) for _ in terms]
    models = []
    for t, r in enumerate(rounds, first):
        s = in_round(given, t)
        server.lr = s.server_lr
        delta = np.zeros_like(x)
        for population, j in enumerate(places("federated", terms)):
            augment = augmenting(r, x, population)
            clients = cohort(terms[j], x, r.clients[population], s.of(j), augment)
            clients = clip[j](x, clients, augment, s.of(j))
            delta = delta + aggregate(x, clients, s.of(j))
        x = server.step(x, -delta)
        models.append(x)
    return models


def one_way(terms, x, s, rounds):
    w_f = [terms[j].weight for j in places("federated", terms)]

    def augmenting(r, x, population):
        g_c = total((gradient(terms[j], x, drawn(r, j)[0]) for j in places("central", terms)), x)
        # fedavg adds up the populations, so that g_c in full to each would count several times.
        return constant(g_c * w_f[population] / sum(w_f))

    return fedavg(terms, x, s, rounds, augmenting)


def example_transfer(terms, x, s, rounds):
    (c,) = places("central", terms)
    w_f = [terms[j].weight for j in places("federated", terms)]

    def augmenting(r, x, population):
        part = w_f[population] / sum(w_f)  # as in one_way
        return lambda i, k, x_k: part * gradient(terms[c], x_k, r.shares[population][i][k])

    return fedavg(terms, x, s, rounds, augmenting)


def baseline(terms, x, s, rounds):
    w_f = [terms[j].weight for j in places("federated", terms)]

    def augmenting(r, x, population):
        part = w_f[population] / sum(w_f)  # as in one_way
        regularizers = [terms[j] for j in places("central", terms)]
        return lambda i, k, x_k: part * total((gradient(t, x_k, None) for t in regularizers), x_k)

    return fedavg(terms, x, s, rounds, augmenting)


# Other papers' algorithms -------------------------------------------------------------------------


def server_steps(terms, x, s, r, opt) -> Model:
    """The central steps of server learning, on the sum of the central terms."""
    for k in range(central_step_count(terms, r)):
        x = opt.step(x, total((gradient(terms[j], x, drawn(r, j)[k])
                               for j in places("central", terms)), x))  # fmt: skip
    return x


def central_step_count(terms, r: Round) -> int:
    (J,) = {len(drawn(r, j)) for j in places("central", terms)}
    return J


def whole_gradient(term, x, batches) -> Model:
    """On all examples of the batches."""
    n = [examples(term, x, b) for b in batches]
    each = zip(n, batches, strict=True)
    return total((n_k * gradient(term, x, b) for n_k, b in each), x) / sum(n)


def server_learning(terms, x, s, rounds, augmenting=nothing, corrected=lambda *of: of[-1]):
    """arXiv 2210.02614. `corrected(s, r, x, population, clients, Delta)` changes a population's
    Delta before the server uses it."""
    server, central = Optimizer(s.server_opt, s.server_lr), Optimizer(s.central_opt, s.central_lr)
    clip = [Clip(s) for _ in terms]
    given, models = s, []
    for t, r in enumerate(rounds):
        s = in_round(given, t)
        server.lr, central.lr = s.server_lr, central_lr(s)
        delta = np.zeros_like(x)
        for population, j in enumerate(places("federated", terms)):
            augment = augmenting(r, x, population)
            clients = cohort(terms[j], x, r.clients[population], s, augment)
            clients = clip[j](x, clients, augment, s)
            delta = delta + corrected(s, r, x, population, clients, aggregate(x, clients, s))
        x = server.step(x, -delta)
        x = server_steps(terms, x, s, r, central)
        models.append(x)
    return models


class Corrected(constant):
    """FedCLG-C: step k of client i adds g_s - g_i. Only g_s is sent, so only it is carried."""

    def __init__(self, g_s: Model, g: list[Model]):
        super().__init__(g_s)
        self.own = g

    def __call__(self, i, *step) -> Model:
        return self.g - self.own[i]


def fedclg(terms, x, s, rounds):
    """arXiv 2304.05397."""

    def server_gradient(r, x, population) -> Model:
        some = places("central", terms)
        J = central_step_count(terms, r)
        g = total((gradient(terms[j], x, drawn(r, j)[k]) for j in some for k in range(J)), x) / J
        w_f = terms[places("federated", terms)[population]].weight
        return g * w_f / sum(terms[j].weight for j in some)

    def own_gradients(r, x, population) -> list[Model]:
        term = terms[places("federated", terms)[population]]
        return [whole_gradient(term, x, batches) if batches else np.zeros_like(x)
                for batches in r.clients[population]]  # fmt: skip

    if s.correction == "client":
        both = lambda r, x, j: Corrected(server_gradient(r, x, j), own_gradients(r, x, j))  # noqa: E731
        return server_learning(terms, x, s, rounds, both)

    def corrected(s, r, x, population, clients, delta):
        g_s, g = server_gradient(r, x, population), own_gradients(r, x, population)
        of_clients = [g_i for g_i, batches in zip(g, r.clients[population], strict=True) if batches]
        moved = [
            Steps(-s.client_lr * i.K * (g_s - g_i), i.own, i.K, i.n)
            for i, g_i in zip(clients, of_clients, strict=True)
        ]
        return delta + aggregate(x, moved, s)

    return server_learning(terms, x, s, rounds, corrected=corrected)


def mime_lite(terms, x, s, rounds):
    """arXiv 2008.03606, with momentum as the base algorithm."""
    server, beta = Optimizer(s.server_opt, s.server_lr), s.momentum
    clip, m = [Clip(s) for _ in terms], [np.zeros_like(x) for _ in terms]
    given, models = s, []
    for t, r in enumerate(rounds):
        s = in_round(given, t)
        server.lr = s.server_lr
        delta, after = np.zeros_like(x), list(m)
        for population, j in enumerate(places("federated", terms)):
            lighter = Term("federated", terms[j].loss, (1 - beta) * terms[j].weight)
            augment = constant(beta * m[j])
            # A gradient is clipped before it is scaled.
            most = s.grad_clip if s.grad_clip == "off" else (1 - beta) * s.grad_clip
            shorter = dataclasses.replace(s, grad_clip=most)
            clients = cohort(lighter, x, r.clients[population], shorter, augment)
            clients = clip[j](x, clients, augment, s)
            delta = delta + aggregate(x, clients, s)
            at_x = [
                Steps(whole_gradient(terms[j], x, b), x, len(b),
                      sum(examples(terms[j], x, one) for one in b))
                for b in r.clients[population] if b
            ]  # fmt: skip
            after[j] = (1 - beta) * aggregate(x, at_x, s) + beta * m[j] if at_x else m[j]
        x, m = server.step(x, -delta), after
        models.append(x)
    return models


class Varied(constant):
    """SCAFFOLD: step k of client i adds c - c_i. Only c is sent, so only it is carried."""

    def __init__(self, c: Model, own: list[Model]):
        super().__init__(c)
        self.own = own

    def __call__(self, i, *step) -> Model:
        return self.g - self.own[i]


def scaffold(terms, x, s, rounds):
    """arXiv 1910.06378, option II: a client's variate is the mean of its gradients."""
    server, clip = Optimizer(s.server_opt, s.server_lr), [Clip(s) for _ in terms]
    c, own = [np.zeros_like(x) for _ in terms], [{} for _ in terms]
    given, models = s, []
    for t, r in enumerate(rounds):
        s = in_round(given, t)
        server.lr = s.server_lr
        delta = np.zeros_like(x)
        for population, j in enumerate(places("federated", terms)):
            who = r.who[population]
            augment = Varied(c[j], [own[j].get(i, np.zeros_like(x)) for i in who])
            clients = cohort(terms[j], x, r.clients[population], s, augment)
            trained = [i for i, b in zip(who, r.clients[population], strict=True) if b]
            delta = delta + aggregate(x, clip[j](x, clients, augment, s), s)
            for i, done in zip(trained, clients, strict=True):
                new = done.own / done.K
                c[j] = c[j] + (new - own[j].get(i, np.zeros_like(x))) / r.all_clients[population]
                own[j][i] = new
        x = server.step(x, -delta)
        models.append(x)
    return models


# Algorithm 1 --------------------------------------------------------------------------------------


def parallel_training(terms, x, s, rounds):
    return algorithm_1(terms, x, s, rounds, auto_merge_lr=1, transfer=False)


def two_way(terms, x, s, rounds):
    return algorithm_1(terms, x, s, rounds, auto_merge_lr=1 / len(terms), transfer=True)


def algorithm_1(terms, x, s, rounds, auto_merge_lr, transfer):
    server = [Optimizer(s.server_opt, s.server_lr) for _ in terms]  # one per population
    central = [Optimizer(s.central_opt, s.central_lr) for _ in terms]  # one per central term
    merge = Optimizer(s.merge_opt, s.merge_lr)
    gt = [np.zeros_like(x) for _ in terms]  # for pt they stay 0
    clip = [Clip(s) for _ in terms]
    given, models = s, []
    for t, r in enumerate(rounds):
        s = in_round(given, t)
        for j in range(len(terms)):
            server[j].lr, central[j].lr = s.server_lr, central_lr(s)
        merge.lr = auto_merge_lr if s.merge_lr is None else s.merge_lr
        # What augments a term: the gt of all the others.
        aug = [total(gt[:j] + gt[j + 1 :], x) for j in range(len(terms))]
        delta = np.zeros_like(x)

        for j in places("central", terms):
            done = local_steps(terms[j], x, drawn(r, j), central[j], constant(aug[j]))
            delta_c = done.delta
            delta = delta + delta_c
            if transfer:
                gt[j] = average_gradient(
                    [done], s.central_opt == "sgd", central_lr(s), aug[j], gt[j]
                )

        for population, j in enumerate(places("federated", terms)):
            augment = constant(aug[j], none=not transfer)
            clients = cohort(terms[j], x, r.clients[population], s.of(j), augment)
            clients = clip[j](x, clients, augment, s.of(j))
            x_f = server[j].step(x, -aggregate(x, clients, s.of(j)))
            delta_f = x_f - x
            delta = delta + delta_f
            if transfer:
                gt[j] = average_gradient(
                    clients, s.of(j).determined, s.of(j).client_lr, aug[j], gt[j]
                )

        x = merge.step(x, -delta)
        models.append(x)
    return models


# All data in one place ----------------------------------------------------------------------------


def oracle(terms, x, s, rounds):
    return pooled(terms, range(len(terms)), x, s, rounds)


def central(terms, x, s, rounds):
    return pooled(terms, places("central", terms), x, s, rounds)


def pretrain(terms, x, s, rounds):
    first = central(terms, x, s, rounds[: s.pretrain_rounds])
    rest = rounds[s.pretrain_rounds :]
    return first + fedavg(terms, [x, *first][-1], s, rest, first=s.pretrain_rounds)


def pooled(terms, some, x, s, rounds):
    """CentralOpt on the sum of some of the terms."""
    opt = Optimizer(s.central_opt, s.central_lr)
    models = []
    for t, r in enumerate(rounds):
        opt.lr = central_lr(in_round(s, t))
        # A regularizer joins every step of the terms that have data.
        (K,) = {len(r.drawn[j]) for j in some if r.drawn[j] is not None} or {r.central_steps}
        for k in range(K):
            batch = {j: None if r.drawn[j] is None else r.drawn[j][k] for j in some}
            x = opt.step(x, total((gradient(terms[j], x, batch[j]) for j in some), x))
        models.append(x)
    return models


ALGORITHMS = {
    "fedavg": fedavg,
    "pt": parallel_training,
    "1wgt": one_way,
    "2wgt": two_way,
    "example-transfer": example_transfer,
    "oracle": oracle,
    "central": central,
    "pretrain": pretrain,
    "baseline": baseline,
    "server-learning": server_learning,
    "fedclg": fedclg,
    "mimelite": mime_lite,
    "scaffold": scaffold,
}

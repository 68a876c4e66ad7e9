"""Random problems with two terms, 8 parameters and a known minimum: for benchmarks.advice."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mixfl

TARGETS = {"quadratic": 5e-4, "mild": 5e-4, "logistic": 1e-2}  # of the first error
CLIENTS, CENTRAL, D = 60, 2000, 8


class Case(NamedTuple):
    kind: str
    problem: mixfl.Problem
    gap: object  # x -> f - f*
    beta: float
    S: int
    K: int
    batch: int
    central: int  # central examples in a round
    note: str

    @property
    def target(self) -> float:
        return TARGETS[self.kind]


def spectrum(rng, condition: float, scale: float) -> np.ndarray:
    """A random symmetric matrix with eigenvalues from scale / condition to scale."""
    q, _ = np.linalg.qr(rng.normal(size=(D, D)))
    return (q * np.geomspace(scale / condition, scale, D)[rng.permutation(D)]) @ q.T


def case(seed: int) -> Case:
    """Half of the problems are quadratics, a quarter mild ones, a quarter logistic regressions."""
    rng = np.random.default_rng(seed)
    K, S = int(rng.choice([2, 5, 10, 20])), int(rng.choice([5, 10, 20]))
    batch = int(rng.choice([2, 4]))
    apart = float(rng.choice([0, 0, 0.1, 1, 5]))  # distance of the two terms' minima: G
    noise = float(rng.choice([0.02, 0.2]))  # at clients
    noise_c = float(rng.choice([0.02, 0.3, 1.0]))
    # Central examples may be costly: as few as one per step (1-way: K at once).
    central = K * int(rng.choice([1, 8, 32]))
    note = f"G {apart:g}, sigma {noise:g}, sigma_c {noise_c:g}"
    make = {2: logistic, 3: mild}.get(seed % 4, quadratic)
    problem, gap, beta = make(rng, apart, noise, noise_c, K * batch)
    return Case(make.__name__, problem, gap, beta, S, K, batch, central, note)


def mild(rng, apart, noise, noise_c, n):
    """Well-conditioned quadratics whose terms have the same or nearly the same minimum."""
    return quadratic(rng, min(apart, 0.1), noise, noise_c, n, (0, 1))


def quadratic(rng, apart, noise, noise_c, n, condition=(1, 2.5)):
    """Examples are points. A loss is half the squared distance to a point, in the term's metric."""
    H_f = spectrum(rng, 10 ** rng.uniform(*condition), 1.0)
    H_c = spectrum(rng, 10 ** rng.uniform(*condition), float(rng.choice([0.3, 1.0, 3.0])))
    start = 3 * rng.normal(size=D)
    away = rng.normal(size=D)
    away *= apart / np.linalg.norm(away)
    points = rng.normal(0, noise, (CLIENTS, n, D))
    central = away + rng.normal(0, noise_c, (CENTRAL, D))

    def loss(H):
        H = jnp.asarray(H, jnp.float32)
        return lambda x, b: 0.5 * jnp.einsum("ni,ij,nj->n", x - b["a"], H, x - b["a"])

    problem = assembled(loss(H_f), loss(H_c), {"a": points}, {"a": central}, start)
    H = H_f + H_c
    best = np.linalg.solve(H, H_f @ points.mean((0, 1)) + H_c @ central.mean(0))
    gap = lambda x: 0.5 * (x - best) @ H @ (x - best)  # noqa: E731
    beta = float(np.linalg.eigvalsh(H)[-1])
    return problem, gap, beta


def logistic(rng, apart, noise, noise_c, n):
    """Labels follow a rule that differs between the terms by an angle that grows with `apart`."""
    rule = rng.normal(size=D)
    other = rule + apart * rng.normal(size=D)
    scales = np.geomspace(1, 10 ** rng.uniform(-1.5, 0), D)

    def data(rule, shape, noise):
        z = rng.normal(size=(*shape, D)) * scales
        y = (z @ rule + rng.normal(0, 4 * noise, shape) > 0).astype(np.float32)
        return {"z": z.astype(np.float32), "y": y}

    fed, cent = data(rule, (CLIENTS, n), noise), data(other, (CENTRAL,), noise_c)

    def loss(x, b):
        score = b["z"] @ x
        return jnp.logaddexp(0, score) - b["y"] * score + 0.005 * jnp.sum(x**2)

    start = 2 * rng.normal(size=D)
    problem = assembled(loss, loss, fed, cent, start)
    flat = {k: v.reshape(-1, *v.shape[2:]) for k, v in fed.items()}
    with jax.enable_x64(True):
        full = jax.jit(lambda x: loss(x, flat).mean() + loss(x, cent).mean())
        best = jnp.zeros(D)
        for _ in range(30):
            best = best - jnp.linalg.solve(jax.hessian(full)(best), jax.grad(full)(best))
        least = float(full(best))
        beta = float(jnp.linalg.eigvalsh(jax.hessian(full)(jnp.zeros(D)))[-1])
    full32 = lambda x: loss(x, flat).mean() + loss(x, cent).mean() - least  # noqa: E731
    return problem, full32, beta


def assembled(loss_f, loss_c, fed, cent, start) -> mixfl.Problem:
    n = next(iter(fed.values())).shape[1]
    columns = {k: v.reshape(-1, *v.shape[2:]).astype(np.float32) for k, v in fed.items()}
    clients = mixfl.ClientData.from_arrays(columns, client=np.repeat(np.arange(CLIENTS), n))
    central = {k: v.astype(np.float32) for k, v in cent.items()}
    return mixfl.Problem(
        init=lambda key: jnp.asarray(start, jnp.float32),
        terms=[mixfl.Federated(loss_f, clients), mixfl.Central(loss_c, central)],
    )

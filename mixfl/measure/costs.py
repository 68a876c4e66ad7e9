"""`mixfl costs`: what a client computes and sends in a round, by the paper's formulas
(`tab.nmp-results`, `tab.nmp-saving-analysis`) and as counted.

It counts the bytes of the arrays that would be sent, averaged over the clients of some rounds, the
operations of one local step as the compiler counts them (a multiply and an add are two), and the
memory of a client as the compiler lays it out: what it was sent, its batches, what it sends, and
what its steps hold at a time.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mixfl.algorithms.contract import Batches, Broadcast, ClientFeed, Drawn, Recipe
from mixfl.algorithms.steps import gradient
from mixfl.engine import Simulator
from mixfl.errors import MixflError
from mixfl.forms.rows import restrict
from mixfl.problem import Central, Problem
from mixfl.randomness import batch_shapes
from mixfl.settings import Settings
from mixfl.tasks import movie

ROUNDS = 10  # whose clients are counted
MEMORY_STEPS = 2  # a second step also holds the model before it; further ones hold no more
KIB = 1024


class Paper(NamedTuple):
    """The paper's symbols for the movie task, and its formulas."""

    N: int  # rows of the table
    d: int  # its width
    B: int  # |B_i|
    K: int
    n: int  # movies in a client's data of a round

    def step_flop(self, algorithm: str) -> float:
        """Computation of a client's step (the text of Appendix C; Table 3)."""
        B, d, N = self.B, self.d, self.N
        own = B * d + 3 * B * d**2 + 3 * B**2 * d + 2 * B
        return own + (N**2 * d / 2 + N * d if algorithm == "baseline" else 0)

    def bytes(self, algorithm: str) -> float:
        """Communication of a client in a round, both ways (Tables 3 and 12)."""
        numbers = {"baseline": 2 * self.N, "pt": 2 * self.n}.get(algorithm, 3 * self.n)
        return 4 * numbers * self.d

    def regularizer_flop(self, algorithm: str) -> float:
        """Computation of the regularizer in a round, at the client or at the server (Table 12)."""
        return (self.K if algorithm == "baseline" else 1) * self.N**2 * self.d / 2


class Counted(NamedTuple):
    down: float  # bytes per client and round
    up: float
    step_flop: dict[str, float]  # by form of the regularizer: gram, pairs
    regularizer_flop: dict[str, float]  # its value and gradient, once
    regularizer_steps: int  # how often in a round, at a client or at the server
    rows: float | None  # table rows in a client's data of a round
    memory: float  # bytes of a client at work


class Costs(NamedTuple):
    paper: Paper | None
    counted: dict[str, Counted]


class Planned(Protocol):
    """What is needed of a plan (runs.plan.Plan)."""

    @property
    def problem(self) -> Problem: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def settings(self) -> Settings: ...


def costs(plans: Sequence[Planned], report=lambda *_: None) -> Costs:
    """The costs of runs of one task, one run per algorithm."""
    counted: dict[str, Counted] = {}
    for i, planned in enumerate(plans):
        algorithm, central = planned.recipe.id, planned.problem.central
        report(i, len(plans), f"counting {algorithm}")
        if any(t.settings for t in planned.problem.populations):
            raise MixflError(
                "a population has settings of its own, and costs are counted for one K and one "
                "batch: leave out settings=... of Federated."
            )
        if algorithm == "baseline" and not (central and all(t.examples is None for t in central)):
            continue  # the baseline is only for regularizers
        counted[algorithm] = count(planned)
    s, problem = plans[-1].settings, plans[-1].problem
    if problem.name != "movie" or not set(counted) <= set(NAMES):
        return Costs(None, counted)
    N, d = jax.eval_shape(problem.init, jax.random.key(0))["movies"].shape
    n = s.client_batch * s.local_steps
    return Costs(Paper(N, d, s.client_batch, s.local_steps, n), counted)


def count(planned: Planned) -> Counted:
    problem, s = planned.problem, planned.settings
    simulator = Simulator(problem, planned.recipe.build(problem, s), s)
    down, up = np.mean([simulator.round_bytes(t) for t in range(ROUNDS)], axis=0)
    held = held_rows(simulator)
    forms = {"gram": problem, "pairs": with_pairs(problem)}
    return Counted(
        float(down),
        float(up),
        {form: step_flop(planned, p, held) for form, p in forms.items()},
        {form: regularizer_flop(p) for form, p in forms.items()},
        {"baseline": s.local_steps, "1wgt": 1}.get(planned.recipe.id, s.J),
        None if not held else float(np.mean(list(held.values()))),
        client_memory(planned, held),
    )


def held_rows(simulator: Simulator) -> dict[str, float]:
    """Per table of the first population, the mean number of rows that a client holds."""
    if not simulator.forms.tables.get(simulator.problem.populations[0].name):
        return {}
    counter = simulator.byte_counter
    rounds = [counter.held_rows(simulator.at(t), t, 0) for t in range(ROUNDS)]
    return {n: float(np.mean([r[n].mean() for r in rounds])) for n in rounds[0]}


def with_pairs(problem: Problem) -> Problem:
    """Replaces our form of the spreadout by the paper's, over all pairs of movies."""
    terms = [
        dataclasses.replace(t, loss=functools.partial(pairs, **t.loss.keywords))  # type: ignore
        if isinstance(t, Central) and getattr(t.loss, "func", None) is movie.spreadout else t
        for t in problem.terms
    ]  # fmt: skip
    return dataclasses.replace(problem, terms=terms)


def pairs(params, strength):
    """movie.spreadout, in N^2 d operations."""
    u = movie.unit(params["movies"][1:-1])
    cosines = u @ u.T
    off_diagonal = jnp.sum(cosines**2) - jnp.sum(jnp.diagonal(cosines) ** 2)
    return strength * jnp.sqrt(jnp.maximum(off_diagonal, 0) + movie.EPSILON)


def step_flop(planned: Planned, problem: Problem, held: Mapping[str, float]) -> float:
    """The operations of one local step with a full batch, at a client of the first population."""
    return flop(compiled_client(planned, problem, held, 1))


def client_memory(planned: Planned, held: Mapping[str, float]) -> float:
    """In bytes, with full batches."""
    steps = min(planned.settings.local_steps, MEMORY_STEPS)
    sizes = compiled_client(planned, planned.problem, held, steps).memory_analysis()
    if sizes is None:
        return float("nan")
    used = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    return float(used - sizes.alias_size_in_bytes)


def compiled_client(
    planned: Planned, problem: Problem, held: Mapping[str, float], steps: int
) -> Any:  # fmt: skip
    """A client of the first population, with full batches."""
    s: Settings = dataclasses.replace(planned.settings, local_steps=steps)
    algorithm = planned.recipe.build(problem, s)
    term = problem.populations[0]
    x = jax.eval_shape(problem.init, jax.random.key(0))
    data = batch_shapes(term, steps, s.client_batch)
    mask = jax.ShapeDtypeStruct((steps, s.client_batch), np.float32)
    message = Broadcast(x, x if planned.recipe.id in ("1wgt", "2wgt") else None)
    if held:
        ids = {n: jax.ShapeDtypeStruct((round(k),), np.int32) for n, k in held.items()}
        message = jax.eval_shape(restrict, message, ids)
    return compiled(
        lambda m, f: algorithm.client(term, m, f), message, ClientFeed(Batches(data, mask))
    )


def regularizer_flop(problem: Problem) -> float:
    x = jax.eval_shape(problem.init, jax.random.key(0))
    none = Drawn(None, jax.ShapeDtypeStruct((1,), np.float32))
    return sum(
        flop(compiled(lambda x, term=term: gradient(term, x, none), x))
        for term in problem.central
        if term.examples is None
    )


def compiled(function, *shapes) -> Any:
    return jax.jit(function).lower(*shapes).compile()


def flop(program: Any) -> float:
    return float((program.cost_analysis() or {}).get("flops", float("nan")))


NAMES = {"baseline": "Baseline", "pt": "PT", "1wgt": "1-w GT", "2wgt": "2-w GT"}


def tables(costs: Costs) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and cells of each table to print."""
    if costs.paper is None:
        header = ["algorithm", "Mflop a step", "KB down", "KB up", "KB of memory"]
        cells = [
            [
                NAMES.get(a, a),
                f"{c.step_flop['gram'] / 1e6:.4g}",
                _kb(c.down),
                _kb(c.up),
                _kb(c.memory),
            ]
            for a, c in costs.counted.items()
        ]
        return [("per client: counted", header, cells)]
    p = costs.paper
    step, sent, regular, memory = [], [], [], []
    for a, c in costs.counted.items():
        share = c.memory / costs.counted["baseline"].memory if "baseline" in costs.counted else None
        memory.append([NAMES[a], _kb(c.memory), f"{share:.1%}" if share is not None else "-"])
        flop, data = p.step_flop(a), p.bytes(a)
        by_pairs, by_gram = c.step_flop["pairs"], c.step_flop["gram"]
        step.append([
            NAMES[a], _mflop(flop), _mflop(by_pairs), f"{by_pairs / flop:.2f}",
            _mflop(by_gram), f"{by_gram / flop:.3g}",
        ])  # fmt: skip
        sent.append([
            NAMES[a], f"{data / KIB:.0f}", f"{(c.down + c.up) / KIB:.1f}",
            f"{(c.down + c.up) / data:.2f}", _kb(c.down), _kb(c.up),
            f"{c.rows:.0f}" if c.rows else "all",
        ])  # fmt: skip
        where = "client" if a == "baseline" else "server"
        formula = "K N^2 d / 2" if a == "baseline" else "N^2 d / 2"
        regular.append([
            NAMES[a], where, formula, _mflop(p.regularizer_flop(a)),
            *(_mflop(c.regularizer_steps * c.regularizer_flop[form]) for form in ("pairs", "gram")),
            {"baseline": "2 N d", "pt": "2 n d"}.get(a, "3 n d"),
        ])  # fmt: skip
    counted = ["paper", "counted, N^2 d", "ratio", "counted, Gram", "ratio"]
    return [
        ("Table 3: computation of a client's step, Mflop", ["", *counted], step),
        ("Table 3: communication per client and round, KB",
         ["", "paper", "counted", "ratio", "down", "up", "rows"], sent),
        ("Table 12: the regularizer in a round, Mflop, and communication by formula",
         ["", "at the", "formula", "paper", "counted, N^2 d", "counted, Gram", "communication"],
         regular),
        ("memory of a client, KB, counted", ["", "memory", "of the baseline's"], memory),
    ]  # fmt: skip


def savings(costs: Costs) -> list[tuple[str, str, str, float]]:
    """(algorithm, what, how it was obtained, the share that it saves against the baseline)."""
    p, counted, saved = costs.paper, costs.counted, []
    if p is None or "baseline" not in counted:
        return []
    base = counted["baseline"]
    for a, c in counted.items():
        if a == "baseline":
            continue
        ratios = [
            ("communication", "by formula", p.bytes(a) / p.bytes("baseline")),
            ("communication", "counted", (c.down + c.up) / (base.down + base.up)),
            ("computation", "by formula", p.step_flop(a) / p.step_flop("baseline")),
            ("computation", "counted, N^2 d", c.step_flop["pairs"] / base.step_flop["pairs"]),
            ("computation", "counted, Gram", c.step_flop["gram"] / base.step_flop["gram"]),
        ]
        saved += [(a, what, how, 1 - ratio) for what, how, ratio in ratios]
    return saved


def notes(costs: Costs) -> list[str]:
    if costs.paper is None:
        return []
    p = costs.paper
    base, pt = (p.step_flop(a) for a in ("baseline", "pt"))
    saved = {a: 1 - p.bytes(a) / p.bytes("baseline") for a in ("pt", "1wgt")}
    return [
        f"N = {p.N}, d = {p.d}, |B_i| = {p.B}, K = {p.K}, n = {p.n}; KB of {KIB} bytes, 4-byte "
        "numbers; one step.",
        f"Saved by the paper's formulas: {1 - pt / base:.2%} of computation, {saved['1wgt']:.1%} "
        f"(gradient transfer) to {saved['pt']:.1%} (PT) of communication.",
        "The paper counts a multiply and an add as one, half of the pairs and no product in the "
        "spreadout's backward pass; the compiler counts what is computed.",
        "PT and 2-way take several steps with it at the server; the paper's Table 12 counts one.",
        "Memory: what a client was sent, batches of two steps, what it sends, and what its steps "
        "hold at a time, as the compiler lays it out.",
        "Counted bytes have the rows that clients' batches name (contexts included), their ids, "
        "the dense layer, p_i and K_i.",
    ]


def as_json(costs: Costs) -> dict[str, Any]:
    out: dict[str, Any] = {a: {"counted": c._asdict()} for a, c in costs.counted.items()}
    if costs.paper is not None:
        out["symbols"] = costs.paper._asdict()
        for a in costs.counted:
            out[a]["paper"] = {
                "step_flop": costs.paper.step_flop(a), "bytes": costs.paper.bytes(a),
                "regularizer_flop": costs.paper.regularizer_flop(a),
            }  # fmt: skip
    return out


def _mflop(flop: float) -> str:
    return f"{flop / 1e6:.3f}" if flop < 1e6 else f"{flop / 1e6:.2f}"


def _kb(size: float) -> str:
    return f"{size / KIB:.1f}"

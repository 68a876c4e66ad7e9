"""Measures what bad clients do to a model with each aggregation: AUC on the smile task.

    python -m benchmarks.poison [--trials N] [--algorithm ID] [--quick]

A share of all clients always sends its change with the sign flipped, a hundred times its change, or
a random change of norm 30 (honest ones: 0.1 to 1). Every trial has different bad clients, batches
and initial parameters. Results are stored in poison.json.
"""

import dataclasses
import json
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np

import mixfl
from mixfl.algorithms import recipe
from mixfl.algorithms.contract import Recipe
from mixfl.cli import print_table
from mixfl.engine import Simulator
from mixfl.errors import Diverged
from mixfl.problem import Federated, Problem
from mixfl.runs.plan import plan
from mixfl.theory.intervals import half_width

RESULTS = Path(__file__).parent / "poison.json"
SHARES = (0.1, 0.2)
ATTACKS = ("flipped", "scaled", "random")
AGGREGATIONS = {
    "unprotected": dict(clip="off"),
    "clip (default)": {},
    "median": dict(aggregation="median"),
    "trimmed-mean": dict(aggregation="trimmed-mean", trim=0.25),
    "krum": dict(aggregation="krum", trim=0.25),
}
LENGTH = 30.0  # of a random change
ROUNDS = 60


def marked(problem: Problem, share: float, seed: int) -> Problem:
    """The problem with a column that marks the rows of bad clients."""
    terms = []
    for term in problem.terms:
        if isinstance(term, Federated):
            clients, rng = term.clients, np.random.default_rng(seed)
            bad = rng.permutation(len(clients)) < round(share * len(clients))
            sizes = clients.sizes()
            columns = dict(clients.examples.all(), bad=np.repeat(bad, sizes).astype(np.float32))
            owner = np.repeat(np.arange(len(clients)), sizes)
            term = dataclasses.replace(
                term, clients=mixfl.ClientData.from_arrays(columns, client=owner)
            )
        terms.append(term)
    return dataclasses.replace(problem, terms=terms)


def attacked(honest: Recipe, attack: str) -> Recipe:
    """The algorithm with bad clients that send something else."""

    def make(problem, s):
        algorithm = honest.build(problem, s)

        def client(term, message, feed):
            upload = algorithm.client(term, message, feed)
            bad = jnp.max(feed.batches.data["bad"]) > 0
            sent = ATTACK[attack](upload)
            change = lambda a, b: jnp.where(bad, a, b)  # noqa: E731
            return upload._replace(delta=jax.tree.map(change, sent, upload.delta))

        return algorithm._replace(client=client)

    return dataclasses.replace(honest, make=make)


def random_change(upload):
    leaves, tree = jax.tree.flatten(upload.delta)
    seed = jax.lax.bitcast_convert_type(upload.loss, jnp.int32)  # each client's own
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), seed), len(leaves))
    drawn = [jax.random.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)]
    norm = jnp.sqrt(sum(jnp.sum(a * a) for a in drawn))
    return tree.unflatten([LENGTH / norm * a for a in drawn])


ATTACK = {
    "flipped": lambda upload: jax.tree.map(lambda a: -a, upload.delta),
    "scaled": lambda upload: jax.tree.map(lambda a: 100 * a, upload.delta),
    "random": random_change,
}


def auc(algorithm: str, attack: str, share: float, seed: int, keys: dict) -> float:
    """The last model's AUC; 0.5 (chance) if the model is not finite."""
    given = dict(seed=seed, rounds=ROUNDS, **keys)
    planned = plan("smile", algorithm, preset="demo", given=given)
    problem = marked(planned.problem, share, seed)
    chosen = attacked(planned.recipe, attack) if share else planned.recipe
    s = dataclasses.replace(planned.settings, first_layer="plain")  # where a column is a column
    simulator = Simulator(problem, chosen.build(problem, s), s)
    *_, last = simulator.rounds(simulator.init(), 0, s.rounds)
    try:
        return float(problem.evaluate(jax.tree.map(np.asarray, last.state.x))["auc"])
    except (Diverged, ValueError, FloatingPointError):
        return 0.5


def measured(algorithm: str, trials: int, keep: bool) -> list[dict]:
    """One row per case, stored as soon as it is measured."""
    cases = [("none", 0.0), *((attack, share) for attack in ATTACKS for share in SHARES)]
    rows = []
    for attack, share in cases:
        row: dict = {"attack": attack, "share": share}
        for name, keys in AGGREGATIONS.items():
            row[name] = [auc(algorithm, attack, share, seed, keys) for seed in range(1, trials + 1)]
            click.echo(f"{attack} {share:.0%} {name}: {np.round(row[name], 4)}")
        rows.append(row)
        if keep:
            kept = dict(algorithm=algorithm, preset="demo", rounds=ROUNDS, trials=trials, rows=rows)
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    return rows


def shown(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{np.mean(values):.3f} ± {half_width(values):.3f}"


@click.command()
@click.option("--trials", default=5, help="Trials of each case.")
@click.option("--algorithm", default="2wgt")
@click.option("--quick", is_flag=True, help="One trial; nothing is stored.")
def main(trials: int, algorithm: str, quick: bool) -> None:
    recipe(algorithm)  # an error now, not later
    mixfl.prepare_process(devices=1)  # its cache: trials differ in their data and seeds only
    rows = measured(algorithm, 1 if quick else trials, keep=not quick)
    head = ["bad clients", *AGGREGATIONS]
    print_table(
        head,
        [
            ["none" if not r["share"] else f"{r['share']:.0%} {r['attack']}"]
            + [shown(r[name]) for name in AGGREGATIONS]
            for r in rows
        ],
    )


if __name__ == "__main__":
    main()

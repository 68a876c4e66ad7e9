"""Do K steps of eta / K go as far as one step of eta? Measured on a partly trained smile model.

    python -m benchmarks.local_steps [--algorithms pt,1wgt] [--rounds N] [--seeds N]

Each cell is a round's step (the mean over the seeds' cohorts and batches), projected on the step of
a round with one local step and divided by its length. It is 1 if steps add up, and less if clients
(or the server) come to rest or turn back within a round.
"""

import click

from mixfl.cli import print_table, start_jax

ETA, STEPS, SCALES = 0.04, (1, 2, 4), (1, 0.25, 0.01)  # of version 1 of the study smile_steps


def simulator(algorithm: str, client_lr: float, local_steps: int, seed: int, problems: dict):
    from mixfl.runs.plan import plan

    given = dict(
        rounds=200, client_batch=3, client_lr=client_lr, local_steps=local_steps, seed=seed
    )
    return plan("smile", algorithm, preset="demo", given=given, problems=problems).simulator()


def step(x, *setting):
    """What a round adds to x, as one vector."""
    import jax
    import numpy as np

    rounds = simulator(*setting)
    begin = rounds.state(jax.tree.map(jax.numpy.asarray, x))
    (result,) = rounds.rounds(begin, 0, 1)
    ends = zip(jax.tree.leaves(result.state.x), jax.tree.leaves(x), strict=True)
    return np.concatenate([np.ravel(np.asarray(a, np.float64) - b) for a, b in ends])


@click.command()
@click.option("--algorithms", default="pt,1wgt", show_default=True)
@click.option("--rounds", default=40, show_default=True, help="Rounds of PT before measuring.")
@click.option("--seeds", default=12, show_default=True)
def main(algorithms: str, rounds: int, seeds: int) -> None:
    start_jax({})
    import jax
    import numpy as np

    problems: dict = {}
    before = simulator("pt", ETA / 4, 4, 0, problems)
    state = before.init()
    for result in before.rounds(state, 0, rounds):
        state = result.state
    x = jax.device_get(state.x)
    cells = []
    for algorithm in algorithms.split(","):
        for scale in SCALES:
            steps = [
                np.mean(
                    [step(x, algorithm, scale * ETA / K, K, s, problems) for s in range(seeds)], 0
                )
                for K in STEPS
            ]
            parts = [s @ steps[0] / (steps[0] @ steps[0]) for s in steps]
            cells.append([algorithm, f"{scale * ETA:g}", *(f"{part:.3f}" for part in parts)])
            click.echo(f"{algorithm} at eta K = {scale * ETA:g} done", err=True)
    header = ["algorithm", "eta K", *(f"K = {K}" for K in STEPS)]
    print_table(header, cells, title=f"Smile after {rounds} rounds of PT: a round's step")


if __name__ == "__main__":
    main()

"""The commands of `mixfl privacy`: what a plan costs, or the noise that it needs."""

import click

from mixfl.cli.options import JSON
from mixfl.errors import MixflError

COUNT = click.IntRange(min=1)


@click.group(invoke_without_command=True)
@click.option("--clients", type=COUNT, metavar="N", help="Clients in the population.")
@click.option("--cohort", type=COUNT, metavar="S", help="Clients per round, on average.")
@click.option("--rounds", type=COUNT, metavar="T", help="Rounds in which clients take part.")
@click.option("--delta", type=float, metavar="X", help="Delta; well below 1/N.")
@click.option("--noise", type=float, metavar="Z",
              help="Noise multiplier: standard deviation of the noise in clip norms.")  # fmt: skip
@click.option("--epsilon", type=float, metavar="X", help="In place of --noise: find the noise.")
@click.option("--sampling", type=click.Choice(["poisson", "fixed", "none"]), default="poisson",
              show_default=True, help="How a cohort is chosen.")  # fmt: skip
@click.option("--cap", type=COUNT, metavar="N", help="Most clients in a Poisson cohort.")
@click.option("--min-sep", type=COUNT, default=1, show_default=True, metavar="N",
              help="Without sampling: rounds from one participation to the next.")  # fmt: skip
@click.option("--mechanism", type=click.Choice(["gaussian", "banded"]), default="gaussian",
              show_default=True, help="Independent noise, or correlated.")  # fmt: skip
@JSON
@click.pass_context
def privacy(context, as_json, **plan):
    """Print the epsilon of a plan, or the noise that it needs (docs/privacy.md)."""
    if context.invoked_subcommand is not None:
        return
    missing = [name for name in ("clients", "cohort", "rounds", "delta") if plan[name] is None]
    if missing:
        raise MixflError(
            f"--{missing[0]} is missing. For example: mixfl privacy --clients 342477 --cohort 100 "
            "--rounds 500 --delta 1e-6 --noise 1.0"
        )
    from mixfl.privacy.planning import planned

    answer = planned(**plan)
    if as_json:
        import json

        click.echo(json.dumps(answer))
        return
    for name, value in answer.items():
        text = f"{value:.6g}" if isinstance(value, float) else value
        click.echo(f"{name.replace('_', ' ')}: {text}")

"""The commands of `mixfl privacy`: what a plan costs, or the noise that it needs; audit."""

from pathlib import Path

import click

from mixfl.cli.groups import Suggesting
from mixfl.cli.options import JSON
from mixfl.cli.process import start_jax
from mixfl.cli.terminal import command_line
from mixfl.errors import MixflError, unknown

COUNT = click.IntRange(min=1)


@click.group(cls=Suggesting, invoke_without_command=True)
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


@privacy.command()
@click.option("--algorithm", default="2wgt", show_default=True, metavar="ID")
@click.option("--epsilon", type=float, default=4.0, show_default=True, metavar="X",
              help="The promise to attack.")  # fmt: skip
@click.option("--delta", type=float, default=1e-5, show_default=True, metavar="X")
@click.option("--rounds", type=COUNT, default=10, show_default=True, metavar="T")
@click.option("--canaries", type=COUNT, default=1000, show_default=True, metavar="N",
              help="More of them find more, and take longer.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), metavar="N",
              help="Of coins and directions; without it, secret.")  # fmt: skip
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
              help="Folder for the report; default: runs/audit-ALGORITHM.")  # fmt: skip
@JSON
def audit(algorithm, out, as_json, **plan):
    """Attack a private run with canaries: a lower bound on epsilon, in a report."""
    from mixfl.privacy.planning import check_delta, check_number
    from mixfl.privacy.rules import ALGORITHMS

    if algorithm not in ALGORITHMS:
        raise unknown("algorithm with differential privacy", algorithm, ALGORITHMS)
    if algorithm in ("pretrain", "example-transfer"):
        raise MixflError(f"the audit has no {algorithm}: its private rounds are fedavg's.")
    check_number("epsilon", plan["epsilon"])
    check_delta(plan["delta"], 1)
    start_jax({})
    import json

    from mixfl.measure.audit import audit as attack
    from mixfl.report.audit import save_audit, verdict

    found = attack(algorithm, **plan)
    page = save_audit(found, out or Path("runs") / f"audit-{algorithm}", command_line())
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        click.echo(verdict(found))
        click.echo(f"Report: {page}   (also report.md, audit.png)")
    raise SystemExit(0 if found.holds else 1)

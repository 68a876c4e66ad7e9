"""The commands of `mixfl privacy`: what a plan costs, or the noise that it needs; audit."""

from pathlib import Path

import click

from mixfl.cli.groups import Suggesting
from mixfl.cli.options import DP, JSON, begin, check_folder
from mixfl.cli.process import start_jax
from mixfl.cli.terminal import command_line
from mixfl.errors import MixflError, unknown

COUNT = click.IntRange(min=1)
PROMISE = ("epsilon", "delta")


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
@click.argument("task", required=False)
@click.option("--algorithm", default="2wgt", show_default=True, metavar="ID")
@click.option("--epsilon", type=float, default=4.0, show_default=True, metavar="X",
              help="The promise to attack.")  # fmt: skip
@click.option("--delta", type=float, default=1e-5, show_default=True, metavar="X")
@DP
@click.option("--rounds", type=COUNT, default=10, show_default=True, metavar="T")
@click.option("--canaries", type=COUNT, default=1000, show_default=True, metavar="N",
              help="More of them find more, and take longer.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), metavar="N",
              help="Of coins and directions; without it, secret.")  # fmt: skip
@click.option("--preset", metavar="NAME", help="Of TASK.")
@click.option("--data", metavar="DIR", help="Of TASK; without it, synthetic data.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE",
              help="A key of TASK or of the algorithm; may be repeated.")  # fmt: skip
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
              help="Folder for the report; default: runs/audit-ALGORITHM.")  # fmt: skip
@JSON
@click.pass_context
def audit(
    context, task, algorithm, epsilon, delta, dp, rounds, canaries, seed, preset, data, assignments,
    out, as_json,
):  # fmt: skip
    """Attack a private run with canaries: a lower bound on epsilon, in a report.

    The run is one of TASK (or path.py:problem), in which canaries are among the clients. Without
    TASK, it is of a small problem of its own.
    """
    from mixfl.privacy.planning import check_delta, check_number
    from mixfl.privacy.rules import ALGORITHMS

    if algorithm not in ALGORITHMS:
        raise unknown("algorithm with differential privacy", algorithm, ALGORITHMS)
    if algorithm in ("pretrain", "example-transfer"):
        raise MixflError(f"the audit has no {algorithm}: its private rounds are fedavg's.")
    check_folder(out)
    check_number("epsilon", epsilon)
    check_delta(delta, 1)
    if task is None and (dp or preset or data or assignments):
        raise MixflError("--dp, --preset, --data and --set are for a TASK: name one.")
    if dp and any(context.get_parameter_source(n).name == "COMMANDLINE" for n in PROMISE):
        raise MixflError("the promise is given twice: leave out --epsilon and --delta, or --dp.")
    import json

    if task is None:
        start_jax({})
        from mixfl.measure.audit import audit as attack

        found = attack(algorithm, epsilon, delta, rounds, canaries, seed=seed)
    else:
        given = promised(dp, epsilon, delta) | begin(task, assignments)
        from mixfl.measure.audit_task import audit_task
        from mixfl.runs.plan import plan

        if "rounds" in given:
            raise MixflError("rounds is given by --set: give --rounds.")
        planned = plan(task, algorithm, preset=preset, data=data, given={**given, "rounds": rounds})
        everybody = given["dp_sampling"] == "none" and "cohort_size" not in given
        noise = given.get("dp_noise_multiplier")
        found = audit_task(planned, rounds, canaries, seed, everybody, noise)
    from mixfl.report.audit import save_audit, verdict

    name = "-".join(["audit", *([planned.problem.name] if task else []), algorithm])
    page = save_audit(found, out or Path("runs") / name, command_line())
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        click.echo(verdict(found))
        click.echo(f"Report: {page}   (also report.md, audit.png)")
    raise SystemExit(0 if found.holds else 1)


def promised(dp, epsilon: float, delta: float) -> dict:
    """The keys of the promise to attack. Without a word about sampling, everybody takes part."""
    from mixfl.privacy.config import dp_keys
    from mixfl.runs.user_input import parse_assignments

    given = parse_assignments(dp, "--dp", "epsilon=4") or {"epsilon": epsilon, "delta": delta}
    return dp_keys({"sampling": "none", **given})

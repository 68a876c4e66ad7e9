"""Commands for the paper's own results: reproduce, costs, bounds, dissimilarity."""

from pathlib import Path

import click

from mixfl.cli.options import (
    JSON,
    OWN,
    PROBLEM,
    WORKERS,
    begin,
    check_folder,
    crew,
    names,
    options,
)
from mixfl.cli.process import cores, start_jax
from mixfl.cli.terminal import command_line, print_table


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--scale",
    default="quick",
    show_default=True,
    metavar="quick|full",
    help="quick: small, in minutes; full: the paper's settings and trials.",
)
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Real data, in folders smile (or celeba), text, movie (or movielens).",
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder for runs and report; default: runs/reproduce-SCALE.",
)
@click.option(
    "--trials",
    metavar="N",
    type=click.IntRange(min=1),
    help="Make N trials of everything. Default: 5, and up to 20 where a claim is not decided.",
)
@click.option("--resume", is_flag=True, help="Continue, which it does anyway.")
@click.option("--list", "listing", is_flag=True, help="List tables and figures, with times.")
@options(*WORKERS, shared=())
def reproduce(ids, scale, data, out, trials, listing, resume, jobs, hung, on, on_options):
    """Reproduce the paper's tables and figures, by their labels (default: all), and its claims.

    If stopped, the same command continues where it left off, with or without --resume.
    """
    check_folder(out)
    start_jax({})
    from mixfl.report.save import save
    from mixfl.studies import reproduce as paper
    from mixfl.studies import study
    from mixfl.studies.progress import board
    from mixfl.studies.trials import check_failed

    asked, jobs = jobs, jobs or cores()
    wanted = paper.chosen(ids, scale, data, trials)
    if listing:
        header = ["ID", "what", "study", f"time, {jobs} at a time"]
        print_table(header, paper.listed(scale, data, jobs, trials))
        every = study.estimate(paper.chosen([], scale, data, trials), jobs)
        click.echo(f"All of them: about {study.words(every)}.")
        return
    out = out or Path("runs") / f"reproduce-{scale}"
    with crew(on, on_options, asked, hung) as workers:
        paper.remember(out, ids, scale, data, trials)
        time = study.words(study.estimate(wanted, jobs, paper.over(wanted, out)))
        if on == "local":
            click.echo(f"Time left: about {time} on cores like ours, {jobs} runs at a time.")
        if any(s.looks for s in wanted):
            click.echo("Claims that this does not decide get more trials, which take longer.")
        wanted, ended = paper.reproduce(wanted, out, workers, board())
    check_failed(list(ended.values()))  # no report if a run failed
    click.echo("Counting costs, drawing figures and writing the report")
    document = paper.document(wanted, ended, out, command_line())
    save(document, out / "report.html")
    save(document, out / "report.md", "md")
    paper.draw(document, out / "figures")
    rows = [[f.number, f.says, f.data, f.verdict, f.trials] for f in document.findings]
    print_table(["", "claim", "data", "verdict", "trials"], rows)
    click.echo(f"Report: {out / 'report.html'}   (also report.md, figures/, {paper.RUNS}/)")


@click.command()
@options(
    click.option("--algorithms", metavar="A,B,...",
                 help=f"Default: the paper's four. Ids, {OWN}."),
    JSON, shared=PROBLEM,
)  # fmt: skip
def costs(task, preset, data, assignments, algorithms, as_json):
    """Print what a client of TASK computes and sends: counted, and by the paper's formulas (movie).

    The default preset is `paper`.
    """
    import json

    from mixfl.runs.sinks.terminal import steps

    several = names(algorithms) if algorithms is not None else None
    given = begin(task, assignments, algorithms=several or ())
    from mixfl.measure import costs as counting
    from mixfl.studies.costs import ALGORITHMS
    from mixfl.studies.costs import costs as counted_costs

    with steps() as report:
        counted = counted_costs(task, preset, data, given, report, several or ALGORITHMS)
    if as_json:
        click.echo(json.dumps(counting.as_json(counted), indent=2))
        return
    for title, header, rows in counting.tables(counted):
        print_table(header, rows, title=title)
    for line in counting.notes(counted):
        click.echo(line)


NUMBER: dict = dict(type=float, metavar="X")


@click.command()
@click.option("--beta", required=True, **NUMBER, help="Smoothness of each term of the loss.")
@click.option("--mu", default=0.0, **NUMBER, help="Strong convexity of each term; 0: none.")
@click.option("--sigma2", required=True, **NUMBER, help="Variance of a client's batch gradient.")
@click.option("--sigma-c2", required=True, **NUMBER, help="Variance of a central batch gradient.")
@click.option("--sigma-f2", default=0.0, **NUMBER, help="Variance between the clients' gradients.")
@click.option("--G2", "G2", default=0.0, **NUMBER, help="G^2, the terms' dissimilarity.")
@click.option("--B2", "B2", default=1.0, **NUMBER, help="B^2, their relative dissimilarity.")
@click.option("--K", "K", required=True, type=int, metavar="N", help="Local steps, at least 2.")
@click.option("--S", "S", required=True, type=int, metavar="N", help="Clients per round.")
@click.option("--D2", "D2", **NUMBER, help="||x0 - x*||^2, for the convex bounds.")
@click.option("--F", "F", **NUMBER, help="f(x0) - f(x*), for the nonconvex bounds.")
@click.option("--epsilon", required=True, **NUMBER, help="Error to reach.")
@click.option("--eta-s", default=1.0, show_default=True, **NUMBER, help="Server learning rate.")
@click.option("--eta-m", default=1.0, show_default=True, **NUMBER, help="Merge learning rate.")
@JSON
def bounds(as_json, **symbols):
    """Print the paper's bounds: rounds to an error, largest steps, conditions (docs/theory.md)."""
    import json

    from mixfl.theory import tables as table

    entries = table.bounds(**symbols)
    if as_json:
        click.echo(json.dumps(table.as_json(entries), indent=2))
        return
    for title, header, rows in table.tables(entries):
        print_table(header, rows, title=title)
    for line in table.notes(entries):
        click.echo(line)


@click.command()
@options(
    click.option("--rounds", type=click.IntRange(min=1), default=100, show_default=True,
                 metavar="N"),
    click.option("--simulations", type=click.IntRange(min=1), default=5, show_default=True,
                 metavar="N", help="Simulations, with consecutive seeds."),
    click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
                 help="Folder for the curves; default: runs/dissimilarity-TASK."),
    JSON, shared=PROBLEM,
)  # fmt: skip
def dissimilarity(task, preset, rounds, simulations, data, assignments, out, as_json):
    """Measure how much the gradients of TASK's terms differ, by the paper's protocol."""
    import json

    from mixfl.runs.sinks.terminal import steps

    given = begin(task, assignments, out)
    from mixfl.studies import dissimilarity as protocol

    with steps() as report:
        curves = protocol.dissimilarity(task, preset, data, given, rounds, simulations, report)
    out = out or Path("runs") / f"dissimilarity-{curves.task}"
    plot = protocol.save(curves, out)
    if as_json:
        click.echo(json.dumps(protocol.as_json(curves)))
        return
    print_table(
        *protocol.rows(curves), title=f"K = 1, {simulations} simulations of {rounds} rounds"
    )
    click.echo(f"Plot: {plot}")

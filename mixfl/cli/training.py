"""Commands that train: run, compare, sweep."""

import contextlib
from pathlib import Path

import click

from mixfl.cli.options import (
    ALL,
    DP,
    DP_SEED,
    OWN,
    SEVERAL_RUNS,
    WORKERS,
    by_hand,
    check_names,
    crew,
    names,
    options,
    private,
)
from mixfl.cli.process import cores, start_jax
from mixfl.cli.terminal import print_table
from mixfl.errors import MixflError


@click.command()
@click.argument("task", required=False)
@options(
    click.option("--algorithm", metavar="ID", help=f"One of {ALL}; {OWN}."),
    click.option("--config", type=click.Path(path_type=Path), metavar="FILE",
                 help="Repeat the run with this config.toml, from its run folder."),
    click.option("--measure", metavar="WHAT",
                 help="dissimilarity: G~^2 and B~^2 with each evaluation (theory/g2, theory/b2)."),
    click.option("--restart", is_flag=True,
                 help="Start over in --out; the earlier run is moved aside."),
    click.option("--from-best", is_flag=True,
                 help="Continue from the best checkpoint; later files are moved aside."),
    click.option("--changed-data", is_flag=True, help="Continue although the data has changed."),
    DP, DP_SEED,
)  # fmt: skip
def run(
    task, algorithm, config, measure, preset, rounds, seed, out, data, assignments, resume, track,
    distributed, dp, dp_seed, **how,
):  # fmt: skip
    """Train TASK with one algorithm."""
    from mixfl.runs.user_input import read_config

    given = by_hand(rounds, seed, assignments, measure) | private(dp, dp_seed)
    head, keys = read_config(config) if config is not None else ({}, {})
    task = task or head.get("task")
    algorithm = algorithm or head.get("algorithm")
    if task is None:
        raise MixflError("which task? For example: mixfl run smile --algorithm 2wgt")
    if algorithm is None:
        raise MixflError(f"which algorithm? Give --algorithm with one of {ALL}, {OWN}.")
    check_names(task, [algorithm], track)
    start_jax({**keys, **given}, distributed)
    from mixfl.engine import processes
    from mixfl.runs.plan import plan
    from mixfl.runs.sinks.terminal import reporter, summary
    from mixfl.runs.training import run as train

    with processes.Together():
        planned = plan(
            task, algorithm, preset=preset or head.get("preset"), data=data or head.get("data"),
            config=keys, given=given,
        )  # fmt: skip
    name = task if ".py" not in task else planned.problem.name
    out = out or Path("runs") / f"{name}-{planned.recipe.id}-seed{planned.settings.seed}"
    result = train(
        planned, out, resume, reporter(processes.first()), track=track,
        repeats=config.parent if config is not None else None, **how,
    )  # fmt: skip
    if not processes.first():
        return
    if result.metrics:
        click.echo(f"round {result.metrics[-1]['round']}: {summary(result.metrics[-1])}")
    click.echo(f"Run folder: {out} (model.safetensors, metrics.jsonl, config.toml)")


def reported(out: Path) -> Path:
    """Writes the page of the runs in a folder."""
    from mixfl.report.from_runs import document
    from mixfl.report.save import save

    save(document([out]), out / "report.html")
    return out / "report.html"


@click.command()
@click.argument("task")
@options(
    click.option("--algorithms", default="fedavg,pt,1wgt,2wgt,oracle", show_default=True,
                 metavar="A,B,...", help=f"Algorithms to compare: ids, {OWN}."),
    click.option("--trials", type=click.IntRange(min=1), default=1, show_default=True,
                 metavar="N", help="Trials of each, with consecutive seeds."),
    *WORKERS,
)  # fmt: skip
def compare(
    task, algorithms, trials, jobs, hung, on, on_options, preset, rounds, seed, out, data,
    assignments, resume, track, distributed,
):  # fmt: skip
    """Train TASK with several algorithms, with the same seeds and cohorts."""
    given = by_hand(rounds, seed, assignments)
    ids = names(algorithms)
    check_names(task, ids, track)
    from mixfl.studies.trials import check_failed

    if distributed and on != "local":
        raise MixflError(f"--distributed is one run in several processes: leave out --on {on}.")
    one = distributed or (jobs or cores()) == 1 or len(ids) * trials == 1
    alone = one and on == "local" and not on_options
    with contextlib.nullcontext() if alone else crew(on, on_options, jobs, hung) as workers:
        start_jax(given, distributed)
        from mixfl.engine import processes
        from mixfl.runs.plan import plan
        from mixfl.runs.sinks.terminal import reporter
        from mixfl.studies import compare as comparison
        from mixfl.studies.progress import board

        problems: dict = {}
        ended: list = []
        more: dict = dict(given=given, shared_with=ids, problems=problems)
        with processes.Together():
            plans = [plan(task, a, preset=preset, data=data, **more) for a in ids]
            comparison.check_ids(plans)
        out = out or Path("runs") / f"compare-{plans[0].problem.name}"
        if workers is None:
            outcomes = comparison.compare(
                plans, out, trials, resume, reporter(processes.first()), track
            )
        else:
            comparison.check(plans)
            several = comparison.planned_trials(plans, trials, given, track=track)
            ended = workers.make(several, out, board(), resume)
            outcomes = comparison.outcomes(ended)
    if not processes.first():
        return
    print_table(*comparison.rows(outcomes), title=f"{plans[0].problem.name}: after training")
    metrics = comparison.shown_metrics(outcomes)
    if metrics:
        from mixfl.report import plots  # matplotlib is slow to import

        plot = out / comparison.PLOT
        plots.curves(
            {o.algorithm: o.trials for o in outcomes}, metrics, plot, plans[0].problem.name
        )
        click.echo(f"Runs: {out}/<algorithm>/   Plot: {plot}   Report: {reported(out)}")
    check_failed(ended)
    if any(o.diverged for o in outcomes) and not any(o.trials for o in outcomes):
        raise SystemExit(3)


@click.command()
@click.argument("task")
@options(
    click.option("--algorithm", "algorithms", required=True, metavar="ID[,ID]",
                 help=f"One algorithm or several: ids, {OWN}."),
    click.option("--over", multiple=True, metavar="KEY=V1,V2,...",
                 help="Values to try; repeat it to try all combinations."),
    click.option("--trials", type=click.IntRange(min=1), default=5, show_default=True,
                 metavar="N", help="Trials of each setting, with consecutive seeds."),
    click.option("--by", metavar="METRIC",
                 help="Choose by this metric on validation data (auc, accuracy, recall@10, loss)."),
    *WORKERS, shared=SEVERAL_RUNS,
)  # fmt: skip
def sweep(
    task, algorithms, over, trials, by, jobs, hung, on, on_options, preset, rounds, seed, out, data,
    assignments, resume, track,
):  # fmt: skip
    """Try several settings of TASK: choose on validation data, report on test data."""
    from mixfl.runs.user_input import parse_over

    given, ids, over = by_hand(rounds, seed, assignments), names(algorithms), parse_over(over)
    twice = [k for k in over if k in given]
    if twice:
        raise MixflError(f"{twice[0]} is given by both --over and --set: leave one out.")
    check_names(task, ids, track)
    from mixfl.studies.trials import check_failed

    with crew(on, on_options, jobs, hung) as workers:
        start_jax(given)
        from mixfl.runs.plan import plan
        from mixfl.studies import compare as comparison
        from mixfl.studies import sweep as sweeping
        from mixfl.studies.progress import board
        from mixfl.tasks import find

        if "validation" in find(task).options:
            given.setdefault("validation", True)
        problems: dict = {}
        plans = [
            plan(task, a, preset=preset, data=data, given=given | keys, problems=problems)
            for a in ids
            for keys in sweeping.grid(over)
        ]
        comparison.check_ids(plans[:: len(sweeping.grid(over))])  # one of each algorithm
        comparison.check(plans)
        out = out or Path("runs") / f"sweep-{plans[0].problem.name}"
        several = sweeping.planned_trials(
            plans[0].task, {p.recipe.name: p.recipe.id for p in plans}, over, trials,
            plans[0].settings.seed, given, preset=preset, data=plans[0].data, track=track,
        )  # fmt: skip
        ended = workers.make(several, out, board(), resume)
    results = sweeping.settings(ended, over)
    choice = sweeping.choose(results, by)
    sweeping.save(results, choice, out)
    header, rows = sweeping.table(results, choice)
    print_table(header, rows, title=f"{plans[0].problem.name}: {trials} trials of each setting")
    for line in sweeping.verdict(results, choice):
        click.echo(line)
    click.echo(
        f"Runs: {out}/<algorithm>/<setting>/   Figures: {out / sweeping.RESULTS}   "
        f"Report: {reported(out)}"
    )
    check_failed(ended)
    if choice.best is None:
        raise SystemExit(3)

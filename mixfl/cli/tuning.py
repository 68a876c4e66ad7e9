"""The command that searches: tune."""

from pathlib import Path

import click

from mixfl.cli.options import (
    OWN,
    SEVERAL_RUNS,
    WORKERS,
    by_hand,
    check_folder,
    check_names,
    crew,
    names,
    options,
)
from mixfl.cli.process import start_jax
from mixfl.cli.terminal import print_table
from mixfl.cli.training import reported


@click.command()
@click.argument("task")
@options(
    click.option("--algorithms", default="pt,1wgt,2wgt", show_default=True, metavar="A,B,...",
                 help=f"Algorithms to choose from: ids, {OWN}."),
    click.option("--over", multiple=True, metavar="KEY=LOW:HIGH[:log]|V1,V2,...",
                 help="A range or values to search; may be repeated."),
    click.option("--trials", type=click.IntRange(min=1), default=20, show_default=True,
                 metavar="N", help="Runs in all."),
    click.option("--by", metavar="METRIC",
                 help="Judge by this metric on validation data (auc, accuracy, recall@10, loss)."),
    click.option("--prune", metavar="median|hyperband|none", default="median", show_default=True,
                 help="How runs that are not promising are ended early."),
    *WORKERS, shared=SEVERAL_RUNS,
)  # fmt: skip
def tune(
    task, algorithms, over, trials, by, prune, jobs, hung, on, on_options, preset, rounds, seed,
    out, data, assignments, resume, track,
):  # fmt: skip
    """Search for good settings of TASK, judged on validation data (docs/tune.md)."""
    from mixfl.studies.space import parse_space

    given, ids, space = by_hand(rounds, seed, assignments), names(algorithms), parse_space(over)
    check_names(task, ids, track)
    check_folder(out)
    with crew(on, on_options, jobs, hung) as workers:
        start_jax(given)
        from mixfl.metrics import lower_is_better
        from mixfl.report import tuning
        from mixfl.studies import tune as search
        from mixfl.studies.progress import board

        tuned = search.tune_task(
            task, ids, space, out, workers, board(), trials=trials, by=by, prune=prune,
            resume=resume, given=given, preset=preset, data=data, track=track,
        )  # fmt: skip
    print_table(*search.table(tuned), title=f"{Path(task).name}: judged by {tuned.metric}")
    for line in search.verdict(tuned):
        click.echo(line)
    log = {key: getattr(s, "log", False) for key, s in space.items()}
    plot = tuned.out / search.PLOT
    tuning.draw(tuned.found, tuned.metric, lower_is_better(tuned.metric), log, plot)
    click.echo(
        f"Runs: {tuned.out}/<algorithm>/<setting>/   Figures: {tuned.out / search.RESULTS}   "
        f"Plot: {plot}   Report: {reported(tuned.out)}"
    )
    if tuned.best is None:
        raise SystemExit(3)

"""Commands about a task or your own problem: check, keys, diagnose."""

from pathlib import Path

import click

from mixfl.cli.options import DP, JSON, PROBLEM, begin, check_names, options, private
from mixfl.cli.terminal import print_table


@click.command()
@options(
    click.option("--algorithm", metavar="ID",
                 help="Check an algorithm on TASK, for example your own, path.py:name."),
    shared=PROBLEM,
)  # fmt: skip
def check(task, preset, data, assignments, algorithm):
    """Check TASK: do its losses keep the contract, and do the algorithms agree when K = 1?

    With --algorithm: does the algorithm keep its contract on TASK?
    """
    given = begin(task, assignments, algorithms=[algorithm] if algorithm else [])
    from mixfl.algorithms import ALGORITHMS
    from mixfl.measure.check import check as run_check
    from mixfl.measure.check_algorithm import check_algorithm
    from mixfl.runs.plan import plan

    if algorithm:
        planned = plan(task, algorithm, preset=preset, data=data, given=given)
        lines, good = check_algorithm(planned.problem, planned.recipe, planned.settings)
    else:
        planned = plan(task, "pt", preset=preset, data=data, given=given, shared_with=ALGORITHMS)
        lines, good = run_check(planned.problem, planned.settings)
    for line in lines:
        click.echo(line)
    raise SystemExit(0 if good else 1)


@click.command()
@click.argument("task", required=False)
@click.option("--algorithm", metavar="ID", help="Only what this algorithm uses, and its own keys.")
def keys(task, algorithm):
    """List the keys for --set, with their defaults (and TASK's own)."""
    from mixfl.settings import KEYS

    fields: dict = dict(KEYS)
    if algorithm:
        check_names(None, [algorithm])
        from mixfl.algorithms import recipe

        used = recipe(algorithm)
        fields = {k: f for k, f in used.valid.items() if k in used.uses}
    preset: dict = {}
    if task:
        from mixfl.runs.plan import preset_keys
        from mixfl.tasks import find

        spec = find(task)
        preset = preset_keys(spec, None, used.id if algorithm else "")
    print_table(
        ["key", "default", "preset cpu", "meaning"] if preset else ["key", "default", "meaning"],
        [
            [k, str(f.default), *([str(preset.get(k, ""))] if preset else []), f.metadata["help"]]
            for k, f in fields.items()
        ],
    )
    if task and spec.options:
        rows = [
            [k, str(v), str(preset.get(k, "")), spec.help.get(k, "")]
            for k, v in spec.options.items()
        ]
        print_table(["key", "default", "preset cpu", "meaning"], rows, title=f"keys of {task}")
        click.echo(f"presets: {', '.join(spec.presets)} (default: cpu)")


@click.command()
@options(
    click.option("--budget", type=click.FloatRange(min=1), default=60, show_default=True,
                 metavar="SECONDS", help="About how long to measure, at most."),
    click.option("--target", type=click.FloatRange(0, 1, min_open=True, max_open=True),
                 default=0.1, show_default=True, metavar="PART",
                 help="The error to reach, as a part of the first error f - f*."),
    click.option("--split", "column", metavar="COLUMN",
                 help="Say whether dividing a population by this column would pay."),
    click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
                 help="Folder for a page with the curves; default: runs/diagnose-TASK."),
    DP, JSON, shared=PROBLEM,
)  # fmt: skip
def diagnose(task, preset, data, assignments, budget, target, column, out, dp, as_json):
    """Measure TASK and recommend an algorithm and its settings, with reasons."""
    import json

    from mixfl.runs.sinks.terminal import steps

    promised = private(dp, None)
    given = begin(task, assignments, out) | promised
    click.echo(f"Measuring {task}: about {budget:.0f} s at most (--budget).", err=True)
    from mixfl.report.diagnosis import Verdict

    with steps() as report:
        verdict = Verdict(task, preset, data, given, target, budget, column, report)
    out = out or Path("runs") / f"diagnose-{verdict.problem.name}"
    page = verdict.save(out)
    if as_json:
        click.echo(json.dumps(verdict.as_json(), indent=2))
        return
    for line in verdict.lines():
        click.echo(line)
    click.echo(f"\nPage with the curves: {page}")

"""The command line: parsing only. What needs JAX is imported when a command runs."""

import contextlib
import os
import sys
import traceback
from pathlib import Path

import click

import mixfl
from mixfl.errors import MixflError, unknown

ALGORITHMS = (
    "fedavg", "pt", "1wgt", "2wgt", "example-transfer", "oracle", "central", "pretrain", "baseline"
)  # fmt: skip
ALL = ", ".join(ALGORITHMS)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(mixfl.__version__)
def cli():
    """Mixed federated learning: train one model on clients' data and at the server.

    TASK is the name of a task (smile, text, movie) or path.py:problem, a mixfl.Problem of your own.
    """


def options(*several, shared=None):
    """Options of its own, and those that a command shares: with others that train, if not said."""

    def apply(command):
        for option in reversed([*several, *(TRAINING if shared is None else shared)]):
            command = option(command)
        return command

    return apply


PRESET = click.option("--preset", metavar="P", help="Settings from a file: paper, cpu or demo.")
PROBLEM = [
    click.argument("task"),
    PRESET,
    click.option("--data", metavar="DIR", help="Prepared data; without it, synthetic data."),
    click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any key."),
]
JSON = click.option("--json", "as_json", is_flag=True, help="For machines.")
TRAINING = [
    PRESET,
    click.option("--rounds", type=int, metavar="N", help="Rounds of training."),
    click.option("--seed", type=int, metavar="N", help="Seed of the (first) run."),
    click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder to write."),
    click.option("--data", metavar="DIR", help="Prepared data; without it, synthetic data."),
    click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE",
                 help="Any key, e.g. --set client_lr=0.1; may be repeated. See `mixfl keys`."),
    click.option("--resume", is_flag=True, help="Go on with what --out holds."),
    click.option("--track", metavar="NAME", help="Log to MLflow too: --track mlflow."),
    click.option("--distributed", is_flag=True,
                 help="One of several processes that train together (docs/scaling.md)."),
]  # fmt: skip


SEVERAL_RUNS = TRAINING[:-1]
JOBS = click.option("--jobs", type=click.IntRange(min=1), metavar="N",
                    help="Runs at a time; as many as cores, if not given.")  # fmt: skip


def cores() -> int:
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return found or 1


def names(text: str) -> list[str]:
    found = [a.strip() for a in text.split(",") if a.strip()]
    if not found or len(set(found)) < len(found):
        raise MixflError(f"{text}: expected different names, separated by commas.")
    return found


def by_hand(rounds, seed, assignments, measure=None) -> dict:
    from mixfl.runs.given import parse_assignments

    given = parse_assignments(assignments)
    for key, value in (("rounds", rounds), ("seed", seed), ("measure", measure)):
        if value is not None:
            if key in given:
                raise MixflError(f"{key} is given by --{key} and by --set: leave one out.")
            given[key] = value
    return given


def begin(task, assignments, out=None) -> dict:
    """The keys given, when what can be wrong without JAX is not; JAX is started."""
    from mixfl.runs.given import parse_assignments

    given = parse_assignments(assignments)
    check_names(task, [])
    if out is not None and out.exists() and not out.is_dir():
        raise MixflError(f"--out {out} is a file: give a folder.")
    start_jax(given)
    return given


def check_names(task, algorithms, track=None) -> None:
    """Mistakes that need not wait for JAX."""
    from mixfl.tasks import check_name

    check_name(task)
    for given in algorithms:
        if given not in ALGORITHMS:
            raise unknown("algorithm", given, ALGORITHMS)
    if track is not None:
        from mixfl.runs.trackers import check as check_tracker

        check_tracker(track)


@cli.command()
@click.argument("task", required=False)
@options(
    click.option("--algorithm", metavar="ID", help=f"One of {ALL}."),
    click.option("--config", type=click.Path(path_type=Path), metavar="FILE",
                 help="A config.toml, as a run's folder holds it: repeats that run."),
    click.option("--measure", metavar="WHAT",
                 help="dissimilarity: G~^2 and B~^2 with each evaluation (theory/g2, theory/b2)."),
)  # fmt: skip
def run(
    task, algorithm, config, measure, preset, rounds, seed, out, data, assignments, resume, track,
    distributed,
):  # fmt: skip
    """Train TASK with one algorithm."""
    from mixfl.runs.given import read_config

    given = by_hand(rounds, seed, assignments, measure)
    head, keys = read_config(config) if config is not None else ({}, {})
    task = task or head.get("task")
    algorithm = algorithm or head.get("algorithm")
    if task is None:
        raise MixflError("which task? For example: mixfl run smile --algorithm 2wgt")
    if algorithm is None:
        raise MixflError(f"which algorithm? Give --algorithm with one of {ALL}.")
    check_names(task, [algorithm], track)
    start_jax({**keys, **given}, distributed)
    from mixfl.engine import processes
    from mixfl.runs.config import plan
    from mixfl.runs.progress import reporter, summary
    from mixfl.runs.training import run as train

    with processes.Together():
        planned = plan(
            task, algorithm, preset=preset or head.get("preset"), data=data or head.get("data"),
            config=keys, given=given,
        )  # fmt: skip
    name = task if ".py" not in task else planned.problem.name
    out = out or Path("runs") / f"{name}-{algorithm}-seed{planned.settings.seed}"
    result = train(planned, out, resume, reporter(processes.first()), track=track)
    if not processes.first():
        return
    if result.metrics:
        click.echo(f"round {result.metrics[-1]['round']}: {summary(result.metrics[-1])}")
    click.echo(f"The run is in {out} (model.safetensors, metrics.jsonl, config.toml).")


@cli.command()
@click.argument("task")
@options(
    click.option("--algorithms", default="fedavg,pt,1wgt,2wgt,oracle", show_default=True,
                 metavar="A,B,...", help="Algorithms to compare."),
    click.option("--trials", type=click.IntRange(min=1), default=1, show_default=True,
                 metavar="N", help="Trials of each, with seeds one apart."),
    JOBS,
)  # fmt: skip
def compare(
    task, algorithms, trials, jobs, preset, rounds, seed, out, data, assignments, resume, track,
    distributed,
):  # fmt: skip
    """Train TASK with several algorithms on the same cohorts and seeds."""
    given = by_hand(rounds, seed, assignments)
    ids = names(algorithms)
    check_names(task, ids, track)
    start_jax(given, distributed)
    from mixfl.engine import processes
    from mixfl.experiments import compare as comparison
    from mixfl.experiments.board import board
    from mixfl.experiments.trials import make
    from mixfl.runs.config import plan
    from mixfl.runs.progress import reporter

    problems: dict = {}
    with processes.Together():
        plans = [
            plan(task, a, preset=preset, data=data, given=given, shared_with=ids, problems=problems)
            for a in ids
        ]
    out = out or Path("runs") / f"compare-{plans[0].problem.name}"
    if distributed or (jobs or cores()) == 1 or len(ids) * trials == 1:
        outcomes = comparison.compare(
            plans, out, trials, resume, reporter(processes.first()), track
        )
    else:
        comparison.check(plans)
        several = comparison.planned_trials(plans, trials, given, track=track)
        outcomes = comparison.outcomes(make(several, out, jobs or cores(), board(), resume))
    if not processes.first():
        return
    print_table(*comparison.rows(outcomes), title=f"{plans[0].problem.name}: after training")
    metrics = comparison.shown_metrics(outcomes)
    if metrics:
        from mixfl.experiments import plots  # matplotlib is slow to import

        plot = out / comparison.PLOT
        plots.curves(
            {o.algorithm: o.trials for o in outcomes}, metrics, plot, plans[0].problem.name
        )
        click.echo(f"Runs: {out}/<algorithm>/   Plot: {plot}")
    if any(o.diverged for o in outcomes) and not any(o.trials for o in outcomes):
        raise SystemExit(3)


@cli.command()
@click.argument("task")
@options(
    click.option("--algorithm", "algorithms", required=True, metavar="ID[,ID]",
                 help="Algorithm, or several."),
    click.option("--over", multiple=True, metavar="KEY=V1,V2,...",
                 help="Values to try; given several times, all combinations."),
    click.option("--trials", type=click.IntRange(min=1), default=5, show_default=True,
                 metavar="N", help="Trials of each setting, with seeds one apart."),
    click.option("--by", metavar="METRIC",
                 help="What to choose by, on validation data (auc, accuracy, recall@10 or loss)."),
    JOBS, shared=SEVERAL_RUNS,
)  # fmt: skip
def sweep(
    task, algorithms, over, trials, by, jobs, preset, rounds, seed, out, data, assignments, resume,
    track,
):  # fmt: skip
    """Try settings of TASK: chosen on validation data, reported on test data."""
    from mixfl.runs.given import parse_over

    given, ids, over = by_hand(rounds, seed, assignments), names(algorithms), parse_over(over)
    twice = [k for k in over if k in given]
    if twice:
        raise MixflError(f"{twice[0]} is given by --over and by --set: leave one out.")
    check_names(task, ids, track)
    start_jax(given)
    from mixfl.experiments import compare as comparison
    from mixfl.experiments import sweep as sweeping
    from mixfl.experiments.board import board
    from mixfl.experiments.trials import make
    from mixfl.runs.config import plan
    from mixfl.tasks import find

    if "validation" in find(task).options:
        given.setdefault("validation", True)
    problems: dict = {}
    plans = [
        plan(task, a, preset=preset, data=data, given=given | keys, problems=problems)
        for a in ids
        for keys in sweeping.grid(over)
    ]
    comparison.check(plans)
    out = out or Path("runs") / f"sweep-{plans[0].problem.name}"
    seed = plans[0].settings.seed
    several = sweeping.planned_trials(
        plans[0].task, ids, over, trials, seed, given, preset=preset, data=plans[0].data,
        track=track,
    )  # fmt: skip
    ended = make(several, out, jobs or cores(), board(), resume)
    found = sweeping.settings(ended, over)
    choice = sweeping.choose(found, by)
    sweeping.save(found, choice, out)
    header, rows = sweeping.table(found, choice)
    print_table(header, rows, title=f"{plans[0].problem.name}: {trials} trials of each setting")
    for line in sweeping.verdict(found, choice):
        click.echo(line)
    click.echo(f"Runs: {out}/<algorithm>/<setting>/   Figures: {out / sweeping.RESULTS}")
    if choice.best is None:
        raise SystemExit(3)


@cli.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option(
    "--scale",
    default="quick",
    show_default=True,
    metavar="quick|full",
    help="quick: small, minutes; full: the paper's settings and trials.",
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
    help="Folder for runs and report (runs/reproduce-SCALE).",
)
@click.option("--list", "listing", is_flag=True, help="List tables and figures, with times.")
@JOBS
def reproduce(ids, scale, data, out, listing, jobs):  # fmt: skip
    """The paper's tables and figures, by their labels (all, if none is given), and its claims.

    Run again, it goes on where it stopped.
    """
    start_jax({})
    from mixfl.experiments import reproduce as paper
    from mixfl.experiments import study
    from mixfl.experiments.board import board
    from mixfl.experiments.report.save import save

    jobs = jobs or cores()
    wanted = paper.chosen(ids, scale, data)
    if listing:
        header = ["ID", "what", "study", f"time, {jobs} at a time"]
        print_table(header, paper.listed(scale, data, jobs))
        every = study.estimate(paper.chosen([], scale, data), jobs)
        click.echo(f"All of it: about {study.words(every)}.")
        return
    out = out or Path("runs") / f"reproduce-{scale}"
    paper.remember(out, ids, scale, data)
    time = study.words(study.estimate(wanted, jobs))
    click.echo(f"{len(wanted)} studies: about {time} on cores like ours, if nothing is made yet.")
    ended = paper.reproduce(wanted, out, jobs, board())
    document = paper.document(wanted, ended, out, command_line())
    save(document, out / "report.html")
    save(document, out / "report.md", "md")
    paper.draw(document, out / "figures")
    rows = [[f.number, f.says, f.data, f.verdict] for f in document.findings]
    print_table(["claim", "", "data", "verdict"], rows)
    click.echo(f"Report: {out / 'report.html'}   (also report.md, figures/, {paper.RUNS}/)")


def command_line() -> str:
    import shlex

    return shlex.join(["mixfl", *sys.argv[1:]])


@cli.command()
@options(shared=PROBLEM)
def check(task, preset, data, assignments):
    """Check TASK: are its losses sound, and do the algorithms agree as they must when K = 1?"""
    given = begin(task, assignments)
    from mixfl.experiments.check import check as run_check

    lines, good = run_check(task, preset, data, given)
    for line in lines:
        click.echo(line)
    raise SystemExit(0 if good else 1)


@cli.command()
@options(JSON, shared=PROBLEM)
def costs(task, preset, data, assignments, as_json):
    """What a client of TASK computes and sends: by the paper's formulas (movie), and counted.

    Without --preset, a task's paper preset.
    """
    import json

    from mixfl.runs.progress import steps

    given = begin(task, assignments)
    from mixfl.experiments import costs as counting

    with steps() as report:
        found = counting.costs(task, preset, data, given, report)
    if as_json:
        click.echo(json.dumps(counting.as_json(found), indent=2))
        return
    for title, header, rows in counting.tables(found):
        print_table(header, rows, title=title)
    for line in counting.notes(found):
        click.echo(line)


NUMBER: dict = dict(type=float, metavar="X")


@cli.command()
@click.option("--beta", required=True, **NUMBER, help="Smoothness of each term of the loss.")
@click.option("--mu", default=0.0, **NUMBER, help="Strong convexity of each term; 0: none.")
@click.option("--sigma2", required=True, **NUMBER, help="Variance of a client's batch gradient.")
@click.option("--sigma-c2", required=True, **NUMBER, help="Variance of a central batch gradient.")
@click.option("--sigma-f2", default=0.0, **NUMBER, help="Variance between the clients' gradients.")
@click.option("--G2", "G2", default=0.0, **NUMBER, help="G^2, the terms' dissimilarity.")
@click.option("--B2", "B2", default=1.0, **NUMBER, help="B^2, the same, relative.")
@click.option("--K", "K", required=True, type=int, metavar="N", help="Local steps, at least 2.")
@click.option("--S", "S", required=True, type=int, metavar="N", help="Clients per round.")
@click.option("--D2", "D2", **NUMBER, help="||x0 - x*||^2, for the convex bounds.")
@click.option("--F", "F", **NUMBER, help="f(x0) - f(x*), for the nonconvex bounds.")
@click.option("--epsilon", required=True, **NUMBER, help="Error to reach.")
@click.option("--eta-s", default=1.0, show_default=True, **NUMBER, help="Server learning rate.")
@click.option("--eta-m", default=1.0, show_default=True, **NUMBER, help="Merge learning rate.")
@JSON
def bounds(as_json, **symbols):
    """The paper's bounds: rounds to an error, largest steps, conditions (docs/theory.md)."""
    import json

    from mixfl.experiments import bounds as table

    entries = table.bounds(**symbols)
    if as_json:
        click.echo(json.dumps(table.as_json(entries), indent=2))
        return
    for title, header, rows in table.tables(entries):
        print_table(header, rows, title=title)
    for line in table.notes(entries):
        click.echo(line)


@cli.command()
@click.argument("task", required=False)
def keys(task):
    """List the keys for --set, with their defaults (and TASK's own)."""
    from mixfl.settings import KEYS

    preset: dict = {}
    if task:
        from mixfl.runs.config import preset_keys
        from mixfl.tasks import find

        found = find(task)
        preset = preset_keys(found, None, "")
    print_table(
        ["key", "default", "preset cpu", "meaning"] if preset else ["key", "default", "meaning"],
        [
            [k, str(f.default), *([str(preset.get(k, ""))] if preset else []), f.metadata["help"]]
            for k, f in KEYS.items()
        ],
    )
    if task and found.options:
        rows = [
            [k, str(v), str(preset.get(k, "")), found.help.get(k, "")]
            for k, v in found.options.items()
        ]
        print_table(["key", "default", "preset cpu", "meaning"], rows, title=f"keys of {task}")
        click.echo(f"presets: {', '.join(found.presets)} (cpu if none is given)")


@cli.command()
@options(
    click.option("--budget", type=click.FloatRange(min=1), default=120, show_default=True,
                 metavar="SECONDS", help="About how long it may take."),
    click.option("--target", type=click.FloatRange(0, 1, min_open=True, max_open=True),
                 default=0.1, show_default=True, metavar="PART",
                 help="The aim: this part of the first error f - f*."),
    click.option("--split", "column", metavar="COLUMN",
                 help="Would it pay to divide a population by what its clients have in it?"),
    click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
                 help="Folder for a page with the curves (runs/diagnose-TASK)."),
    JSON, shared=PROBLEM,
)  # fmt: skip
def diagnose(task, preset, data, assignments, budget, target, column, out, as_json):
    """Measure TASK, and say which algorithm fits, with which settings, and why."""
    import json

    from mixfl.runs.progress import steps

    given = begin(task, assignments, out)
    click.echo(f"Measuring {task}: about {budget:.0f} s (--budget), and compilation.", err=True)
    from mixfl.experiments.diagnose import Verdict

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


@cli.command()
@options(
    click.option("--rounds", type=click.IntRange(min=1), default=100, show_default=True,
                 metavar="N"),
    click.option("--simulations", type=click.IntRange(min=1), default=5, show_default=True,
                 metavar="N", help="With seeds one apart."),
    click.option("--out", metavar="DIR", type=click.Path(path_type=Path),
                 help="Folder for the curves (runs/dissimilarity-TASK)."),
    JSON, shared=PROBLEM,
)  # fmt: skip
def dissimilarity(task, preset, rounds, simulations, data, assignments, out, as_json):
    """Measure how much the gradients of TASK's terms differ, by the paper's protocol."""
    import json

    from mixfl.runs.progress import steps

    given = begin(task, assignments, out)
    from mixfl.experiments import dissimilarity as protocol

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


DIRS = click.argument("folders", nargs=-1, required=True, metavar="DIR...",
                      type=click.Path(path_type=Path))  # fmt: skip


@cli.command()
@DIRS
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write; report.html in the first DIR, Markdown to the terminal.",
)
@click.option("--format", type=click.Choice(["html", "md"]),
              help="By the ending of --out, or html.")  # fmt: skip
def report(folders, out, format):
    """A page with every run below DIR: charts, tables, configurations (docs/report.md)."""
    from mixfl.experiments.report.from_runs import REPRODUCED, document
    from mixfl.experiments.report.save import save

    if len(folders) == 1 and (folders[0] / REPRODUCED).is_file():
        start_jax({})
        from mixfl.experiments.reproduce import made as document
    format = format or ("md" if out is not None and out.suffix == ".md" else "html")
    found = document(folders)
    if format == "md" and out is None:
        from mixfl.experiments.report.markdown import markdown

        click.echo(markdown(found), nl=False)
        return
    out = out or folders[0] / "report.html"
    save(found, out, format)
    click.echo(f"Report: {out}")


@cli.command()
@DIRS
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="File to write, with the ending .pdf, .svg or .png.",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="M",
    help="Such as eval/auc; may be repeated. Without it, the most telling ones.",
)
def plot(folders, out, metrics):
    """Draw the runs below DIR, all of one task, for a paper."""
    from mixfl.experiments.report.from_runs import curves
    from mixfl.experiments.report.save import save_plot

    save_plot(curves(folders, metrics), out)
    click.echo(f"Plot: {out}")


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--history",
    required=True,
    metavar="ID,ID,...",
    help="Movies seen, oldest first: numbers or, where titles are known, parts of them.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="How many movies to recommend.",
)
@click.option(
    "--movies",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="MovieLens' movies.dat, for titles; without it, the titles of the run's data.",
)
def recommend(run, history, top, movies):
    """Recommend movies with the model of RUN, the folder of a finished movie run."""
    from mixfl.runs.directory import load
    from mixfl.tasks.recommendation import recommend as best

    found = load(run)
    seen, recommended = best(found.config, found.params, history, top, movies)
    click.echo("seen: " + "; ".join(f"{m.movie} {m.title}".strip() for m in seen))
    rows = [[m.title, str(m.movie), f"{m.score:.3f}"] for m in recommended]
    if any(m.title for m in recommended):
        print_table(["title", "movie", "score"], rows)
    else:
        print_table(["movie", "score"], [row[1:] for row in rows])


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", default="", metavar="TEXT", help="What the text begins with.")
@click.option("--length", default=300, show_default=True, metavar="N", help="Characters to add.")
@click.option(
    "--temperature",
    default=0.7,
    show_default=True,
    metavar="T",
    help="Below 1: the likelier characters; 0: always the likeliest.",
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="Of the draws.")
def sample(run, prompt, length, temperature, seed):
    """Let the trained model of RUN, a folder of a run of the text task, write text."""
    start_jax({})
    from mixfl.experiments.sample import sample as generate

    text, unknown = generate(run, prompt, length, temperature, seed)
    click.echo(prompt + text)
    if unknown:
        click.echo(f"Not in the vocabulary, read as unknown: {unknown!r}", err=True)


@cli.group()
def data():
    """Turn data sets into client stores, and look at stores (docs/data.md)."""


@data.command()
@click.argument("format")
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The data as its authors publish it: a file or a folder.",
)
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The store to write; it must not exist.",
)
@click.option("--group", metavar="N", help="Join N clients into one; CelebA: 3 if not given.")
@click.option("--group-examples", metavar="N", help="Join clients until they have N examples.")
@click.option("--split", metavar="BY", help="client:F, example:F or official: hold out a part.")
@click.option("--partition", metavar="P", help="iid:N or dirichlet:A:N, for data without clients.")
@click.option("--client", metavar="NAME", help="The column that names a row's client.")
@click.option("--label", metavar="NAME", help="The column for a Dirichlet partition.")
@click.option("--size", metavar="N", help="Side of the images in pixels.")
@click.option("--length", metavar="N", help="Characters of a sequence.")
@click.option("--normalize", is_flag=True, default=None, help="Text as TFF's: lower case, tokens.")
@click.option("--limit", metavar="N", help="Read N rows only.")
@click.option("--seed", metavar="N", help="Of splits and partitions.")
def prepare(format, source, target, **given):
    """Turn a data set into a client store.

    FORMAT is celeba, tff-celeba, tff-stackoverflow, leaf, movielens, wikipedia, text-by-user,
    images or table.
    """
    from mixfl.data.prepare import prepare as run_prepare
    from mixfl.runs.progress import steps

    with steps() as report:
        done = run_prepare(format, source, target, options=given, report=report)
    for line in done.lines():
        click.echo(line)


@data.command()
@click.argument("store", type=click.Path(path_type=Path))
def info(store):
    """Print a store's clients, examples, sizes and a histogram."""
    from mixfl.data.prepare import info as describe

    for line in describe(store):
        click.echo(line)


def print_table(header, rows, title=None):
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 or header[-1] == "meaning" else "right")
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 120
    Console(width=width, highlight=False).print(table)


def start_jax(keys, distributed: bool = False) -> None:
    """What must be said before JAX starts: where programs are kept, and its CPU devices."""
    from mixfl.memory import keep_freed_memory

    keep_freed_memory()
    import jax

    from mixfl.runs.programs import keep_programs

    keep_programs()
    wanted = keys.get("devices", "auto")
    devices = wanted if isinstance(wanted, int) else cores()
    with contextlib.suppress(RuntimeError):  # JAX runs already, where another program calls
        jax.config.update("jax_num_cpu_devices", min(max(devices, 1), 64))
    if distributed:
        from mixfl.engine import processes

        processes.start()


def main():
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        sys.stdout.flush()
        os._exit(130)  # an evaluation may be under way in its thread: it is not waited for
    except MixflError as error:
        click.echo(f"mixfl: {error}", err=True)
        end(error.exit_code, error.everywhere)
    except BrokenPipeError:
        end(1)
    except OSError as error:
        click.echo(f"mixfl: {error.filename or 'a file'}: {error.strerror or error}.", err=True)
        end(2, getattr(error, "everywhere", False))
    except Exception as error:
        # XLA says it by a RuntimeError.
        full = isinstance(error, RuntimeError) and "Out of memory" in str(error)
        if full or isinstance(error, MemoryError):
            advice = "lower cohort_chunk or central_chunk, or make the model smaller"
            click.echo(f"mixfl: out of memory: {advice}.", err=True)
            end(2)
        if not connected():
            raise
        traceback.print_exc()
        end(1)


def connected() -> bool:
    """Is it one of several processes?"""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def end(code: int, everywhere: bool = False) -> None:
    """Ends this process; at once where others wait for it in a sum, which ends them too."""
    if connected() and not everywhere:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)

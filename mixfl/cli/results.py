"""Commands for existing runs: report, plot, rewind, recommend, sample."""

from pathlib import Path

import click

from mixfl.cli.process import start_jax
from mixfl.cli.terminal import print_table

DIRS = click.argument("folders", nargs=-1, required=True, metavar="DIR...",
                      type=click.Path(path_type=Path))  # fmt: skip


@click.command()
@DIRS
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to write; default: report.html in the first DIR, or the terminal for Markdown.",
)
@click.option("--format", type=click.Choice(["html", "md"]),
              help="Default: by the ending of --out, otherwise html.")  # fmt: skip
def report(folders, out, format):
    """Make a page of every run below DIR: charts, tables, configurations (docs/report.md)."""
    from mixfl.report.from_runs import REPRODUCED, document
    from mixfl.report.save import save

    if len(folders) == 1 and (folders[0] / REPRODUCED).is_file():
        start_jax({})
        from mixfl.studies.reproduce import made as document
    format = format or ("md" if out is not None and out.suffix == ".md" else "html")
    content = document(folders)
    if format == "md" and out is None:
        from mixfl.report.markdown import markdown

        click.echo(markdown(content), nl=False)
        return
    out = out or folders[0] / "report.html"
    save(content, out, format)
    click.echo(f"Report: {out}")


@click.command()
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
    help="A metric such as eval/auc; may be repeated. Default: the main ones.",
)
def plot(folders, out, metrics):
    """Plot the runs below DIR, all of one task, for a paper."""
    from mixfl.report.from_runs import curves
    from mixfl.report.save import save_plot

    save_plot(curves(folders, metrics), out)
    click.echo(f"Plot: {out}")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
def rewind(run):
    """Put the run folder RUN back to its best checkpoint, to continue from there.

    For example, for a deployment whose model was spoiled. Later files are moved aside.
    """
    start_jax({})
    from mixfl.runs.best import rewind as back

    back(run, click.echo)


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--history",
    required=True,
    metavar="ID,ID,...",
    help="Movies seen, oldest first: numbers, or parts of titles if titles are known.",
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
    help="MovieLens' movies.dat, for titles; default: the titles in the run's data.",
)
def recommend(run, history, top, movies):
    """Recommend movies with the model in RUN, the run folder of a finished movie run."""
    from mixfl.runs.folder import load
    from mixfl.tasks.movie.recommendation import recommend as best

    loaded = load(run)
    seen, recommended = best(loaded.config, loaded.params, history, top, movies)
    click.echo("seen: " + "; ".join(f"{m.movie} {m.title}".strip() for m in seen))
    rows = [[m.title, str(m.movie), f"{m.score:.3f}"] for m in recommended]
    if any(m.title for m in recommended):
        print_table(["title", "movie", "score"], rows)
    else:
        print_table(["movie", "score"], [row[1:] for row in rows])


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", default="", metavar="TEXT", help="What the text begins with.")
@click.option("--length", default=300, show_default=True, metavar="N", help="Characters to add.")
@click.option(
    "--temperature",
    default=0.7,
    show_default=True,
    metavar="T",
    help="Lower: likelier characters; 0: always the likeliest.",
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed for the draws.")
def sample(run, prompt, length, temperature, seed):
    """Write text with the model in RUN, the run folder of a finished text run."""
    start_jax({})
    from mixfl.runs.folder import load
    from mixfl.tasks.text.sample import sample as generate

    loaded = load(run)
    text, unknown = generate(run, loaded.config, loaded.params, prompt, length, temperature, seed)
    click.echo(prompt + text)
    if unknown:
        click.echo(f"Not in the vocabulary, read as unknown: {unknown!r}", err=True)

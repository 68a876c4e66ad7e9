"""The commands of `mixfl data`: prepare, info."""

from pathlib import Path

import click

from mixfl.cli.groups import Suggesting


@click.group(cls=Suggesting)
def data():
    """Turn data sets into client stores, and inspect stores (docs/data.md)."""


@data.command()
@click.argument("format")
@click.option(
    "--from",
    "source",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The data set as published: a file or a folder.",
)
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The store to write; it must not exist.",
)
@click.option("--group", metavar="N", help="Join N clients into one (default: 3 for CelebA, or 1).")
@click.option("--group-examples", metavar="N", help="Join clients until they have N examples.")
@click.option("--split", metavar="BY", help="Hold out a part: client:F, example:F or official.")
@click.option("--partition", metavar="P", help="iid:N or dirichlet:A:N, for data without clients.")
@click.option("--client", metavar="NAME", help="The column that names a row's client.")
@click.option("--text", metavar="NAME", help="The column with the text.")
@click.option("--label", metavar="NAME", help="The column for a Dirichlet partition.")
@click.option("--size", metavar="N", help="Side length of the images in pixels.")
@click.option("--images", metavar="DIR", help="The folder with the images that a CSV file lists.")
@click.option("--length", metavar="N", help="Characters in a sequence.")
@click.option("--normalize", is_flag=True, default=None,
              help="Normalize text as TFF does: lower case, tokens.")  # fmt: skip
@click.option("--limit", metavar="N", help="Read only N records.")
@click.option("--seed", metavar="N", help="Seed for splits and partitions.")
def prepare(format, source, target, **given):
    """Turn a data set into a client store.

    FORMAT is celeba, tff-celeba, tff-stackoverflow, tff-hdf5, leaf, movielens, wikipedia,
    text-by-user, images or table.
    """
    from mixfl.data.prepare import prepare as run_prepare
    from mixfl.runs.sinks.terminal import steps

    with steps() as report:
        done = run_prepare(format, source, target, options=given, report=report)
    for line in done.lines():
        click.echo(line)


@data.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also draw who holds what: labels by client, sizes (.png, .pdf, .svg).",
)
@click.option(
    "--label", metavar="NAME", help="The column of labels for --plot (default: label, y)."
)
def info(store, plot, label):
    """Print a store's clients, examples, columns, sizes and a histogram."""
    from mixfl.data.info import draw
    from mixfl.data.prepare import info as describe

    for line in describe(store):
        click.echo(line)
    if plot is not None:
        draw(store, plot, label)
        click.echo(f"drawn: {plot}")

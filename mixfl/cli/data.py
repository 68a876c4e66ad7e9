"""The commands of `mixfl data`: prepare, info."""

from pathlib import Path

import click


@click.group()
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
@click.option("--images", metavar="DIR", help="The folder of the images that a CSV file names.")
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
    from mixfl.runs.sinks.terminal import steps

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

"""Commands for deployments on Flower: new, keys, worker."""

from pathlib import Path

import click

from mixfl.errors import MixflError

TASKS = ("smile", "text", "movie")


@click.group()
def flower():
    """Train on Flower, over a real network: docs/deploy.md."""


@flower.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--task", type=click.Choice(TASKS), default="smile", show_default=True)
def new(folder, task):
    """Write a small project to FOLDER: one Python file, and scripts that start everything."""
    from mixfl.flower.new import write_project

    write_project(folder, task)
    click.echo(f"{folder} has a project for the task {task}; {folder}/README.md says how to start.")


@flower.command()
@click.argument("folder", type=click.Path(path_type=Path), default="keys")
@click.option("--nodes", type=click.IntRange(min=0), default=3, show_default=True, metavar="N",
              help="Nodes that need a key; existing ones keep theirs.")  # fmt: skip
@click.option("--host", "hosts", multiple=True, metavar="NAME",
              help="Name or address by which nodes reach the server; may be repeated.")  # fmt: skip
def keys(folder, nodes, hosts):
    """Make keys and certificates in FOLDER (keys, if not given)."""
    from mixfl.flower.keys import make_keys

    written = make_keys(folder, nodes, hosts)
    names = ", ".join(path.name for path in written) or "nothing new: all are there"
    click.echo(f"{folder}: {names}")


@flower.command()
@click.argument("address")
@click.option("--secret", type=click.Path(path_type=Path, exists=True), metavar="FILE",
              help="As flower-supernode's --superexec-auth-secret-file.")  # fmt: skip
@click.option("--with-parent", is_flag=True, help="End with the process that starts it.")
def worker(address, secret, with_parent):
    """Answer the messages of the SuperNode whose Runtime API is at ADDRESS (host:port)."""
    from mixfl.flower.worker import watch

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise MixflError(f"{address}: expected host:port, such as 127.0.0.1:9094.")
    watch(address, secret, with_parent)

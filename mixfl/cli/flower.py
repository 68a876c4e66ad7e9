"""The commands of `mixfl flower`: new, keys, up, worker, superexec."""

import sys
from pathlib import Path

import click

from mixfl.cli.groups import Suggesting
from mixfl.errors import MixflError

TASKS = ("smile", "text", "movie")


@click.group(cls=Suggesting)
def flower():
    """Train on Flower, over a real network: docs/deploy.md."""


@flower.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--task", type=click.Choice(TASKS), default="smile", show_default=True)
def new(folder, task):
    """Write a small project to FOLDER: one Python file, and scripts that start everything."""
    from mixfl.deploy.flower.new_project import write_project

    write_project(folder, task)
    click.echo(f"{folder} has a project for the task {task}. To start, read {folder}/README.md.")


@flower.command()
@click.argument("folder", type=click.Path(path_type=Path), default="keys")
@click.option("--nodes", type=click.IntRange(min=0), default=3, show_default=True, metavar="N",
              help="Number of nodes; existing keys are kept.")  # fmt: skip
@click.option("--host", "hosts", multiple=True, metavar="NAME",
              help="Name or address by which nodes reach the server; may be repeated.")  # fmt: skip
def keys(folder, nodes, hosts):
    """Make keys and certificates in FOLDER (default: keys)."""
    from mixfl.deploy.flower.keys import make_keys

    written = make_keys(folder, nodes, hosts)
    names = ", ".join(path.name for path in written) or "nothing new: all files exist already"
    click.echo(f"{folder}: {names}")


@flower.command()
@click.argument("role", type=click.Choice(["server", "node", "all"]))
@click.argument("numbers", type=click.IntRange(min=1), nargs=-1, metavar="[N]...")
@click.option("--project", type=click.Path(path_type=Path, file_okay=False, exists=True),
              default=".", metavar="FOLDER",
              help="The project's folder; default: the current one.")  # fmt: skip
@click.option("--run", is_flag=True, help="Also train: repeat the run until it is finished.")
@click.option("--run-config", default="", metavar="KEYS",
              help="As for `flwr run`: \"algorithm='1wgt' out='runs/1wgt'\".")  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep serving when the run is finished.")
def up(role, numbers, project, run, run_config, keep):
    """Start what a machine in a deployment runs, and restart what exits.

    server: SuperLink and superexec, and with --run a run. node 1 2: SuperNodes and their workers.
    all: everything, on one machine. Ctrl-C stops everything. Output goes to logs/.
    """
    from mixfl.deploy.flower.roles import numbers as with_keys
    from mixfl.deploy.flower.roles import up as run_roles

    if (role == "node") != bool(numbers):
        raise MixflError(
            "mixfl flower up: give numbers with the role node, and only there: up node 1 2, "
            f"up server, up all; got {' '.join(['up', role, *map(str, numbers)])}."
        )
    run = run or bool(run_config)
    if role == "node" and (run or keep):
        raise MixflError("mixfl flower up node: --run and --keep are options for the server.")
    nodes = with_keys(project) if role == "all" else list(numbers)
    sys.exit(run_roles(project, role != "node", nodes, run, run_config, keep))


@flower.command()
@click.argument("address")
@click.option("--secret", type=click.Path(path_type=Path, exists=True), metavar="FILE",
              help="Like flower-supernode's --superexec-auth-secret-file.")  # fmt: skip
@click.option("--until", type=int, metavar="PID", help="Exit when this process has exited.")
def worker(address, secret, until):
    """Answer the messages of the SuperNode whose Runtime API is at ADDRESS (host:port)."""
    from mixfl.deploy.flower.worker import watch

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise MixflError(f"{address}: expected host:port, such as 127.0.0.1:9094.")
    watch(address, secret, until)


@flower.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def superexec(arguments):
    """Run flower-superexec without tokens on command lines."""
    from mixfl.deploy.flower.superexec import superexec as start

    start(list(arguments))

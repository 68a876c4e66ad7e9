"""Commands for deployments on Flower: new, keys, up, worker, superexec."""

import sys
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
    from mixfl.deploy.flower.new import write_project

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
    from mixfl.deploy.flower.keys import make_keys

    written = make_keys(folder, nodes, hosts)
    names = ", ".join(path.name for path in written) or "nothing new: all are there"
    click.echo(f"{folder}: {names}")


@flower.command()
@click.argument("role", type=click.Choice(["server", "node", "all"]))
@click.argument("numbers", type=click.IntRange(min=1), nargs=-1, metavar="[N]...")
@click.option("--project", type=click.Path(path_type=Path, file_okay=False, exists=True),
              default=".", metavar="FOLDER",
              help="The project's folder; this one, if not given.")  # fmt: skip
@click.option("--run", is_flag=True, help="Train, too: repeat the run until it is finished.")
@click.option("--run-config", default="", metavar="KEYS",
              help="As of `flwr run`, such as \"algorithm='1wgt' out='runs/1wgt'\".")  # fmt: skip
@click.option("--keep", is_flag=True, help="Go on serving when the run is finished.")
def up(role, numbers, project, run, run_config, keep):
    """Start what a machine of a deployment runs, and start again what ends.

    server: SuperLink and superexec, and with --run a run. node 1 2: SuperNodes and their workers.
    all: everything, on one machine. Ctrl-C stops it all. Output is in logs/.
    """
    from mixfl.deploy.flower.up import numbers as with_keys
    from mixfl.deploy.flower.up import up as keep_up

    if (role == "node") != bool(numbers):
        raise MixflError(
            "mixfl flower up: numbers are given to nodes, and to nodes only: up node 1 2, "
            f"up server, up all; got {' '.join(['up', role, *map(str, numbers)])}."
        )
    run = run or bool(run_config)
    if role == "node" and (run or keep):
        raise MixflError("mixfl flower up node: --run and --keep are the server's.")
    nodes = with_keys(project) if role == "all" else list(numbers)
    sys.exit(keep_up(project, role != "node", nodes, run, run_config, keep))


@flower.command()
@click.argument("address")
@click.option("--secret", type=click.Path(path_type=Path, exists=True), metavar="FILE",
              help="As flower-supernode's --superexec-auth-secret-file.")  # fmt: skip
@click.option("--until", type=int, metavar="PID", help="End when this process has ended.")
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
    """flower-superexec, without tokens in command lines."""
    from mixfl.deploy.flower.superexec import superexec as start

    start(list(arguments))

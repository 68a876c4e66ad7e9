"""The command watch."""

import webbrowser
from pathlib import Path

import click

from mixfl.errors import MixflError

LOOPBACK = "127.0.0.1"
OUTSIDE = (
    "Other machines can reach this page, and whoever has the address can stop runs. Nothing is "
    "encrypted; `ssh -L` would be."
)


@click.command()
@click.argument("folders", nargs=-1, metavar="[DIR]...", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N",
              help="Port to listen on; default: any that is free.")  # fmt: skip
@click.option("--host", default=LOOPBACK, show_default=True, metavar="ADDRESS",
              help="Address to listen on. Any other lets other machines in.")  # fmt: skip
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def watch(folders, port, host, opens):
    """Follow the runs below DIR (default: runs) on a page in your browser (docs/watch.md).

    Runs may be running or over, and come and go. Ctrl-C ends the page and no run.
    """
    from mixfl.watch.board import Board
    from mixfl.watch.server import Server

    folders = folders or (Path("runs"),)
    for folder in folders:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise MixflError(f"{folder} {what}: give a folder with runs (or where runs will be).")
    try:
        with Server(Board([f.absolute() for f in folders]), host, port) as server:
            click.echo(f"Watching {', '.join(map(str, folders))}: {server.address}")
            if host not in (LOOPBACK, "localhost", "::1"):
                click.echo(OUTSIDE, err=True)
            click.echo("Ctrl-C ends the page and no run.")
            if opens:
                webbrowser.open(server.address)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        click.echo()

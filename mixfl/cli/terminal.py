"""Printing tables, and the command line as it was typed."""

import sys


def print_table(header, rows, title=None):
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(header):
        words = i == 0 or header[-1] == "meaning" or name in ("what", "claim", "found")
        table.add_column(name, justify="left" if words else "right", no_wrap=i == 0)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 120
    Console(width=width, highlight=False).print(table)


def command_line() -> str:
    import shlex

    return shlex.join(["mixfl", *sys.argv[1:]])

"""The commands by what one wants to do, examples for each, and the nearest word for a wrong one."""

import difflib

import click

SECTIONS = {
    "Train": ("run", "compare", "sweep", "tune"),
    "Look at runs": ("watch", "report", "plot", "rewind"),
    "Use a trained model": ("predict", "export", "card", "recommend", "sample"),
    "Your own problem and data": ("check", "diagnose", "keys", "data", "privacy"),
    "Over a real network": ("flower",),
    "The paper": ("reproduce", "costs", "bounds", "dissimilarity"),
    "This installation": ("doctor", "completion"),
}

EXAMPLES = {
    "run": ("run smile --algorithm 2wgt", "run mine.py:problem --algorithm pt --rounds 100",
            "run smile --algorithm 2wgt --resume",
            "run smile --algorithm 2wgt --dp epsilon=4 --dp delta=1e-6"),
    "compare": ("compare smile --algorithms fedavg,pt,2wgt --trials 5",),
    "sweep": ("sweep smile --algorithm 2wgt --over client_lr=0.01,0.03,0.1 --trials 3",
              "sweep smile --algorithm pt --over client_lr=0.01,0.1 --on ray --out /shared/sweep"),
    "tune": ("tune smile --algorithms pt,2wgt --over client_lr=1e-3:1:log --trials 30",
             "tune mine.py:problem --over client_lr=0.01:1:log --over local_steps=1,2,4"),
    "watch": ("watch runs", "watch runs --port 8000 --open"),
    "report": ("report runs/compare-smile", "report runs --out all.md"),
    "plot": ("plot runs/compare-smile --out figure.pdf --metric eval/auc",),
    "rewind": ("rewind runs/smile-2wgt-seed0",),
    "predict": ("predict runs/smile-2wgt-seed0 --data faces.npz --out smiles.csv",),
    "export": ("export runs/smile-2wgt-seed0 --to onnx",
               "export runs/mine --to torch --out model.pt"),
    "card": ("card runs/smile-2wgt-seed0 --out README.md",),
    "recommend": ("recommend runs/movie-2wgt-seed0 --history 1,260,2571",),
    "sample": ("sample runs/text-2wgt-seed0 --prompt 'The '",),
    "check": ("check mine.py:problem", "check smile --algorithm mine.py:fed_prox"),
    "diagnose": ("diagnose mine.py:problem --budget 60",),
    "keys": ("keys", "keys smile --algorithm 2wgt"),
    "data prepare": ("data prepare celeba --from celeba --to stores/celeba --split client:0.1",
                     "data prepare table --from users.csv --to stores/users --client user"),
    "data info": ("data info stores/celeba --plot who.png",),
    "data": ("data prepare movielens --from ml-1m --to stores/movielens",
             "data info stores/celeba"),
    "privacy": ("privacy --clients 100000 --cohort 1000 --rounds 500 --delta 1e-6 --epsilon 4",),
    "privacy audit": ("privacy audit --algorithm 2wgt --epsilon 4 --canaries 500",),
    "flower": ("flower new project", "flower up all --project project --run"),
    "flower new": ("flower new project --task text",),
    "flower keys": ("flower keys keys --nodes 5 --host server.example.org",),
    "flower up": ("flower up server --run", "flower up node 1 2"),
    "flower worker": ("flower worker 127.0.0.1:9094",),
    "flower superexec": ("flower superexec --insecure",),
    "reproduce": ("reproduce --list", "reproduce --scale quick --jobs 2"),
    "costs": ("costs movie", "costs mine.py:problem --preset cpu --json"),
    "bounds": ("bounds --beta 1 --sigma2 1 --sigma-c2 1 --K 10 --S 100 --D2 1 --epsilon 0.1",),
    "dissimilarity": ("dissimilarity smile --rounds 50 --simulations 3",),
    "doctor": ("doctor", "doctor --quick"),
    "completion": ("completion bash", "completion zsh", "completion fish"),
}  # fmt: skip


class Suggesting(click.Group):
    """Names the nearest command in place of one that does not exist."""

    def resolve_command(self, ctx, args):
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1, cutoff=0.5)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"there is no command '{name}'.{hint}")
        return super().resolve_command(ctx, args)


class Grouped(Suggesting):
    """Lists its commands in sections."""

    def format_commands(self, ctx, formatter):
        width = max(len(name) for name in self.commands)
        for title, names in SECTIONS.items():
            lines = [
                (name.ljust(width), self.commands[name].get_short_help_str(100)) for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(lines)


def add_examples(command: click.Command, name: str = "") -> None:
    """At the end of the help of a command and of those in it."""
    if name:
        lines = "\n".join(f"  mixfl {example}" for example in EXAMPLES[name])
        command.epilog = f"\b\nExamples:\n{lines}"
    for inner, of in getattr(command, "commands", {}).items():
        add_examples(of, f"{name} {inner}".strip())


def near_choice(error: click.ClickException) -> str:
    """`Did you mean ...?`, for a value that is none of an option's choices."""
    param = getattr(error, "param", None)
    kind = getattr(param, "type", None)
    if not isinstance(error, click.BadParameter) or not isinstance(kind, click.Choice):
        return ""
    given = error.message.partition("'")[2].partition("'")[0]
    near = difflib.get_close_matches(given, map(str, kind.choices), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""

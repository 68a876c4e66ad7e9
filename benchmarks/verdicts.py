"""The tables of verdicts in docs/results.md, from the files verdicts.json of `mixfl reproduce`.

    python -m benchmarks.verdicts docs/results/verdicts_*.json              # a row a claim
    python -m benchmarks.verdicts docs/results/verdicts_*.json --figures    # all checks
    python -m benchmarks.verdicts docs/results/verdicts_*.json --earlier    # superseded versions

Of each study, the newest version of its protocol that a file has; with --earlier, the others.
"""

import json
from pathlib import Path

import click

from mixfl.report.document import Finding
from mixfl.report.markdown import plain, table

HEADER = [
    "#", "claim", "data", "verdict", "effect", "interval", "trials", "setting", "version"
]  # fmt: skip


def place(f: Finding):
    return not f.number.isdigit(), f.number.zfill(3), f.data, -f.version


def rows(findings: list[Finding]) -> list[list[str]]:
    return [
        [f.number, f.says, f.data, f.verdict, f.effect, f.interval, f.trials,
         f.setting.split(":")[0], str(f.version)]
        for f in sorted(findings, key=place)
    ]  # fmt: skip


def figures(findings: list[Finding]) -> list[str]:
    lines = []
    for f in sorted(findings, key=place):
        title = f"**{plain(f.number)}. {plain(f.says)}** ({plain(f.data)}): {f.verdict}"
        how = f"Version {f.version}, {f.trials or 0} trials. Setting: {plain(f.setting)}."
        lines += [title, "", how, ""]
        lines += [*(f"- {plain(words)}" for words in f.evidence), ""]
    return lines


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--figures", "detailed", is_flag=True, help="All checks of each claim.")
@click.option("--earlier", is_flag=True, help="Versions that a newer one has replaced.")
def main(files: tuple[Path, ...], detailed: bool, earlier: bool) -> None:
    every = []
    for file in files:
        for versions in json.loads(file.read_text()).values():
            newest = max(versions, key=int)
            shown = [v for v in versions if (v != newest) == earlier]
            every += [Finding(**f) for v in shown for f in versions[v]]
    click.echo("\n".join(figures(every) if detailed else table(HEADER, rows(every))))


if __name__ == "__main__":
    main()

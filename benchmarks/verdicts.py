"""The table of verdicts in docs/results.md, from the files verdicts.json of `mixfl reproduce`.

    python -m benchmarks.verdicts docs/results/verdicts_1.json OUT/verdicts.json ...

All versions of a protocol are listed, the newest first.
"""

import json
from pathlib import Path

import click

from mixfl.report.document import Finding
from mixfl.report.markdown import table

HEADER = [
    "#", "claim", "data", "verdict", "effect", "interval", "trials", "setting", "version"
]  # fmt: skip


def rows(findings: list[Finding]) -> list[list[str]]:
    def place(f: Finding):
        return not f.number.isdigit(), f.number.zfill(3), f.data, -f.version

    return [
        [f.number, f.says, f.data, f.verdict, f.effect, f.interval, f.trials,
         f.setting.split(":")[0], str(f.version)]
        for f in sorted(findings, key=place)
    ]  # fmt: skip


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    studies = [study for file in files for study in json.loads(file.read_text()).values()]
    every = [Finding(**f) for study in studies for found in study.values() for f in found]
    click.echo("\n".join(table(HEADER, rows(every))))


if __name__ == "__main__":
    main()

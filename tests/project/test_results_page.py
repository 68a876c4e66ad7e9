"""The tables of verdicts in the docs are those of the verdicts that are kept beside them."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.verdicts import main

ROOT = Path(__file__).parents[2]
PAGES = [
    ("results.md", "verdicts_2.json", []),
    ("results/claims_2.md", "verdicts_2.json", ["--figures"]),
    ("results/version_1.md", "verdicts_1.json", []),
]


@pytest.mark.parametrize(("page", "verdicts", "options"), PAGES)
def test_a_page_has_what_the_verdicts_say(page, verdicts, options):
    made = CliRunner().invoke(main, [str(ROOT / "docs/results" / verdicts), *options])
    assert made.exit_code == 0
    assert made.output.count("\n") > 20
    assert made.output.strip() in (ROOT / "docs" / page).read_text()

"""The pages to paste in docs run as they are."""

import re
from pathlib import Path

import pytest

from mixfl.randomness import takes_key

DOCS = Path(__file__).parents[2] / "docs"


def pages(name: str, *kinds: str) -> dict[str, str]:
    found = re.findall(r"<!-- page -->\n```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    return dict(zip(kinds, found, strict=True))


PAGES = pages("models.md", "pytorch", "flax", "equinox", "frozen")
RANDOM = pages("randomness.md", "images", "flax", "equinox")


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_trains_a_module(kind):
    names: dict = {}
    exec(compile(PAGES[kind], f"docs/models.md ({kind})", "exec"), names)
    assert names["result"].metrics[-1]["round"] == 5
    assert "module" in names


@pytest.mark.parametrize("kind", RANDOM)
def test_a_page_trains_with_draws(kind):
    names: dict = {}
    exec(compile(RANDOM[kind], f"docs/randomness.md ({kind})", "exec"), names)
    assert names["result"].metrics[-1]["round"] == 5
    (term, _) = names["problem"].terms
    assert takes_key(term.loss)

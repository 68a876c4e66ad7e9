"""The pages to paste in docs/models.md run as they are."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
PAGES = dict(
    zip(
        ("pytorch", "flax", "equinox"),
        re.findall(r"<!-- page -->\n```python\n(.*?)```", TEXT, re.DOTALL),
        strict=True,
    )
)


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_trains_a_module(kind):
    names: dict = {}
    exec(compile(PAGES[kind], f"docs/models.md ({kind})", "exec"), names)
    assert names["result"].metrics[-1]["round"] == 5
    assert "module" in names

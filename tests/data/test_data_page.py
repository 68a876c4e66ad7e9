"""The code in docs/data.md runs as it stands there, and does what the page says."""

import re
from pathlib import Path

import pytest

import mixfl

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- ([\w-]+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
NEEDS = {
    "pandas": "pandas", "huggingface": "datasets", "flower": "flwr_datasets", "torch": "torch",
}  # fmt: skip


def test_every_block_has_a_name():
    assert len(BLOCKS) == TEXT.count("```python") > 0


@pytest.mark.parametrize("name", BLOCKS)
def test_code_of_the_page(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(compile(BLOCKS[name], f"docs/data.md ({name})", "exec"), found)
    clients = found["clients"]
    assert isinstance(clients, mixfl.ClientData)
    assert len(clients) > 1
    assert len(clients.examples.all()) >= 2  # columns

"""What a user installs stays small: modules, packages, bytes. And the container's file."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import package

ROOT = Path(__file__).parents[2]
WHEEL_BYTES = 1_250_000  # a third of it is plotly, for reports that need no network
IMPORT_MS = 100  # of the processor; JAX alone takes more
RECORD = json.loads(package.RECORD.read_text(encoding="utf-8"))


def modules(name: str) -> int:
    code = package.MODULES % name
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return int(said.stdout)


def test_importing_loads_little():
    """JAX alone has more than a thousand modules; time can't be judged on a shared machine."""
    assert modules("mixfl") < 60
    assert modules("mixfl.cli") < 300
    for found in RECORD["pythons"].values():
        assert found["modules_of_mixfl"] < 60
        assert found["modules_of_cli"] < 300


def needed(name: str) -> set[str]:
    """The packages that come with one, without extras, as far as they are installed here."""
    found, open_names = set(), [name]
    while open_names:
        name = canonicalize_name(open_names.pop())
        if name in found:
            continue
        found.add(name)
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                open_names.append(requirement.name)
    return found


def test_few_packages_are_installed():
    found = needed("mixfl")
    assert {"jax", "numpy", "click"} <= found
    assert len(found) < 75, sorted(found)
    heavy = {"torch", "flwr", "transformers", "mlflow-skinny", "pandas", "mkdocs", "ipython"}
    assert not found & heavy
    for recorded in RECORD["pythons"].values():
        assert recorded["packages"] < 75


def supported() -> set[str]:
    """The versions that pyproject.toml names."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    words = (text.rpartition(" ")[2] for text in project["classifiers"] if " Python :: 3." in text)
    return {*words}


def test_every_supported_python_was_tried_and_what_was_recorded_is_small():
    """`make package PYTHONS="..."` records it: packages, modules, bytes, the processor's time."""
    recorded = RECORD["pythons"]
    assert {version.rpartition(".")[0] for version in recorded} == supported()
    assert supported() == {"3.11", "3.12", "3.13"}
    for found in recorded.values():
        assert 0 < found["import_cpu_ms"] < IMPORT_MS
    assert RECORD["wheel_bytes"] < WHEEL_BYTES
    assert RECORD["sdist_bytes"] < 5_000_000


@pytest.mark.system
def test_wheel_and_sdist(tmp_path):
    wheel, sdist = package.built(tmp_path)
    assert wheel.stat().st_size < WHEEL_BYTES
    assert sdist.stat().st_size < 5_000_000
    names = zipfile.ZipFile(wheel).namelist()
    assert "mixfl/py.typed" in names
    assert any(name.endswith("presets/demo.toml") for name in names)
    assert {name.split("/")[0] for name in names} == {
        "mixfl",
        wheel.name.split("-py3")[0] + ".dist-info",
    }


# The container, which is built and run by .github/workflows/container.yml

KNOWN = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_containers_file_is_in_order():
    found = instructions()
    assert {word for word, _ in found} <= KNOWN
    for image in (rest.split()[0] for word, rest in found if word == "FROM"):
        assert re.fullmatch(r"python:3\.1[1-3]-slim", image)
    assert int(dict(found)["USER"]) > 0  # not root
    assert json.loads(dict(found)["ENTRYPOINT"]) == ["mixfl"]
    assert json.loads(dict(found)["CMD"]) == ["--help"]
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in kept
    for name in (line[1:] for line in kept if line.startswith("!")):
        assert (ROOT / name).exists()
    assert "!constraints.txt" in kept


def test_the_container_is_built_run_and_linted_elsewhere():
    text = (ROOT / ".github" / "workflows" / "container.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(text)["jobs"].values()
    steps = " ".join(str(step) for step in job["steps"])
    for part in ("hadolint", "docker build", "docker run --rm mixfl --version"):
        assert part in steps

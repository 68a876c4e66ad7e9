"""The files around the package: they can be read, they agree, and they call what there is."""

import os
import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import mixfl

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_version_is_that_of_the_installed_package(monkeypatch):
    assert mixfl.__version__ == metadata.version("mixfl")
    Version(mixfl.__version__)

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert mixfl.__version__ == "0+unknown"
    assert PROJECT["tool"]["hatch"]["version"]["source"] == "vcs"


def test_versions_agree():
    """The last tag, if there is one, the changelog and the citation."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[([0-9.]+)\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$", changes, re.M)
    coming = re.findall(r"The first will be ([0-9.]+[0-9])\.", changes)
    newest = [*released, *coming][0]
    assert str(CITATION["version"]) == newest
    fallback = Version(PROJECT["tool"]["hatch"]["version"]["fallback-version"])
    assert fallback.is_devrelease
    assert fallback.base_version == (newest if not released else fallback.base_version)
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return
    listed = subprocess.run(
        ["git", "tag", "--list", "v*", "--merged"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert sorted(map(Version, listed)) == sorted(map(Version, released))


def test_changelog_has_the_usual_headings():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Changelog"
    sections = [line for line in lines if line.startswith("## ")]
    assert sections[0] == "## [Unreleased]"
    usual = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    kinds = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    assert kinds
    assert set(kinds) <= usual


def test_citation_names_the_software_and_the_paper():
    needed = {"cff-version", "message", "title", "authors"}
    assert needed <= CITATION.keys()
    assert CITATION["license"] == PROJECT["project"]["license"]
    (paper,) = CITATION["references"]
    assert needed - {"cff-version", "message"} | {"type", "year"} <= paper.keys()
    names = [author["family-names"] for author in paper["authors"]]
    assert names == ["Augenstein", "Hard", "Ning", "Singhal", "Kale", "Partridge", "Mathews"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert paper["title"] in readme
    assert f"({names[0]} et al., {paper['year']})" in readme


def test_the_workflow_runs_what_ci_runs():
    (job,) = WORKFLOW["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert ".ci/run" in runs
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    stages = re.findall(r"^stage ([a-z-]+)", ci, re.M)
    tests = {"test", "test-flower", "test-numbers", "test-system"}
    assert set(stages) == {"lint", *tests, "docs", "package"}
    assert set(stages) <= set(targets)
    (judged,) = re.findall(r"^for target in (.*); do$", ci, re.M)
    assert sorted(judged.split()) == sorted(stages)
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_the_workflow_has_the_versions_of_python_that_are_claimed():
    (job,) = WORKFLOW["jobs"].values()
    tested = job["strategy"]["matrix"]["python"]
    claimed = re.findall(r"Python :: (3\.[0-9]+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert tested == claimed == ["3.11", "3.12", "3.13"]
    assert PROJECT["project"]["requires-python"] == f">={tested[0]}"


def test_hooks_before_a_commit_are_those_of_make_lint():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = config["repos"][0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = makefile.partition("\nlint:")[2].partition("\n\n")[0]
    tools = re.findall(r"\$\(BIN\)/(ruff check|ruff format|mypy)", lint)
    entries = [
        re.match(r"\.venv/bin/(ruff check|ruff format|mypy)", hook["entry"])[1] for hook in hooks
    ]
    assert entries == tools == ["ruff check", "ruff format", "mypy"]


def test_types_are_part_of_the_package():
    assert (ROOT / "mixfl" / "py.typed").read_bytes() == b""
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["mixfl"]}  # all of the folder, unless git ignores it
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git, in a clone")
    ignored = subprocess.run(
        ["git", "check-ignore", "mixfl/py.typed"], cwd=ROOT, capture_output=True, text=True
    )
    assert (ignored.returncode, ignored.stdout) == (1, "")

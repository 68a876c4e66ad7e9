"""What a user installs: builds the sdist and the wheel, and installs and tries the wheel in clean
environments, without extras.

    python -m benchmarks.package                       # with this Python
    python -m benchmarks.package python3.12 python3.13 # with others; records package.json

Needs the network, for the packages that mixfl needs. tests/project/test_package.py bounds what is
recorded.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
# What is loaded by a first line of a program, beside what Python itself loads.
MODULES = "import sys; before = {*sys.modules}; import %s; print(len({*sys.modules} - before))"
# Of the processor, since the machine may have other work.
TIME = "import time; t = time.process_time(); import mixfl; print(1000 * (time.process_time() - t))"
SMOKE = (
    ("--version",),
    ("--help",),
    ("keys", "smile"),
    ("run", "smile", "--preset", "demo", "--rounds", "2", "--algorithm", "2wgt", "--out", "run"),
    ("report", "run"),
    *(("export", "run", "--to", name) for name in ("jax-export", "safetensors")),
    ("card", "run"),
)


def main(pythons: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel, sdist = built(folder)
        print(f"{wheel.name}: {wheel.stat().st_size} bytes; {sdist.name}: {sdist.stat().st_size}")
        record: dict[str, Any] = {"wheel_bytes": wheel.stat().st_size,
                                  "sdist_bytes": sdist.stat().st_size, "pythons": {}}  # fmt: skip
        for i, python in enumerate(pythons or [sys.executable]):
            version, found = tried(python, wheel, folder / f"env-{i}")
            print(f"Python {version}: {found}")
            record["pythons"][version] = found
    if pythons:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


def built(folder: Path) -> tuple[Path, Path]:
    """The wheel is built from the sdist, as others would."""
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def tried(python: str, wheel: Path, env: Path) -> tuple[str, dict[str, Any]]:
    """Installs the wheel in a new environment, and runs some commands in an empty folder."""
    run([python, "-m", "venv", str(env)])
    inside = str(env / "bin" / "python")
    run([inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--constraint", str(ROOT / "constraints.txt"), str(wheel)])  # fmt: skip
    listed = run([inside, "-m", "pip", "list", "--format", "freeze", "--exclude", "pip",
                  "--exclude", "setuptools"])  # fmt: skip
    place = env / "empty"
    place.mkdir()
    for words in SMOKE:
        said = run([str(env / "bin" / "mixfl"), *words], place)
        if words == ("--version",):
            assert re.search(r"[0-9]+\.[0-9]+", said), said
    assert (place / "run" / "model.safetensors").exists()
    version = run([inside, "-c", "import platform; print(platform.python_version())"]).strip()
    return version, {
        "packages": len(listed.splitlines()),
        "modules_of_mixfl": int(run([inside, "-c", MODULES % "mixfl"], place)),
        "modules_of_cli": int(run([inside, "-c", MODULES % "mixfl.cli"], place)),
        "import_cpu_ms": round(float(run([inside, "-c", TIME], place)), 1),
    }


def run(words: list[str], cwd: Path = ROOT) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])

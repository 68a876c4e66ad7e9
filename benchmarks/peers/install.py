"""Installs the peers, each in its own virtual environment: `make bench-peers`.

    python -m benchmarks.peers.install [fedjax] [pfl] [flower]

They can't share one, because fedjax needs an older JAX. An environment is made again when its
requirements file has changed. Peers that can't be installed are reported and left out.
"""

import subprocess
import sys
from pathlib import Path

PEERS = ("fedjax", "pfl", "flower")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".bench"


class NotInstalled(Exception):
    pass


def python(peer: str) -> str:
    """The peer's interpreter; installs the peer first if necessary."""
    folder = FOLDER / peer
    interpreter = folder / "bin" / "python"
    wanted = (Path(__file__).parent / f"{peer}.txt").read_text()
    ready = folder / "ready"
    if ready.is_file() and ready.read_text() == wanted:
        return str(interpreter)
    print(f"Installing {peer} into {folder.relative_to(ROOT)} (minutes, once)", flush=True)
    FOLDER.mkdir(exist_ok=True)
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "--requirement", str(Path(__file__).parent / f"{peer}.txt")],
        [str(interpreter), "-c", f"import benchmarks.peers.{peer}_worker"],
    ):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            lines = [x for x in (done.stderr or done.stdout).splitlines() if x.strip()]
            errors = [x for x in lines if "error" in x.lower()] or lines or ["no message"]
            raise NotInstalled(f"{peer} can't be installed: {errors[-1].strip()[:300]}")
    ready.write_text(wanted)
    return str(interpreter)


def main(names) -> int:
    missing = 0
    for peer in names or PEERS:
        try:
            print(f"{peer}: {Path(python(peer)).relative_to(ROOT)}")
        except NotInstalled as error:
            print(error)
            missing += 1
    return min(missing, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What a machine of a deployment runs, by its role: the scripts of the project, kept up."""

import os
import sys
from pathlib import Path

from mixfl.deploy.flower.keeper import RunKeeper, run_folder
from mixfl.deploy.flower.supervisor import Child, Supervisor, say
from mixfl.errors import MixflError

SUPERLINK = "127.0.0.1:8000"  # as in env.sh


def up(
    project: Path, server: bool, nodes: list[int], run: bool = False, run_config: str = "",
    keep: bool = False,
) -> int:  # fmt: skip
    """Until it is stopped, or the run is finished; the exit code."""
    project = project.resolve()
    _check(project, server, nodes)
    address = os.environ.get("SUPERLINK", SUPERLINK)
    out = run_folder(project, run_config) if run else None
    # `flwr` and the others of this Python, also where its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {"PATH": path}
    children, keeper = [], None
    if server:
        superlink = Child("superlink", ["./superlink.sh"], project, environment)
        superexec = Child("superexec", ["./superexec.sh"], project, environment)
        children += [superlink, superexec]
        kept = RunKeeper(
            project, address, out, run_config, keep, lambda: superexec.starts,
            environment=environment,
        )  # fmt: skip
        keeper = kept.kept
    for i, n in enumerate(nodes):
        children += _node(project, n, i, environment)
    say(f"keeping up {', '.join(child.name for child in children)} in {project}")
    return Supervisor(project, children, keeper).run()


def _node(project: Path, n: int, place: int, environment: dict[str, str]) -> list[Child]:
    own = {**environment, "WORKER": "apart"}
    if "PORT" in os.environ:  # of the first node here
        own["PORT"] = str(int(os.environ["PORT"]) + place)
    return [
        Child(f"node-{n}", ["./supernode.sh", str(n)], project, own),
        Child(f"worker-{n}", ["./worker.sh", str(n)], project, own),
    ]


def numbers(project: Path) -> list[int]:
    """The nodes whose keys are here."""
    names = [path.stem.removeprefix("node-") for path in project.glob("keys/node-*.pub")]
    return sorted(int(name) for name in names if name.isdecimal())


def _check(project: Path, server: bool, nodes: list[int]) -> None:
    if not (project / "supernode.sh").is_file():
        raise MixflError(
            f"{project} has no project of `mixfl flower new` (no supernode.sh in it): go to its "
            "folder, or give --project."
        )
    wanted = ["server.key", "server.crt", "server.secret"] if server else []
    wanted += [f"node-{n}{end}" for n in nodes for end in ("", ".secret")]
    missing = [name for name in wanted if not (project / "keys" / name).is_file()]
    if missing:
        raise MixflError(
            f"keys/{missing[0]} is not in {project}: ./keys.sh makes it, or bring it from the "
            "machine on which the keys were made."
        )

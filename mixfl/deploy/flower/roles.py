"""`mixfl flower up`: the processes that a machine runs by its role (server, node or both)."""

import functools
import os
import sys
from pathlib import Path

from mixfl.deploy.flower.flwr_command import FlwrCommand
from mixfl.deploy.flower.run_keeper import RunKeeper, keep_server, run_folder
from mixfl.deploy.flower.supervisor import Child, Supervisor, say
from mixfl.errors import MixflError

SUPERLINK = "127.0.0.1:8000"  # as in env.sh


def up(
    project: Path, server: bool, nodes: list[int], run: bool = False, run_config: str = "",
    keep: bool = False,
) -> int:  # fmt: skip
    """Runs until it is stopped or the run has ended. Returns the exit code."""
    project = project.resolve()
    _check(project, server, nodes)
    address = os.environ.get("SUPERLINK", SUPERLINK)
    out = run_folder(project, run_config) if run else None
    # Find `flwr` and others next to this Python, even if its environment is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {"PATH": path}
    children, new_keeper = [], None
    if server:
        superlink = Child("superlink", ["./superlink.sh"], project, environment)
        superexec = Child("superexec", ["./superexec.sh"], project, environment)
        children += [superlink, superexec]
        flwr = FlwrCommand(project, address, environment=environment)
        kept = None if out is None else RunKeeper(flwr, out, run_config, lambda: superexec.starts)
        new_keeper = functools.partial(keep_server, flwr, kept, keep)
    for i, n in enumerate(nodes):
        children += _node(project, n, i, environment)
    say(f"supervising {', '.join(child.name for child in children)} in {project}")
    return Supervisor(project, children, new_keeper).run()


def _node(project: Path, n: int, place: int, environment: dict[str, str]) -> list[Child]:
    own = {**environment, "WORKER": "apart"}
    if "PORT" in os.environ:  # the first node's
        own["PORT"] = str(int(os.environ["PORT"]) + place)
    return [
        Child(f"node-{n}", ["./supernode.sh", str(n)], project, own),
        Child(f"worker-{n}", ["./worker.sh", str(n)], project, own),
    ]


def numbers(project: Path) -> list[int]:
    """The numbers of the nodes whose keys are in the project."""
    names = [path.stem.removeprefix("node-") for path in project.glob("keys/node-*.pub")]
    return sorted(int(name) for name in names if name.isdecimal())


def _check(project: Path, server: bool, nodes: list[int]) -> None:
    if not (project / "supernode.sh").is_file():
        raise MixflError(
            f"{project} is not a project made by `mixfl flower new` (no supernode.sh in it): run "
            "this in the project's folder, or give --project."
        )
    wanted = ["server.key", "server.crt", "server.secret"] if server else []
    wanted += [f"node-{n}{end}" for n in nodes for end in ("", ".secret")]
    missing = [name for name in wanted if not (project / "keys" / name).is_file()]
    if missing:
        raise MixflError(
            f"keys/{missing[0]} is not in {project}: make it with ./keys.sh, or copy it from the "
            "machine on which the keys were made."
        )

"""Training through everything that can go wrong: answers that are malformed, late or none, nodes
that attack, and processes that are killed: nodes, workers and their watchers, the SuperLink,
superexec, the run's server and the supervisors. Real processes; the long form is
`make test-chaos`."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import attackers
import chaotic
import jax
import numpy as np
import pytest

import mixfl
from benchmarks.deployment import HUNG, Supervised, end_with_parent
from mixfl.deploy.flower import processes

pytestmark = pytest.mark.flower

VICTIMS = ("node", "worker", "watcher", "superlink", "superexec", "server", "supervisor")
HONEST = 3
AWAY = 90.0  # seconds; Flower gives a run up after 60 without a word of it


def test_training_survives(tmp_path):
    survived(tmp_path / "project", rounds=8, kills=7, away=False, attacks=())


@pytest.mark.slow
def test_training_survives_for_long(tmp_path):
    """The SuperLink is away for longer than Flower waits, too."""
    survived(tmp_path / "project", rounds=40, kills=35, away=True, attacks=("slow", "bomb"))


def survived(project: Path, rounds: int, kills: int, away: bool, attacks: tuple[str, ...]) -> None:
    nodes = HONEST + len(attacks)
    with Supervised(project, nodes=nodes) as deployment, contextlib.ExitStack() as stack:
        make_chaotic(project, nodes)
        out = project / "runs/chaos"
        config = dict(
            rounds=rounds, out=str(out), round_deadline=chaotic.DEADLINE,
            min_clients=nodes, min_replies=1 / nodes,
        )  # fmt: skip
        given = " ".join(f"{k}={json.dumps(v)}" for k, v in config.items())
        arguments = ["--keep", "--run-config", given]
        deployment.start("server", *arguments)
        for n in range(1, HONEST + 1):
            deployment.start(f"node-{n}")
        for n, kind in enumerate(attacks, HONEST + 1):
            stack.callback(ended, attacker(deployment, kind, n))
        kept = disturbed(deployment, arguments, rounds, kills, away)
        told = "".join(deployment.flwr("log", run, "--show") for run in deployment.runs())
        lines = recorded(project)

    assert len(kept) == kills
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    for then in kept:  # when something was killed; its last round may have been repeated
        assert lines[: len(then) - 1] == then[:-1]
    check_counts(lines, [len(then) for then in kept], nodes)
    result = mixfl.load(out)
    assert result.status == "finished"
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(result.params))
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    assert "the owner's secret" not in told
    if "bomb" in attacks:
        assert lines[-1]["clients/rejected/oversized"] >= 1


def attacker(deployment: Supervised, kind: str, n: int) -> subprocess.Popen:
    keys = deployment.folder / "keys"
    with open(deployment.log_file(f"{kind}-{n}"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, attackers.__file__, kind, deployment.address, keys / "ca.crt",
             keys / f"node-{n}", str(n - 1)],
            env=deployment.environment(), stdout=log, stderr=subprocess.STDOUT,
            preexec_fn=end_with_parent,
        )  # fmt: skip


def ended(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def make_chaotic(project: Path, nodes: int) -> None:
    shutil.copy(chaotic.__file__, project / "chaotic.py")
    app = project / "app.py"
    honest = "client = mixfl.flower.client_app(problem)\n"
    assert honest in app.read_text()
    chaos = "import chaotic\n\nclient = mixfl.flower.client_app(problem, chaotic.answer)\n"
    app.write_text(app.read_text().replace(honest, chaos))
    file = project / "pyproject.toml"
    section, keys = "[tool.flwr.app.config]", f"eval_every = 1\ncohort_size = {nodes}"
    file.write_text(file.read_text().replace(section, f"{section}\n{keys}"))


def recorded(project: Path) -> list[dict]:
    """The rounds that were done, as the run's folder has them."""
    file = project / "runs/chaos/metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def disturbed(
    deployment: Supervised, arguments: list[str], rounds: int, kills: int, away: bool
) -> list[list[dict]]:
    """Trains to the end. What was recorded whenever something was killed."""
    rng = np.random.default_rng(chaotic.SEED)
    victims = [str(v) for _ in range(-(-kills // len(VICTIMS))) for v in rng.permutation(VICTIMS)]
    kept = []
    for i, victim in enumerate(victims[:kills]):
        due = 1 + i * (rounds - 1) // kills
        deployment.wait_until(
            lambda due=due: len(recorded(deployment.folder)) >= due, f"round {due}", 2 * HUNG
        )
        kept.append(recorded(deployment.folder))
        n = int(rng.integers(1, HONEST + 1))
        if victim == "supervisor":
            kill_supervisor(deployment, ["server", f"node-{n}"][rng.integers(2)], arguments)
        else:
            kill(deployment, victim, n)
        if away and i == kills // 2:
            keep_away(deployment)
    deployment.wait_until(
        lambda: "run: finished" in deployment.log("up-server"), "the end", HUNG + 20 * rounds
    )
    return kept


def kill(deployment: Supervised, victim: str, n: int) -> None:
    part = {
        "node": deployment.part(f"node-{n}", "flower-supernode"),
        "worker": deployment.part(f"worker-{n}", "mixfl.deploy.flower.worker"),
        "watcher": deployment.part(f"worker-{n}", "flower\0worker"),
        "superlink": deployment.part("superlink", "flower-superlink"),
        "superexec": deployment.part("superexec", "flower\0superexec"),
        "server": deployment.part("superexec", "flwr-serverapp"),
    }[victim]
    deployment.wait_until(lambda: processes.send(part, signal.SIGKILL), f"a {victim} to kill")


def kill_supervisor(deployment: Supervised, name: str, arguments: list[str]) -> None:
    """It is started again, as systemd would do it."""
    deployment.kill(name)
    deployment.start(name, *(arguments if name == "server" else []))


def keep_away(deployment: Supervised) -> None:
    """The SuperLink is killed and not started again for a while; the run's server stays."""
    supervisor = deployment.processes["server"]
    supervisor.send_signal(signal.SIGSTOP)
    try:
        processes.send(deployment.part("superlink", "flower-superlink"), signal.SIGKILL)
        time.sleep(AWAY)
    finally:
        supervisor.send_signal(signal.SIGCONT)


def check_counts(lines: list[dict], disturbed: list[int], nodes: int) -> None:
    """Everyone who was asked is accounted for; and where nothing was killed, by what really went
    wrong, or by being missed, after a kill before."""
    before: dict = {}
    for line in lines:
        rejected = {k: v for k, v in line.items() if k.startswith("clients/rejected/")}
        assert line["clients/rejected"] == sum(rejected.values())
        parts = ("clients/accepted", "clients/rejected", "clients/surplus")
        assert line["clients/asked"] == sum(line.get(part, 0) for part in parts)
        more = {k: v - before.get(k, 0) for k, v in line.items() if k.startswith("clients/")}
        before = line
        round = line["round"] - 1
        everyone = more["clients/asked"] == nodes
        if everyone and round - 1 not in disturbed and round not in disturbed:
            wrong = Counter(
                filter(None, (chaotic.fault(round, number) for number in range(HONEST)))
            )
            missing = sum(more.get(f"clients/rejected/{r}", 0) for r in ("late", "gone", "crashed"))
            for reason, count in wrong.items():
                assert more.get(f"clients/rejected/{reason}", 0) + missing >= count

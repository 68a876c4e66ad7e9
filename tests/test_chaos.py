"""Training through everything that can go wrong: answers that are malformed, late or none, nodes,
workers, the SuperLink and the server killed at random. Real processes: `make test-chaos`."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import chaotic
import jax
import numpy as np
import pytest

import mixfl
from benchmarks.deployment import HUNG, Deployment

pytestmark = [pytest.mark.flower, pytest.mark.slow]


@pytest.mark.parametrize(("rounds", "kills"), [(8, 4), (40, 30)], ids=["short", "long"])
def test_training_survives(tmp_path, rounds, kills):
    project = tmp_path / "project"
    with Deployment(project) as deployment:
        make_chaotic(project)
        config = dict(
            rounds=rounds, out=str(project / "runs/chaos"), round_deadline=chaotic.DEADLINE,
            min_replies=0.3,
        )  # fmt: skip
        kept = disturbed(deployment, config, kills)
        lines = recorded(project)

    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    for then in kept:  # when something was killed; its last round may have been repeated
        assert lines[: len(then) - 1] == then[:-1]
    check_counts(lines, [len(then) for then in kept])
    result = mixfl.load(project / "runs/chaos")
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(result.params))
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    assert "the owner's secret" not in deployment.server_told


def make_chaotic(project: Path) -> None:
    shutil.copy(chaotic.__file__, project / "chaotic.py")
    app = project / "app.py"
    honest = "client = mixfl.flower.client_app(problem)\n"
    assert honest in app.read_text()
    chaos = "import chaotic\n\nclient = mixfl.flower.client_app(problem, chaotic.answer)\n"
    app.write_text(app.read_text().replace(honest, chaos))
    file = project / "pyproject.toml"
    section = "[tool.flwr.app.config]"
    file.write_text(file.read_text().replace(section, f"{section}\neval_every = 1"))


def recorded(project: Path) -> list[dict]:
    """The rounds that were done, as the run's folder has them."""
    file = project / "runs/chaos/metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def disturbed(deployment: Deployment, config: dict, kills: int) -> list[list[dict]]:
    """Trains to the end. What was recorded whenever something was killed."""
    rng = np.random.default_rng(chaotic.SEED)
    victims = [str(v) for v in rng.permutation(["node", "worker", "superlink", "server"])]
    victims += [str(v) for v in rng.choice(victims, max(0, kills - len(victims)))]
    run, kept = deployment.run(**config), []
    for i, victim in enumerate(victims[:kills]):
        due = 1 + i * (config["rounds"] - 1) // kills
        tended(deployment, lambda due=due: len(recorded(deployment.folder)) >= due, f"round {due}")
        kept.append(recorded(deployment.folder))
        node = f"node-{rng.integers(1, deployment.nodes + 1)}"
        if victim == "worker":
            tended(deployment, lambda node=node: deployment.worker(node), f"{node} has a worker")
            os.kill(deployment.worker(node), signal.SIGKILL)
        elif victim == "server":
            deployment.wait_until(deployment.server_process, "the run has a server")
            os.kill(deployment.server_process(), signal.SIGKILL)
            deployment.wait_until(deployment.reachable, "the SuperLink is back")
            run = deployment.run(**config)  # goes on from the last round
        else:
            name = node if victim == "node" else victim
            deployment.kill(name)
            deployment.start(name)
    tended(deployment, lambda: deployment.server_process() is None, "the end", HUNG * kills)
    ended = deployment.finished(run)
    deployment.server_told = deployment.told(run)
    assert ended == "finished:completed", deployment.server_told
    return kept


def tended(deployment: Deployment, true, what: str, seconds: float = HUNG) -> None:
    def look():
        deployment.tend()
        return true()

    deployment.wait_until(look, what, seconds)


def check_counts(lines: list[dict], disturbed: list[int]) -> None:
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
        if more["clients/asked"] == 3 and round - 1 not in disturbed and round not in disturbed:
            wrong = Counter(filter(None, (chaotic.fault(round, number) for number in range(3))))
            missing = sum(more.get(f"clients/rejected/{r}", 0) for r in ("late", "gone", "crashed"))
            for reason, count in wrong.items():
                assert more.get(f"clients/rejected/{reason}", 0) + missing >= count

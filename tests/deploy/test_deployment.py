"""Real processes over TLS on this machine: `make test-flower`."""

import json
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

import mixfl
from benchmarks.deployment import Deployment, free_port, second_project
from mixfl.deploy.flower.keys import make_keys
from mixfl.tasks import find

pytestmark = pytest.mark.flower
ROUNDS = 5


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("flower") / "smile") as running:
        yield running


def two_of_three(project: Path) -> Path:
    """Cohorts smaller than the population, so that it counts who is in them: the simulator's."""
    file, section = project / "pyproject.toml", "[tool.flwr.app.config]\n"
    text = file.read_text().replace("cohort_size = 2\n", "")
    assert "\ncohorts = " in text
    text = text.replace('cohorts = "secret"', 'cohorts = "seed"')
    file.write_text(text.replace(section, f"{section}cohort_size = 2\n"))
    return project


def same_as_simulated(project: Path, out: Path, algorithm: str) -> None:
    problem = find(f"{project}/app.py:simulation").build({}, None)
    s = dict(rounds=ROUNDS, cohort_size=2, seed=3)
    wanted = mixfl.train(problem, mixfl.algorithms.recipe(algorithm), **s).params
    found = mixfl.load(out).params
    before = problem.init(jax.random.key(3))
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), before, found)
    assert max(jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=0), found, wanted)


@pytest.mark.parametrize("algorithm", ["fedavg", "pt", "1wgt", "2wgt"])
def test_simulator_equals_deployment(deployment, algorithm):
    project = two_of_three(deployment.folder)
    out = project / "runs" / algorithm
    run = deployment.run(rounds=ROUNDS, seed=3, algorithm=algorithm, out=str(out))
    assert deployment.finished(run) == "finished:completed", deployment.told(run)
    same_as_simulated(project, out, algorithm)
    last = mixfl.load(out).metrics[-1]
    assert last["round"] == ROUNDS
    assert last["clients/asked"] == last["clients/accepted"] == 2 * ROUNDS
    assert last["comm/down_bytes"] > 0 < last["comm/up_bytes"]


def test_no_token_in_a_command_line(deployment):
    run = deployment.run(rounds=1, out=str(deployment.folder / "runs/token"))
    line = Path(f"/proc/{deployment.server_process()}/cmdline").read_bytes().split(b"\0")
    assert b"--token-file" in line
    assert b"--token" not in line
    assert deployment.finished(run) == "finished:completed", deployment.told(run)


def test_row_sparse_movie(deployment):
    project = two_of_three(second_project(deployment, "movie"))
    out = project / "runs" / "2wgt"
    run = deployment.run(project, rounds=ROUNDS, seed=3, algorithm="2wgt", out=str(out))
    assert deployment.finished(run) == "finished:completed", deployment.told(run)
    same_as_simulated(project, out, "2wgt")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--root-certificates", "keys/ca.crt", "--auth-supernode-private-key", "more/node-4"],
         "Failed to activate SuperNode"),
        (["--root-certificates", "keys/ca.crt"], "must be registered"),
        (["--root-certificates", "other/ca.crt", "--auth-supernode-private-key", "keys/node-1"],
         "CERTIFICATE_VERIFY_FAILED"),
        (["--insecure"], "could not establish a connection"),
    ],
    ids=["unregistered key", "no key", "another CA", "no TLS"],
)  # fmt: skip
def test_refused(deployment, options, told):
    make_keys(deployment.folder / "more", 4)
    make_keys(deployment.folder / "other", 0)
    before = online(deployment)
    done = subprocess.run(
        ["flower-supernode", "--superlink", deployment.address, "--isolation", "process",
         "--max-retries", "2", "--port", str(free_port()), *options],
        cwd=deployment.folder, env=deployment.environment(), capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert told in done.stdout + done.stderr
    assert online(deployment) == before


def online(deployment) -> set[str]:
    listed = json.loads(deployment.flwr("supernode", "list", "--format", "json"))
    return {node["node-id"] for node in listed["nodes"] if node["status"] == "online"}


def test_nodes_are_known_by_their_keys(deployment):
    """Node 3's key is not in the list of populations: it takes no part."""
    project = two_of_three(second_project(deployment, "text"))
    file = deployment.folder / "keys" / "populations.toml"
    file.write_text('node-1 = {population = "federated", number = 0}\nnode-2 = "federated"\n')
    settings = project / "pyproject.toml"
    text = settings.read_text().replace("min_clients = 3", "min_clients = 2")
    assert 'populations = ""' in text
    settings.write_text(text.replace('populations = ""', f'populations = "{file}"'))
    out = project / "runs" / "listed"
    run = deployment.run(project, rounds=2, algorithm="fedavg", out=str(out))
    assert deployment.finished(run) == "finished:completed", deployment.told(run)
    assert mixfl.load(out).metrics[-1]["clients/accepted"] == 4
    assert "its key is not assigned to a population" in deployment.told(run)
    kept = json.loads((out / "deployment.json").read_text())
    assert [number for _, number, _ in kept["numbers"]] == [0, 1]

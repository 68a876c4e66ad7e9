"""What `mixfl flower new` and `mixfl flower keys` write."""

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import serialization

import mixfl
from mixfl.cli import cli
from mixfl.errors import MixflError
from mixfl.flower.keys import make_keys
from mixfl.flower.new import TASKS, write_project
from mixfl.tasks import find


@pytest.mark.parametrize(
    "task", ["smile", *(pytest.param(t, marks=pytest.mark.slow) for t in TASKS if t != "smile")]
)
def test_project_trains(tmp_path, task):
    write_project(tmp_path / "project", task)
    problem = find(f"{tmp_path}/project/app.py:simulation").build({}, None)
    result = mixfl.train(problem, mixfl.two_way_gt(), rounds=8)
    first, last = result.metrics[0], result.metrics[-1]
    assert last["eval/loss"] < first["eval/loss"]


def smiling_store(folder: Path) -> mixfl.ClientData:
    from mixfl.data.synthetic.faces import faces

    drawn = faces(clients=10, per_client=4, size=12)
    people = mixfl.ClientData.from_arrays(drawn, client=drawn.pop("client"))
    people.write(folder)
    return people


def test_prepared_data(tmp_path, monkeypatch):
    people = smiling_store(tmp_path / "faces")
    monkeypatch.setenv("MIXFL_DATA", str(tmp_path / "faces"))
    write_project(tmp_path / "project", "smile")
    problem = find(f"{tmp_path}/project/app.py:simulation").build({}, None)
    federated, central = problem.populations[0], problem.central[0]
    train = people.select(np.arange(2, 10))
    smiling = train.examples.all()["smiling"] == 1
    assert len(federated.clients) == 3
    assert len(federated.examples) == smiling.sum()
    assert len(central.examples) == (~smiling).sum()


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("mine")
    done = CliRunner().invoke(cli, ["flower", "new", str(tmp_path)])
    assert isinstance(done.exception, MixflError)
    assert "not empty" in str(done.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(MixflError, match="is a file"):
        write_project(tmp_path / "mine", "smile")


def test_empty_folder_is_taken(tmp_path):
    write_project(tmp_path, "movie")
    assert os.access(tmp_path / "supernode.sh", os.X_OK)
    assert "TASK" not in (tmp_path / "pyproject.toml").read_text()


def test_no_key_leaves_with_the_app(tmp_path):
    """What `flwr run` sends to the server and to every node."""
    project = tmp_path / "project"
    write_project(project, "smile")
    make_keys(project / "keys", 1)
    (project / "runs").mkdir()
    (project / "runs/config.toml").write_text("")
    flwr = Path(sys.executable).parent / "flwr"
    environment = {**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0",
                   "FLWR_DISABLE_UPDATE_CHECK": "1"}  # fmt: skip
    subprocess.run([flwr, "build"], cwd=project, env=environment, check=True, capture_output=True)
    names = zipfile.ZipFile(next(project.glob("*.fab"))).namelist()
    assert {"app.py", "pyproject.toml"} <= set(names)
    assert not [n for n in names if n.startswith(("keys", "runs", "state", ".flwr"))]


def test_certificates(tmp_path):
    make_keys(tmp_path, 1, ("fl.example.org", "10.0.0.7"))
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    addresses = names.get_values_for_type(x509.IPAddress)
    assert list(map(str, addresses)) == ["10.0.0.7", "127.0.0.1"]
    private = serialization.load_pem_private_key((tmp_path / "server.key").read_bytes(), None)
    assert private.public_key() == server.public_key()
    node = serialization.load_ssh_private_key((tmp_path / "node-1").read_bytes(), None)
    public = serialization.load_ssh_public_key((tmp_path / "node-1.pub").read_bytes())
    assert node.public_key() == public
    for secret in ("ca.key", "server.key", "server.secret", "node-1", "node-1.secret"):
        assert stat.S_IMODE((tmp_path / secret).stat().st_mode) == 0o600


def test_keys_are_kept(tmp_path):
    make_keys(tmp_path, 2)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert make_keys(tmp_path, 2) == []
    assert {p.name for p in make_keys(tmp_path, 3)} == {"node-3", "node-3.pub", "node-3.secret"}
    assert {p.name for p in make_keys(tmp_path, 3, ("other.org",))} == {"server.crt", "server.key"}
    same = set(before) - {"server.crt", "server.key"}
    assert all((tmp_path / name).read_bytes() == before[name] for name in same)


def test_bad_hosts_and_lost_keys(tmp_path):
    with pytest.raises(MixflError, match="expected a host"):
        make_keys(tmp_path, 0, ("ä b",))
    make_keys(tmp_path, 0)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(MixflError, match="not its key"):
        make_keys(tmp_path, 1)

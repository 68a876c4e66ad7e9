"""What `mixfl flower new` and `mixfl flower keys` write."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import serialization

import mixfl
from mixfl.cli import cli
from mixfl.deploy.flower.keys import make_keys
from mixfl.deploy.flower.new_project import TASKS, write_project
from mixfl.errors import MixflError
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
    with pytest.raises(MixflError, match=r"its key .* is missing"):
        make_keys(tmp_path, 1)


def shell(project: Path, line: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-c", line], cwd=project, env={**os.environ, "PATH": path, "NODES": "0"},
        capture_output=True, text=True,
    )  # fmt: skip


def test_hosts_of_the_script(tmp_path):
    write_project(tmp_path / "project", "smile")
    refused = shell(tmp_path / "project", './keys.sh "fl.example.org evil.org" 10.0.0.7')
    assert refused.returncode == 2
    assert "'fl.example.org evil.org': expected a host name" in refused.stderr
    assert not (tmp_path / "project/keys/server.crt").exists()
    assert shell(tmp_path / "project", "./keys.sh fl.example.org 10.0.0.7").returncode == 0
    server = x509.load_pem_x509_certificate((tmp_path / "project/keys/server.crt").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert "10.0.0.7" in map(str, names.get_values_for_type(x509.IPAddress))


@pytest.mark.parametrize("host", ["a b", "", "-x", "a..b", "a/b", "x\ny", "fl.example.org."])
def test_what_is_no_host(tmp_path, host):
    with pytest.raises(MixflError, match="expected a host"):
        make_keys(tmp_path, 0, (host,))


def test_scripts_write_for_their_owner(tmp_path):
    write_project(tmp_path / "project", "smile")
    done = shell(tmp_path / "project", ". ./env.sh && mkdir state && : > state/file && umask")
    assert done.stdout.strip() == "0077", done.stderr
    for path in (".flwr", ".flwr/config.toml", "state", "state/file"):
        assert not stat.S_IMODE((tmp_path / "project" / path).stat().st_mode) & 0o077
    scripts = [
        p for p in (tmp_path / "project").glob("*.sh") if p.name not in ("env.sh", "keys.sh")
    ]
    assert len(scripts) == 4
    assert all("\n. ./env.sh\n" in script.read_text() for script in scripts)


def test_services(tmp_path):
    """systemd itself reads them, where it is; `mixfl flower up` takes their commands."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")
    write_project(tmp_path, "smile")
    program = tmp_path / ".venv/bin/mixfl"
    program.parent.mkdir(parents=True)
    program.symlink_to(Path(sys.executable).parent / "mixfl")
    files = [tmp_path / "deploy" / name for name in ("mixfl-server.service", "mixfl-node@.service")]
    for file in files:
        file.write_text(file.read_text().replace("/srv/smile", str(tmp_path)))
    done = subprocess.run([analyze, "verify", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stderr.splitlines() if "mixfl" in line]
    assert ours == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("mixfl-server", "up server --run --keep"), ("mixfl-node@", "up node %i")],
)
def test_services_say_what_they_must(tmp_path, name, arguments):
    write_project(tmp_path, "smile")
    lines = (tmp_path / f"deploy/{name}.service").read_text().splitlines()
    assert f"ExecStart=/srv/smile/.venv/bin/mixfl flower {arguments}" in lines
    wanted = {"Restart=always", "UMask=0077", "NoNewPrivileges=yes", "ProtectSystem=strict",
              "KillMode=mixed", "User=mixfl"}  # fmt: skip
    assert wanted <= set(lines)


def test_containers(tmp_path):
    write_project(tmp_path, "smile")
    services = yaml.safe_load((tmp_path / "deploy/compose.yaml").read_text())["services"]
    assert set(services) == {"server", "proxy", "node"}
    assert all(service["restart"] == "always" for service in services.values())
    assert services["server"]["command"] == ["server", "--run", "--keep"]
    assert services["node"]["command"][0] == "node"
    for name in ("server", "node"):
        volumes = services[name]["volumes"]
        kept = {volume.split(":")[0] for volume in volumes if not volume.endswith(":ro")}
        assert kept == {"../state", "../logs", "../runs"}
        assert "../keys:/srv/smile/keys:ro" in volumes
        assert services[name]["init"] is True
    # The SuperLink is on the loopback address, which only the proxy shares.
    assert services["proxy"]["network_mode"] == "service:server"
    assert services["server"]["ports"] == ["443:443"]
    mounted = {volume.split(":")[0] for volume in services["proxy"]["volumes"]}
    assert all((tmp_path / "deploy" / path).exists() for path in mounted if path.startswith("./"))
    ignored = (tmp_path / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert not any("key" in line for line in ignored)


@pytest.mark.system
def test_a_killed_watcher_is_replaced(tmp_path):
    """By the loop of supernode.sh, until the SuperNode ends; it is a sleeping stand-in here."""
    project = tmp_path / "project"
    write_project(project, "smile")
    (project / "worker.sh").write_text("#!/bin/sh\necho $$ >> watchers\nexec sleep 1000\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "flower-supernode").write_text("#!/bin/sh\nexec sleep 1001\n")
    (programs / "flower-supernode").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    node = subprocess.Popen(["./supernode.sh", "1"], cwd=project, env={**os.environ, "PATH": path})
    watchers = project / "watchers"

    def pids() -> list[int]:
        return list(map(int, watchers.read_text().split())) if watchers.exists() else []

    try:
        until(lambda: len(pids()) == 1)
        os.kill(pids()[0], signal.SIGKILL)
        until(lambda: len(pids()) == 2)
    finally:
        node.kill()
        node.wait()
    os.kill(pids()[-1], signal.SIGKILL)  # as the real one would end now
    time.sleep(2)
    assert len(pids()) == 2


def until(true, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.system
def test_a_watcher_ends_with_its_node():
    mixfl_ = Path(sys.executable).parent / "mixfl"
    node = subprocess.Popen(["sleep", "1000"])
    command = [mixfl_, "flower", "worker", "127.0.0.1:9", "--until", str(node.pid)]
    watcher = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            watcher.wait(8)
        node.kill()
        assert watcher.wait(60) == 0  # though nobody has waited for the node: it is a zombie
    finally:
        node.kill()
        node.wait()
        watcher.kill()
        watcher.wait()


@pytest.mark.system
def test_a_worker_that_hangs_is_ended():
    """By a signal of the kernel's, three times the round's deadline after the message came."""
    program = """
import time
from types import SimpleNamespace
import mixfl.deploy.flower.worker as worker

message = SimpleNamespace(metadata=SimpleNamespace(ttl=0.1))
worker.pull_task_input = lambda client: (message, None, None, None)
worker._answer(None, lambda message, context: time.sleep(1000))
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=300)
    assert done.returncode == -signal.SIGALRM

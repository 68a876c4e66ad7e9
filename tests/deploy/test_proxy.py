"""The proxy that `mixfl flower new` configures: a real nginx before a real SuperLink."""

import json
import os
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

import mixfl
from benchmarks.deployment import Deployment, end_with_parent, free_port

NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)"),
]
BODY_TIMEOUT = 10  # seconds
CONNECTIONS = 32  # of one address, as in nginx.conf
# The whole of a configuration around the project's own; nothing is written outside its folder.
AROUND = """
daemon off;
user root;
pid nginx.pid;
error_log error.log;
events {}
http {
    log_format seen "$status $upstream_addr $request_uri";
    access_log access.log seen;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include site.conf;
}
"""


class Proxied(Deployment):
    """A SuperLink, one node, and nginx between them."""

    def __init__(self, folder: Path):
        super().__init__(folder, nodes=1)
        self.port, self.nginx = free_port(), folder / "nginx"
        self.nginx.mkdir()
        self.changed = {
            "/srv/smile/keys": f"{folder}/keys",
            "server 127.0.0.1:8000;": f"server {self.address};",
            "listen 443 ssl;": f"listen 127.0.0.1:{self.port} ssl;",
            "client_body_timeout 15s;": f"client_body_timeout {BODY_TIMEOUT}s;",
        }
        site = (folder / "deploy/nginx.conf").read_text()
        for given, wanted in self.changed.items():
            assert given in site, given
            site = site.replace(given, wanted)
        assert f"limit_conn mixfl_connections {CONNECTIONS};" in site
        (self.nginx / "site.conf").write_text(site)
        (self.nginx / "nginx.conf").write_text(AROUND)
        # The node reaches the proxy, and keeps that to itself.
        self.own["node-1"] = {
            "SUPERLINK": f"127.0.0.1:{self.port}", "FLWR_HOME": str(folder / "node-home"),
        }  # fmt: skip

    def __enter__(self) -> "Proxied":
        command = [NGINX, "-p", self.nginx, "-c", self.nginx / "nginx.conf", "-e", "error.log"]
        subprocess.run([*command, "-t"], check=True)
        self.processes["nginx"] = subprocess.Popen(
            command, start_new_session=True, preexec_fn=end_with_parent
        )
        self.wait_until(self.listening, "nginx is reachable")
        super().__enter__()
        return self

    def listening(self) -> bool:
        try:
            self.connected().close()
            return True
        except OSError:
            return False

    def connected(self) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=self.folder / "keys/ca.crt")
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return context.wrap_socket(connection, server_hostname="localhost")

    def post(self, path: str, *headers: str) -> ssl.SSLSocket:
        """A request of which the body is still to come."""
        connection = self.connected()
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", ""]
        connection.sendall("\r\n".join(lines).encode())
        return connection

    def seen(self) -> list[list[str]]:
        """Of each request: the status, the upstream's address or -, the path."""
        return [line.split() for line in (self.nginx / "access.log").read_text().splitlines()]

    def passed_on(self, path: str) -> list[str]:
        """What became of the requests to a path: the upstream's address, or - without one."""
        self.wait_until(lambda: any(p == path for *_, p in self.seen()), "it is in the log")
        return [upstream for _, upstream, p in self.seen() if p == path]


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    with Proxied(tmp_path_factory.mktemp("proxy") / "smile") as running:
        yield running


def status(connection: ssl.SSLSocket) -> int | None:
    """None: it was closed without a word."""
    line = connection.makefile("rb").readline().split()
    connection.close()
    return int(line[1]) if line else None


def test_nodes_train_through_it(proxied):
    def online():
        nodes = json.loads(proxied.flwr("supernode", "list", "--format", "json"))["nodes"]
        return [node["status"] for node in nodes] == ["online"]

    proxied.wait_until(online, "the node is online")
    out = proxied.folder / "runs/proxied"
    run = proxied.run(rounds=2, min_clients=1, min_replies=0.1, round_deadline=20.0, out=str(out))
    assert proxied.finished(run) == "finished:completed", proxied.told(run)
    assert mixfl.load(out).metrics[-1]["clients/accepted"] == 2
    assert set(proxied.passed_on("/v1/fleet/push-object")) == {proxied.address}


def test_a_large_request_is_refused_unread(proxied):
    path = "/v1/fleet/push-object?large"
    assert status(proxied.post(path, f"Content-Length: {600 << 20}")) == 413
    assert proxied.passed_on(path) == ["-"]


def test_a_large_request_of_unknown_length_is_refused(proxied):
    path = "/v1/fleet/push-object?chunked"
    connection = proxied.post(path, "Transfer-Encoding: chunked")
    try:
        for _ in range(16):  # of 1 MiB
            connection.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
    except OSError:  # refused before all of it was sent
        pass
    assert proxied.passed_on(path) == ["-"]
    assert ["413", "-", path] in proxied.seen()
    connection.close()


def test_a_slow_body_is_cut(proxied):
    path = "/v1/fleet/push-object?slow"
    connection = proxied.post(path, "Content-Length: 1000")
    connection.sendall(b"a little")
    assert status(connection) in (408, None)  # and not waited for until the socket's own time-out
    assert proxied.passed_on(path) == ["-"]


@pytest.mark.parametrize(
    "path",
    ["/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/register-node",
     "/v1/fleet/unregister-node", "/v1/fleet/../control/start-run", "/"],
)  # fmt: skip
def test_all_else_is_refused(proxied, path):
    assert status(proxied.post(path, "Content-Length: 0")) == 403
    assert proxied.passed_on(path) == ["-"]


def test_connections_are_counted(proxied):
    """They stay open, with a body to come; those too many are told at once."""
    path = "/v1/fleet/push-object?many"
    several = [proxied.post(path, "Content-Length: 1000") for _ in range(CONNECTIONS + 8)]
    codes = [status(connection) for connection in several]
    assert codes.count(503) >= 8  # with those that the node has open
    assert set(proxied.passed_on(path)) == {"-"}

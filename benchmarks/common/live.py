"""A real `serve run` on free ports, with a Ray cluster of its own and HAProxy; every process it starts is ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.common import ROOT

START_S = 480
STOP_S = 240
GIVEN_UP, MAX_STARTS = "The current node timed out during startup", 4
"""Ray gives a node 30 s to start and cannot be told otherwise: where every core is busy that is short."""
_clusters = itertools.count()


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int
    folder: Path
    config: dict[str, Any]
    environment: dict[str, str]
    log_file: str = "log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def log(self) -> str:
        return (self.folder / self.log_file).read_text(errors="replace")

    @property
    def replica_logs(self) -> str:
        files = self.folder.glob("ray/session_latest/logs/serve/replica_*")
        return "".join(file.read_text(errors="replace") for file in files)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> tuple[int, Any]:
        """Status and body, decoded if it is JSON."""
        data = None if body is None else json.dumps(body).encode()
        all_headers = {**({"Content-Type": "application/json"} if data else {}), **(headers or {})}
        request = urllib.request.Request(f"{self.url}{path}", data, all_headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, _content(answer)
        except urllib.error.HTTPError as error:
            return error.code, _content(error)

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> tuple[int, Any]:
        return self.ask("POST", path, body, **options)

    def is_healthy(self, path: str = "/health") -> bool:
        try:
            return self.ask("GET", path, timeout_s=5)[0] == 200
        except OSError:
            return False

    def deploy(self, config: Mapping[str, Any]) -> None:
        """The request that `serve deploy` makes, without the seconds that the command takes to start."""
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(
            f"{self.dashboard}/api/serve/applications/", json.dumps(dict(config)).encode(), headers, method="PUT"
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            assert answer.status == 200, answer.read()

    def shell(self, script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Lines as their user types them in another terminal; Ray's commands find this cluster."""
        environment = {**self.environment, "RAY_DASHBOARD_ADDRESS": self.dashboard, "RAY_ADDRESS": self.ray_address}
        return subprocess.run(["/bin/bash", "-ec", script], env=environment, cwd=cwd, capture_output=True, text=True)

    @property
    def token(self) -> str | None:
        """Ray's, of a cluster with `default_auth`."""
        file = Path(self.environment["HOME"]) / ".ray" / "auth_token"
        return file.read_text().strip() if "RAY_AUTH_MODE" not in self.environment and file.exists() else None

    @property
    def dashboard(self) -> str:
        found = re.search(r"dashboard at .*?(127\.0\.0\.1:\d+)", self.log)
        assert found is not None, f"no dashboard in:\n{self.log[:2000]}"
        return f"http://{found.group(1)}"

    @property
    def ray_address(self) -> str:
        """Of the GCS: Ray itself finds any cluster of this machine."""
        found = (re.search(r"--gcs-address=(\S+)", command) for command in self.commands_of_session())
        return next(address[1] for address in found if address is not None)

    def others_of_session(self) -> list[psutil.Process]:
        """Every process that the command started and that still runs: Ray's processes keep its session."""
        return [process for process in psutil.process_iter() if _session(process.pid) == self.process.pid]

    def replicas(self) -> list[psutil.Process]:
        return [process for process, command in self._commands() if "ServeReplica" in command]

    def haproxies(self) -> list[psutil.Process]:
        """The one in use, and those that a reload replaced and that still have connections."""
        return [process for process, command in self._commands() if "haproxy -" in command]

    def drivers(self) -> list[psutil.Process]:
        """The `serve run` of a `tide serve`."""
        return [process for process, command in self._commands() if "/serve run " in command]

    def spares(self, *, of_replicas: bool = True) -> list[psutil.Process]:
        """Idle processes in which a replica could start, or the actor that runs HAProxy."""
        idle = [process for process, command in self._commands() if command.startswith("ray::IDLE")]
        wanted = {"TIDE_PRELOAD": "1" if of_replicas else None, "RAY_SERVE_ENABLE_HA_PROXY": "1"}
        return [each for each in idle if {name: _variable(each, name) for name in wanted} == wanted]

    def commands_of_session(self) -> list[str]:
        return [command for _, command in self._commands()]

    def _commands(self) -> Iterator[tuple[psutil.Process, str]]:
        for process in self.others_of_session():
            with contextlib.suppress(psutil.Error):  # it has just ended
                yield process, " ".join(process.cmdline())


def _variable(process: psutil.Process, name: str) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(name)
    return None


def default_config(*, spare: bool = True) -> dict[str, Any]:
    """`deploy/config.yaml`; without the spare process for the next replica, whose imports take seconds, where none is
    replaced."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "config.yaml").read_text())
    if not spare:
        del config["applications"][0]["deployments"][0]["ray_actor_options"]["runtime_env"]
    return config


@contextlib.contextmanager
def serving(
    config: dict[str, Any],
    *,
    health: str = "/health",
    command: Sequence[str] = ("serve", "run"),
    default_auth: bool = False,
) -> Iterator[Server]:
    """`serve run` of a config on free ports, once it is healthy. Processes that are left at the end are killed.

    With `default_auth` Ray asks for a token, as it does for everybody, and keeps it in a home folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="tide-"))  # short: paths of Ray's sockets are limited
    http_port, grpc_port, *ports = free_ports(6)
    config["http_options"]["port"] = http_port
    config["grpc_options"]["port"] = grpc_port
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    environment = environment_of(folder, ports)
    if default_auth:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            environment.pop(name, None)
        caches = Path.home() / ".cache"  # models and cost tables are not made again
        environment.setdefault("TIDE_CACHE_DIR", str(caches / "tide-serve"))
        environment.setdefault("HF_HOME", str(caches / "huggingface"))
        environment["HOME"] = str(folder / "home")
        (folder / "home").mkdir()
    process = _started(command, folder, environment, Server.log_file)
    server = Server(process, http_port, grpc_port, folder, config, environment)
    try:
        with _until_the_end(server, health, command):
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def serving_again(server: Server, *, command: Sequence[str], health: str = "/health") -> Iterator[Server]:
    """The config, ports and variables of a server that has ended, in a session of its own, once it is healthy."""
    log_file = f"{server.log_file}-again"
    process = _started(command, server.folder, server.environment, log_file)
    again = replace(server, process=process, log_file=log_file)
    with _until_the_end(again, health, command):
        yield again


def _started(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log_file: str
) -> subprocess.Popen[bytes]:
    with (folder / log_file).open("wb") as out:
        return subprocess.Popen(
            [Path(sys.executable).parent / command[0], *command[1:], str(folder / "config.yaml")],
            cwd=ROOT,
            env=dict(environment),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A test run in the background ignores Ctrl-C, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )


@contextlib.contextmanager
def _until_the_end(server: Server, health: str, command: Sequence[str]) -> Iterator[None]:
    """Wait until the server is healthy; at the end kill what is left of its session."""
    try:
        for _ in range(MAX_STARTS - 1):
            if not _node_was_given_up(server, health):
                break
            server.process = _started(command, server.folder, server.environment, server.log_file)
        wait_until_healthy(server, health)
        yield
    finally:
        _kill_session(server)


def _node_was_given_up(server: Server, health: str) -> bool:
    """Wait until the server is healthy or has ended: whether Ray gave its node up. Nothing is left of it then."""
    deadline = time.monotonic() + START_S
    while server.process.poll() is None:
        if (server.is_healthy(health) and server.replicas()) or time.monotonic() > deadline:
            return False
        time.sleep(0.25)
    if GIVEN_UP not in server.log:
        return False
    _kill_session(server)
    return True


def _kill_session(server: Server) -> None:
    for left in server.others_of_session():
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    server.process.wait()


def environment_of(folder: Path, ports: list[int]) -> dict[str, str]:
    """Variables with which a cluster shares nothing with another one on this machine.

    That takes gRPC ports of its own for the replicas: Ray means to bind each port for itself, but gRPC ignores how it
    says so, and of two replicas on one port each would get some of the other's calls."""
    first = 41_100 + 64 * ((os.getpid() + 29 * next(_clusters)) % 290)  # of no two processes of a run of tests the same
    ours = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first + 63),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100 * 2**20),
        "RAY_worker_niceness": "0",  # Ray's 15 starves workers next to any other process, the tests' own among them
        "REPORTER_UPDATE_INTERVAL_MS": "60000",  # it takes time of the few cores, and nothing here needs it
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[1]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[3]),
    }
    return {**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, **ours}


def free_ports(num: int) -> list[int]:
    """Ports below those that the system gives to others by itself, so that each is still free when it is bound."""
    found: list[int] = []
    port = random.Random(f"{os.getpid()} {time.time_ns()}").randrange(10_000, 30_000)  # noqa: S311
    while len(found) < num:
        port = port + 1 if port < 32_000 else 10_000
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            found.append(port)
    return found


def wait_until_healthy(server: Server, path: str = "/health") -> None:
    deadline = time.monotonic() + START_S
    while not (server.is_healthy(path) and server.replicas()):  # a server before this one may still answer
        assert server.process.poll() is None, f"serve run ended:\n{server.log[-4000:]}"
        assert time.monotonic() < deadline, f"not healthy in {START_S} s:\n{server.log[-4000:]}"
        time.sleep(0.25)


def _content(answer: Any) -> Any:
    data = answer.read()
    try:
        return json.loads(data)
    except ValueError:
        return data


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None

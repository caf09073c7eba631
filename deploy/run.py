"""`tide serve`: `serve run` on this machine, with a clean start and a clean end.

Before it: the config is checked, what a dead session left behind is cleared away, and a port that is taken is named
with its holder. `serve run` itself has a process group of its own, so a signal to ours, such as Ctrl-C or the SIGTERM
of a service manager, stops it once and in order, instead of ending Ray's processes in any order.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from deploy import processes
from deploy.config.serve_config import HA_PROXY, check_file
from deploy.processes import Process
from deploy.status import AUTH_MODE, TOKEN_FILE, TOKEN_VARIABLES
from deploy.strict import yaml_file
from tide_core.errors import ConfigError

RAY_ADDRESS = "RAY_ADDRESS"
BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
PRELOADED = "RAY_preload_python_modules"
PROXY_PORTS = {
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
"""Ports that HAProxy and Serve open in addition to those of the config."""
ALL_INTERFACES = ("0.0.0.0", "::", "")  # noqa: S104
ENDED_S = 5.0
ENDING_S = 30.0
"""Ray's workers end some three seconds after their raylet, later on a busy machine."""
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]


def serve(path: Path, say: Say) -> int:
    """Check, clean up, run until a signal or the end; the exit code."""
    here = RAY_ADDRESS not in os.environ  # else the cluster, and so its ports, may be on other machines
    if here:  # first, since it takes no time
        config = yaml_file.read(path)
        if remove_leftovers(say):  # the kernel closes the sockets of a process some time after it has ended
            _wait(lambda: not any(processes.is_taken(host, port) for _, host, port in ports_of(config, os.environ)))
        refuse_taken_ports(config, os.environ)
    for warning in check_file(path):
        say(f"warning: {warning}")
    if here:
        make_token()
    code = _run(path, say)
    if here:
        remove_leftovers(say)
    return code


def remove_leftovers(say: Say) -> bool:
    """Wait until a dead session of this user has ended, then end every HAProxy whose session is dead; whether there
    was anything."""
    uid = os.getuid()
    found = bool(processes.ending(processes.all_processes(), uid))
    if found:
        say("waiting for the processes of a session that has ended")
        _wait(lambda: not processes.ending(processes.all_processes(), uid), ENDING_S)
    left = processes.left_behind(processes.all_processes(), uid)
    for process in left:
        say(f"ending {process}, which a session that is gone left behind")
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    _wait(lambda: not {each.pid for each in left} & processes.all_processes().keys())
    return found or bool(left)


def _wait(condition: Callable[[], bool], timeout_s: float = ENDED_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def make_token() -> None:
    """Make Ray's token for its owner alone, or take the rights of others from the one that is there: Ray makes one that
    every user of the machine may read. Another choice of the user stays."""
    if os.environ.get(AUTH_MODE, "token") != "token" or any(os.environ.get(name) for name in TOKEN_VARIABLES):
        return
    file = Path.home() / TOKEN_FILE
    with contextlib.suppress(OSError):  # Ray names the file that it cannot use
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            file.chmod(0o600)
            return
        with os.fdopen(descriptor, "w") as out:
            out.write(secrets.token_hex(32))


def refuse_taken_ports(config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Raise a ConfigError that names the first port that cannot be opened, and who holds it."""
    for name, host, port in ports_of(config, environment):
        if processes.is_taken(host, port):
            raise ConfigError(name, port, f"a free port; {_described(processes.holder(port))}")


def ports_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    """Name, host and number of each port that a config opens on the machine of the head. What is wrong in the config is
    left out: the check of the config names it."""
    http, grpc = _part(config, "http_options"), _part(config, "grpc_options")
    host = http.get("host", "0.0.0.0")  # noqa: S104
    host = "0.0.0.0" if host in ALL_INTERFACES else str(host)  # noqa: S104
    found = [("http_options.port", host, http.get("port", 8000))]
    if grpc.get("grpc_servicer_functions"):
        found.append(("grpc_options.port", host, grpc.get("port", 9000)))
    variables = _part(_part(_part(config, "controller_options"), "runtime_env"), "env_vars")
    settings = {**environment, **variables}
    if settings.get(HA_PROXY) == "1":
        found += [(name, "0.0.0.0", settings.get(name, default)) for name, default in PROXY_PORTS.items()]  # noqa: S104
    for name, where, port in found:
        if str(port).isdecimal() and 1 <= int(port) <= 65535:
            yield name, where, int(port)


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}


def _described(pid: int | None) -> str:
    if pid is None:
        return "a process that this user cannot see holds it"
    running: dict[int, Process] = processes.all_processes()
    process = running.get(pid)
    if process is not None and processes.is_haproxy_of_serve(process):
        return f"{process} of a running service holds it: change that service with `serve deploy`, or stop it"
    return f"{process or f'pid {pid}'} holds it"


def _run(path: Path, say: Say) -> int:
    """`serve run` until it ends. The first signal stops it in order, a second one at once."""
    tool = Path(sys.executable).parent / "serve"
    environment = {**os.environ, processes.OWNER: str(os.getpid())}
    guard = Path(sys.executable).parent / "tide-haproxy"
    if guard.exists():
        environment.setdefault(BINARY, str(guard))
    environment.setdefault(PRELOADED, "deploy.preload")
    command = [str(tool), "run", str(path)]
    end_with_parent = functools.partial(_end_with_parent, os.getpid())
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # they wait until they can be passed on
    try:
        child = subprocess.Popen(command, env=environment, process_group=0, preexec_fn=end_with_parent)  # noqa: S603
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        raise
    asked = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        again, asked = asked, True  # first of all: the next signal may come while this one is still being dealt with
        if again:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        else:
            say("stopping: open requests may end first; a second signal stops at once")
            child.send_signal(signal.SIGINT)

    before = {each: signal.signal(each, stop) for each in STOP_SIGNALS}
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        code = child.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return 0 if asked else code or 1  # `serve run` ends with 0 after a failed start, too


def _end_with_parent(parent: int) -> None:
    """In the child: a signal as from Ctrl-C if the parent dies, and Ctrl-C itself even where it is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:
        os._exit(1)

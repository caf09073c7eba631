"""Which HAProxy is left over, and who holds a port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from deploy.processes import Process, all_processes, ending, holder, is_taken, left_behind

CONFIG = f"/tmp/haproxy-serve/{'0a' * 28}/haproxy.cfg"
HAPROXY = ("/venv/bin/haproxy", "-db", "-f", CONFIG, "-dR")
MANAGER = Process(50, 40, 1000, ("ray::HAProxyManager",))
INIT = Process(1, 0, 0, ("/sbin/init",))


def of(*processes: Process) -> dict[int, Process]:
    return {process.pid: process for process in processes}


def test_a_haproxy_whose_actor_is_gone_is_left_behind() -> None:
    orphan = Process(60, 1, 1000, HAPROXY)
    assert left_behind(of(INIT, orphan), uid=1000) == [orphan]
    assert left_behind(of(orphan), uid=1000) == [orphan], "its new parent may be invisible"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Process(60, 50, 1000, HAPROXY), id="of a running service"),
        pytest.param(Process(60, 1, 1001, HAPROXY), id="of another user"),
        pytest.param(Process(60, 1, 1000, ("/usr/sbin/haproxy", "-f", "/etc/haproxy/haproxy.cfg")), id="not of Serve"),
        pytest.param(Process(60, 1, 1000, ("/usr/bin/less", "-f", CONFIG)), id="no haproxy"),
        pytest.param(Process(60, 1, 1000, ("/usr/sbin/haproxy", "-f")), id="no config"),
        pytest.param(Process(60, 1, 1000, ()), id="of the kernel"),
    ],
)
def test_every_other_process_is_left_alone(other: Process) -> None:
    assert left_behind(of(INIT, MANAGER, other), uid=1000) == []


RAYLET = Process(40, 1, 1000, ("/venv/ray/raylet/raylet", "--raylet_socket_name=/tmp/ray/raylet"))


@pytest.mark.parametrize(
    "name", ["HAProxyManager", "ProxyActor", "ServeController.listen_for_change", "ServeReplica:a:B"]
)
def test_an_actor_of_serve_without_its_raylet_is_ending(name: str) -> None:
    alone = Process(50, 1, 1000, (f"ray::{name}",))
    assert ending(of(INIT, alone), uid=1000) == [alone]
    assert ending(of(alone), uid=1000) == [alone], "its new parent may be invisible"
    assert ending(of(INIT, alone), uid=1001) == []


def test_an_actor_that_has_a_raylet_is_not_ending_and_nor_is_another_worker() -> None:
    wrapper = Process(45, 40, 1000, ("/bin/sh", "-c", "python worker.py"))
    inside = Process(52, 45, 1000, ("ray::ServeReplica:a:B",))
    task = Process(53, 1, 1000, ("ray::IDLE",))
    assert ending(of(INIT, RAYLET, MANAGER, wrapper, inside, task, Process(54, 1, 1000, ())), uid=1000) == []


OWNED = b"HOME=/root\0TIDE_SERVE_PID=20\0"


def begin(proc: Path, pid: int, environment: bytes, namespace: str) -> None:
    """A process that began with this environment, beside one of ours that looks at it."""
    for name, its in ((str(pid), namespace), ("self", "pid:[1]")):
        (proc / name / "ns").mkdir(parents=True)
        (proc / name / "ns" / "pid").symlink_to(its)
    (proc / str(pid) / "environ").write_bytes(environment)


@pytest.mark.parametrize("command", [("/venv/bin/serve",), ("/venv/bin/python", "/venv/bin/serve")])
def test_a_serve_run_whose_tide_serve_is_gone_is_ending(command: tuple[str, ...], tmp_path: Path) -> None:
    owner = Process(20, 1, 1000, ("/venv/bin/python", "/venv/bin/tide", "serve"))
    begin(tmp_path, 30, OWNED, "pid:[1]")

    def child_of(parent: int, *more: str, pid: int = 30) -> Process:
        return Process(pid, parent, 1000, (*command, *(more or ("run", "config.yaml"))))

    for parent in (1, 5):
        assert ending(of(INIT, child_of(parent)), 1000, tmp_path) == [child_of(parent)]
    assert ending(of(INIT, child_of(1)), 1001, tmp_path) == []
    assert ending(of(INIT, owner, child_of(20)), 1000, tmp_path) == [], "it runs"
    assert ending(of(INIT, child_of(1, "status")), 1000, tmp_path) == []
    assert ending(of(INIT, child_of(1, pid=31)), 1000, tmp_path) == [], "nobody's but its user's"


def test_a_serve_run_in_a_container_is_not_ending(tmp_path: Path) -> None:
    """The id of its owner there is none of ours."""
    begin(tmp_path, 4030, OWNED, "pid:[2]")
    inside = Process(4030, 4020, 1000, ("/venv/bin/serve", "run", "config.yaml"))
    assert ending(of(INIT, inside), 1000, tmp_path) == []


def test_processes_are_read_with_names_that_hold_anything_and_zombies_are_none(tmp_path: Path) -> None:
    for pid, name, state in ((7, "a) S (b", "S"), (8, "gone", "Z")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {state} 3 7 7 0")
        (tmp_path / str(pid) / "cmdline").write_bytes(b"/bin/program\0-x\0")
    (tmp_path / "net").mkdir()
    assert all_processes(tmp_path) == {7: Process(7, 3, os.getuid(), ("/bin/program", "-x"))}


def test_a_port_that_is_taken_is_so_and_its_holder_is_found() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        server.listen()
        assert is_taken("127.0.0.1", port)
        assert is_taken("0.0.0.0", port)
        assert holder(port) == os.getpid()
    assert not is_taken("127.0.0.1", port)
    assert holder(port) is None

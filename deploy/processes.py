"""Processes and ports of this machine, from /proc: who holds a port, and what is left of a session that has died."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"
OF_RAY = "ray::"
"""Ray's workers begin their command line with it; the actor that starts an HAProxy is one of them."""
ACTORS_OF_SERVE = ("ServeController", "HAProxyManager", "ProxyActor", "ServeReplica")
OWNER = "TIDE_SERVE_PID"
"""Variable of the `serve run` that a `tide serve` starts: whose child it is."""
CONFIG_OF_SERVE = re.compile(r".*/[0-9a-f]{56}/haproxy\.cfg")
"""Serve writes a folder of this kind for each node: its id."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    uid: int
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"{_name(self) or 'a process without a command line'} (pid {self.pid})"


def all_processes(proc: Path = PROC) -> dict[int, Process]:
    """Every process that is not a zombie, by its id."""
    found = (_read(folder) for folder in proc.iterdir() if folder.name.isdigit())
    return {process.pid: process for process in found if process is not None}


def left_behind(processes: dict[int, Process], uid: int) -> list[Process]:
    """HAProxy processes that Serve started for this user and whose Ray actor is gone. They hold their ports for ever.

    A running service is never among them: the parent of its HAProxy is the Ray actor that watches over it."""

    def is_orphan(process: Process) -> bool:
        parent = processes.get(process.parent)
        return parent is None or not (parent.command and parent.command[0].startswith(OF_RAY))

    return [each for each in processes.values() if each.uid == uid and is_haproxy_of_serve(each) and is_orphan(each)]


def ending(processes: dict[int, Process], uid: int, proc: Path = PROC) -> list[Process]:
    """What ends by itself within seconds and holds ports until then: Serve's actors of this user whose raylet is gone,
    and a `serve run` whose `tide serve` is gone."""

    def has_raylet(process: Process) -> bool:
        seen, parent = {process.pid}, processes.get(process.parent)
        while parent is not None and parent.pid not in seen:
            if _name(parent) == "raylet":
                return True
            seen.add(parent.pid)
            parent = processes.get(parent.parent)
        return False

    def has_lost_its_owner(process: Process) -> bool:
        owner = _variable(process.pid, OWNER, proc)
        return owner is not None and owner != str(process.parent) and _has_our_ids(process.pid, proc)

    ours = [each for each in processes.values() if each.uid == uid]
    actors = [each for each in ours if _is_actor_of_serve(each) and not has_raylet(each)]
    return [*actors, *(each for each in ours if _is_driver(each) and has_lost_its_owner(each))]


def _is_driver(process: Process) -> bool:
    """`serve run`, as a script of a Python or by itself."""
    pairs = zip(process.command[:2], process.command[1:3], strict=False)
    return any(Path(tool).name == "serve" and verb == "run" for tool, verb in pairs)


def _variable(pid: int, name: str, proc: Path) -> str | None:
    """Of the environment that a process began with; None also where it cannot be read."""
    with contextlib.suppress(OSError):
        for entry in (proc / str(pid) / "environ").read_bytes().split(b"\0"):
            key, _, value = entry.partition(b"=")
            if key == name.encode():
                return value.decode(errors="replace")
    return None


def _has_our_ids(pid: int, proc: Path) -> bool:
    """Whether the ids that a process knows are those that we see: not so in a container."""
    with contextlib.suppress(OSError):
        return os.readlink(proc / str(pid) / "ns" / "pid") == os.readlink(proc / "self" / "ns" / "pid")
    return False


def _is_actor_of_serve(process: Process) -> bool:
    command = process.command[0] if process.command else ""
    return command.startswith(tuple(OF_RAY + name for name in ACTORS_OF_SERVE))


def _name(process: Process) -> str:
    return Path(process.command[0]).name if process.command else ""


def is_haproxy_of_serve(process: Process) -> bool:
    command = process.command
    if _name(process) != "haproxy" or "-f" not in command[:-1]:
        return False
    return CONFIG_OF_SERVE.fullmatch(command[command.index("-f") + 1]) is not None


def is_taken(host: str, port: int) -> bool:
    """Whether a server could not listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closed connection is no obstacle
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE  # an address that is not here is for the server to refuse
    return False


def holder(port: int, proc: Path = PROC) -> int | None:
    """The process that listens on a TCP port; None where it is not visible, such as another user's."""
    inodes = set(_listening(port, proc))
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has just ended, or is not ours to look into
            if any(_target(file) in inodes for file in (folder / "fd").iterdir()):
                return int(folder.name)
    return None


def _target(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except OSError:  # closed since it was listed
        return None


def _listening(port: int, proc: Path) -> Iterator[str]:
    """Sockets that listen on this port, named as in the folders of open files."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and struct.unpack(">H", bytes.fromhex(local.rpartition(":")[2]))[0] == port:
                yield f"socket:[{rest[5]}]"


def _read(folder: Path) -> Process | None:
    try:
        command = (folder / "cmdline").read_bytes()
        after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        uid = folder.stat().st_uid
    except OSError:
        return None
    if after_name[0] == "Z":
        return None
    parts = tuple(part.decode(errors="replace") for part in command.rstrip(b"\0").split(b"\0") if part)
    return Process(int(folder.name), int(after_name[1]), uid, parts)

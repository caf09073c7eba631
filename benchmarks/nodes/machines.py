"""Simulated machines: namespaces of this one, each with its own address, processes, /dev/shm and folder for Ray.

A switch (a bridge in its own namespace) connects them and this process, and nothing else. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.common import ROOT

NETWORK = "198.18.{}"
"""In the range for benchmarks of networks (RFC 2544), which no other machine uses."""
SPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
NEEDED = ("ip", "unshare", "nsenter", "setpriv")
OURS = (shutil.which("setpriv") or "setpriv", "--pdeathsig=KILL", "unshare")
"""A namespace that ends when this process ends."""
PATIENCE_S = 10

START = """
mount --bind "$1" "$2"
mount -t tmpfs tmpfs /dev/shm
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set lo up && ip addr add "$3/24" dev eth0 && ip link set eth0 up && ip route add default dev eth0
shift 3
until "$@"; do
  echo "machine: the command failed and is started again, as a container is"
  kill -KILL -1 || true
  sleep 1
done
"""
"""Without `exec`: the shell stays the first process of the machine and adopts orphans. `ray start` gives up after 30 s,
which is little on a busy machine; Kubernetes starts the container again."""


def unsupported_reason() -> str | None:
    """Why this machine cannot simulate others, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, for network namespaces"
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"needs {', '.join(missing)} (packages iproute2 and util-linux)"
    attempt = subprocess.run(
        [*OURS, *SPACES, "ip", "link", "add", "switch", "type", "bridge"], capture_output=True, text=True
    )
    return f"namespaces or bridges are not allowed here: {attempt.stderr.strip()}" if attempt.returncode else None


class Machine:
    def __init__(self, name: str, address: str, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.name, self.address, self.folder = name, address, folder
        self._process = process

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the first process, and with it all others."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for first in psutil.Process(self._process.pid).children():
                first.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE_S)
        self._process.kill()
        self._process.wait()


class Network:
    """The switch and its machines. This process has the address that ends in .1."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tide-"))  # short: paths of Ray's sockets are limited
        self.mount = self.folder / "own"
        """Where every machine mounts its own folder."""
        self.mount.mkdir()
        self.machines: list[Machine] = []
        self._prefix, self._numbers = _free_prefix(), itertools.count(2)
        self._switch = subprocess.Popen([*OURS, "--net", "sleep", "infinity"], start_new_session=True)
        _wait_for_own_network(self._switch)
        self._in_switch("link", "add", "switch", "type", "bridge")
        self._in_switch("link", "set", "switch", "up")
        here = f"tide{os.getpid()}"
        self._plug(here, "here")
        _ip("addr", "add", f"{self._prefix}.1/24", "dev", here)
        _ip("link", "set", here, "up")

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Machine:
        """A machine that runs `command`; `{address}` in it is replaced by its address."""
        address = f"{self._prefix}.{next(self._numbers)}"
        folder = self.folder / name
        folder.mkdir()
        words = [word.format(address=address) for word in command]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*OURS, *SPACES, "bash", "-euc", START, "machine", folder, self.mount, address, *words],
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        machine = Machine(name, address, process, folder)
        self.machines.append(machine)
        _wait_for_own_network(process)
        self._plug("eth0", name, of=process.pid)
        return machine

    def unplug(self, machine: Machine) -> None:
        """Cut the network of a machine without closing connections."""
        self._in_switch("link", "set", machine.name, "down")

    def end(self) -> None:
        for machine in self.machines:
            machine.kill()
        self._switch.kill()
        self._switch.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _plug(self, end: str, port: str, of: int | None = None) -> None:
        """A cable from a port of the switch to this namespace or to that of process `of`."""
        there = ["netns", str(of)] if of is not None else []
        _ip("link", "add", end, *there, "type", "veth", "peer", "name", port, "netns", str(self._switch.pid))
        self._in_switch("link", "set", port, "master", "switch", "up")

    def _in_switch(self, *words: str) -> None:
        _ip(*words, prefix=["nsenter", "--net", "--target", str(self._switch.pid)])


@contextlib.contextmanager
def network() -> Iterator[Network]:
    whole = Network()
    try:
        yield whole
    finally:
        whole.end()


def _ip(*words: str, prefix: Sequence[str] = ()) -> str:
    done = subprocess.run([*prefix, "ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def _free_prefix() -> str:
    """A prefix that no other rehearsal on this machine uses."""
    taken = _ip("-4", "-o", "addr")
    return next(prefix for number in range(256) if f" {(prefix := NETWORK.format(number))}." not in taken)


def _wait_for_own_network(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert process.poll() is None, "unshare ended"
        assert time.monotonic() < deadline, "no network namespace"
        time.sleep(0.01)

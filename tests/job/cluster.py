"""A Ray cluster of the tests' own, and drivers of the job on it."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.common.live import GIVEN_UP, MAX_STARTS, ROOT, environment_of, free_ports
from tests.job.gates import GATES, Gate, saved

START_S = 240
JOB_S = 400
"""These bound a hang: no job of these tests takes a quarter of it on a busy machine with two cores."""

STORE_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Of the emulator of an object store, which takes any."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A driver that is done."""

    code: int
    out: str
    err: str

    @property
    def reason(self) -> str:
        """Its last line on stderr."""
        return self.err.splitlines()[-1] if self.err else ""

    @property
    def digest(self) -> str:
        """Of the artefact, as far as it is told."""
        found = re.search(r"^artefact: .* \(([0-9a-f]{16})\)$", self.out, re.M)
        assert found is not None, f"{self.code}:\n{self.out}\n{self.err}"
        return found.group(1)


class Driver:
    """A `python -m deploy.calibrate`, watched."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self._folder = process, folder

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text(errors="replace")

    def until(self, condition: Callable[[], bool], seconds: float = JOB_S) -> None:
        """Wait for something while the job runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the job ended too soon:\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"nothing of the kind in {seconds} s:\n{self.err}"
            time.sleep(0.02)

    def until_waiting(self, gate: Gate) -> psutil.Process:
        """The first process that waits at the gate."""
        self.until(lambda: bool(gate.waiting))
        return psutil.Process(gate.waiting[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, seconds: float = JOB_S) -> Ended:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done in {seconds} s:\n{self.out}\n{self.err}") from None
        return Ended(code, self.out, self.err)


def until_gone(process: psutil.Process, seconds: float = JOB_S) -> None:
    """Wait until it works no more; nobody may have fetched its exit status."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {process.pid} is still there after {seconds} s"
            time.sleep(0.05)


class Cluster:
    def __init__(self, process: subprocess.Popen[bytes], folder: Path, ports: list[int], env: dict[str, str]) -> None:
        self._process, self._folder = process, folder
        self.dashboard = f"http://127.0.0.1:{ports[1]}"
        self.environment = {**env, "RAY_ADDRESS": f"127.0.0.1:{ports[0]}"}
        self._gates = Path(env[GATES])
        self._drivers: list[Driver] = []

    def gate(self, run: str, name: str, *, stops: bool = False) -> Gate:
        """A closed gate in the jobs of a run that are started with gates."""
        return Gate(self._gates, run, name, stops=stops)

    def saved(self, run: str) -> list[str]:
        """Files that workers of a job with gates saved in a run."""
        return saved(self._gates, run)

    def calibrate(self, config: Path, *, gates: bool = False) -> Driver:
        folder = Path(tempfile.mkdtemp(prefix="driver-", dir=self._folder))
        module = "tests.job.gates" if gates else "deploy.calibrate"
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(config)],
                cwd=ROOT,
                env=self.environment,
                stdout=out,
                stderr=err,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._drivers.append(Driver(process, folder))
        return self._drivers[-1]

    def end(self) -> None:
        """Kill what was started here, and what that has started: each has the cluster's own folder in its settings."""
        for driver in self._drivers:
            driver.kill()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR") == str(self._folder):
                    process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def started(num_cpus: int) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="tide-"))  # short: Ray puts sockets in it, and their paths have a limit
    ports = free_ports(5)
    env = {**environment_of(folder, free_ports(4)), **STORE_CREDENTIALS, GATES: str(folder / "gates")}
    options = {
        "--port": ports[0],
        "--dashboard-port": ports[1],
        "--dashboard-agent-listen-port": ports[2],
        "--dashboard-agent-grpc-port": ports[3],
        "--ray-client-server-port": ports[4],
        "--min-worker-port": 0,
        "--max-worker-port": 0,
        "--num-cpus": num_cpus,
        "--node-ip-address": "127.0.0.1",
        "--object-store-memory": 100 * 2**20,
    }
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"{name}={value}" for name, value in options.items()]
    for _ in range(MAX_STARTS):
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        cluster = Cluster(process, folder, ports, env)
        try:
            deadline = time.monotonic() + START_S
            while "Ray runtime started" not in (said := (folder / "log").read_text(errors="replace")):
                if process.poll() is not None and GIVEN_UP in said:
                    break
                assert process.poll() is None, f"ray start ended:\n{said}"
                assert time.monotonic() < deadline, f"no cluster in {START_S} s:\n{said}"
                time.sleep(0.1)
            else:
                yield cluster
                return
        finally:
            cluster.end()
        folder.mkdir()
    raise AssertionError(f"no cluster in {MAX_STARTS} starts:\n{said}")

"""Runs of the calibration job on a Ray cluster, and of `tide calibrate`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.common import ROOT
from benchmarks.common.live import environment_of, free_ports

POLL_S = 0.2
HOLD_A_CLUSTER = """
import sys, ray
print(ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False).address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Run:
    """One calibration that succeeded. Times are seconds since its command."""

    seconds: float
    lines: list[tuple[float, str]]
    """Its output: time and text of each line."""
    digest: str
    """Digest of its artefact."""
    sizes: list[tuple[float, int, int]]
    """Time, process of a worker, and its peak memory so far in bytes; empty if not watched."""

    @property
    def start_s(self) -> float:
        """Time until model and dataset are loaded."""
        return self._last("tide: dataset:")

    @property
    def collect_s(self) -> float:
        """From the end of the stage before, when at least one worker has its model, to the last shard."""
        return self._last("tide: collect:") - self.start_s

    @property
    def shard_s(self) -> float:
        """Median time of a shard."""
        return statistics.median(seconds for _, _, seconds in self._shards())

    @property
    def late_s(self) -> float:
        """Time from the start of the stage to the first shard of the last worker."""
        begun: dict[str, float] = {}
        for at, worker, seconds in self._shards():
            begun[worker] = min(at - seconds, begun.get(worker, at))
        return max(begun.values()) - self.start_s

    def _shards(self) -> list[tuple[float, str, float]]:
        """Time, worker and duration of each shard."""
        found = [(at, re.search(r"shards/\S+ by worker (\d+) in ([\d.]+) s", line)) for at, line in self.lines]
        return [(at, match[1], float(match[2])) for at, match in found if match is not None]

    def top2(self, stage: str | None = None) -> list[int]:
        """Peak memory of each worker by the end of a stage or of the run, ascending."""
        end = self.seconds if stage is None else self._last(f"tide: {stage}:")
        by_process: dict[int, int] = {}
        for at, process, size in self.sizes:
            if at <= end:
                by_process[process] = max(size, by_process.get(process, 0))
        return sorted(by_process.values())

    def _last(self, start: str) -> float:
        return max(at for at, line in self.lines if line.startswith(start))


@dataclass(frozen=True)
class Cluster:
    """A local Ray cluster of two CPUs, and a folder for models, data and runs."""

    folder: Path
    process: subprocess.Popen[str]
    environment: dict[str, str]

    def job(self, model: Path, calibration: Mapping[str, Any], workers: int, *, watched: bool = False) -> Run:
        """`python -m deploy.calibrate` with one thread for each worker. `watched`: record their memory, which takes
        a little CPU time."""
        settings = {
            "name": "run",
            "storage": str(self.folder / "storage"),
            "model": str(model),
            "dtype": "float32",
            "device": "cpu",
            "measure": False,
            "calibration": dict(calibration),
            "workers": {"count": workers, "num_cpus": 1.0, "threads": 1},
        }
        config = self.folder / "job.yaml"
        config.write_text(yaml.safe_dump(settings))
        try:
            return self._run([sys.executable, "-m", "deploy.calibrate", "--config", str(config)], watched=watched)
        finally:
            shutil.rmtree(self.folder / "storage", ignore_errors=True)

    def command(self, model: Path, calibration: Mapping[str, Any]) -> Run:
        """`tide calibrate` with one thread."""
        output = self.folder / "in-process"
        settings = [f"--set={key}={json.dumps(value)}" for key, value in calibration.items()]
        options = [f"--model={model}", f"--output={output}", "--dtype=float32", "--device=cpu", *settings]
        try:
            return self._run([str(Path(sys.executable).parent / "tide"), "calibrate", *options])
        finally:
            for folder in self.folder.glob("in-process*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _run(self, command: Sequence[str], *, watched: bool = False) -> Run:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**self.environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        try:
            with _Watch(self.process.pid, started) if watched else contextlib.nullcontext() as watch:
                lines = [(time.monotonic() - started, line.rstrip()) for line in process.stdout]
                status = process.wait()
        finally:
            process.kill()
            process.wait()
        seconds, output = time.monotonic() - started, "\n".join(line for _, line in lines)
        artefact = re.search(r"^artefact: .* \((\w+)\)$", output, re.MULTILINE)
        assert status == 0 and artefact is not None, f"{' '.join(command)} ended with {status}:\n{output[-4000:]}"  # noqa: PT018
        return Run(seconds, lines, artefact[1], watch.sizes if watch else [])


class _Watch:
    """Records the memory of the cluster's workers at intervals while a job runs."""

    def __init__(self, root: int, started: float) -> None:
        self.sizes: list[tuple[float, int, int]] = []
        self._root, self._started = root, started
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            for process in _of_session(self._root):
                with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                    if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::Worker"):
                        self.sizes.append((time.monotonic() - self._started, process.pid, _peak(process.pid)))


def _peak(pid: int) -> int:
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"process {pid} has ended")
    return 1024 * int(found[1])


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster; all its processes are ended at the end."""
    folder = Path(tempfile.mkdtemp(prefix="tide-"))  # short: paths of Ray's sockets are limited
    environment = environment_of(folder, free_ports(4))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD_A_CLUSTER],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, f"no cluster:\n{(folder / 'log').read_text()[-4000:]}"
        yield Cluster(folder, process, {**environment, "RAY_ADDRESS": address})
    finally:
        for each in _of_session(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _of_session(leader: int) -> Iterator[psutil.Process]:
    """Every process of a session: Ray's processes keep that of the process that started them."""
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader:
                yield process

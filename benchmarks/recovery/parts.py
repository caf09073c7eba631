"""What is killed or changed, and what clients see of it."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.common import ROOT
from benchmarks.common.bars import Bar, Part
from benchmarks.common.live import Server, wait_until_healthy
from tide_client import TideClient, TideClientError

QUESTION = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
EVERY_S = 0.1
GIVE_UP_S = 120.0
SPARE_S = 180.0
"""Time for the spare process of a replica to start; a replica that dies before has none to start in."""
REPLICA_S, HAPROXY_S, GENERATE_S = 10.0, 5.0, 5.0
STAGES = {"constructor": "loading the engine's libraries", "engine": "building the engine", "ready": "ready to serve"}


def replica_killed(server: Server, repeats: int) -> Part:
    """The only replica is killed; a new request begins every 0.1 s."""
    found: list[float] = []
    stages: list[dict[str, float]] = []
    for _ in range(repeats):
        spares = _wait_for_spare(server, of_replicas=True)
        [replica] = server.replicas()
        at = datetime.now()
        found.append(_until_answered(server, replica.kill))
        stages.append(_stages(server, at))
        wait_until_healthy(server)
    data = {
        "until_answered_s": found,
        "stages_s": stages,
        "replica_mib": _mib(server.replicas()[0]),
        "spare_mib": spares,
    }
    return Part(
        "replica",
        "the only replica is killed",
        data,
        [Bar("s until a new request is answered after the only replica died", max(found), REPLICA_S, False)],
    )


def haproxy_killed(server: Server, repeats: int) -> Part:
    found: list[float] = []

    def kill() -> None:
        for process, command in server._commands():
            if "haproxy -" in command:
                process.kill()

    spares: list[int] = []
    for _ in range(repeats):
        spares = _wait_for_spare(server, of_replicas=False)
        found.append(_until_answered(server, kill))
        wait_until_healthy(server)
    bars = [Bar("s until a new request is answered after HAProxy died", max(found), HAPROXY_S, False)]
    return Part("haproxy", "HAProxy is killed", {"until_answered_s": found, "spare_mib": spares}, bars)


def updated(server: Server, repeats: int, deadline_s: float, num_clients: int) -> Part:
    """Rolling updates under short requests, each with a deadline that no healthy answer needs."""
    clients = [_Client(server, deadline_s) for _ in range(num_clients)]
    for client in clients:
        client.start()
    times: list[float] = []
    try:
        for number in range(repeats):
            config = copy.deepcopy(server.config)
            config["applications"][0]["args"]["limits"]["max_tokens"] -= 1 + number  # any change of `args` restarts
            old = {process.pid for process in server.replicas()}
            began = time.monotonic()
            server.deploy(config)
            _wait_for_new_replicas(server, old)
            times.append(round(time.monotonic() - began, 1))
    finally:
        for client in clients:
            client.running = False
        for client in clients:
            client.join()
    failures = [failure for client in clients for failure in client.failures]
    data = {
        "updates_s": times,
        "requests": sum(client.num_done for client in clients) + len(failures),
        "failed": Counter(failure.code for failure in failures),
        "failures": [vars(failure) for failure in failures[:50]],
        "slowest_s": round(max(client.slowest_s for client in clients), 2),
    }
    return Part(
        "update", f"{repeats} rolling updates under load", data, [Bar("failed requests", len(failures), 0, False)]
    )


def first_token(repeats: int) -> Part:
    """`tide generate` in a new process, up to the first text it prints."""
    wall, cpu = [], []
    command = [str(Path(sys.executable).parent / "tide"), "generate", "--model", "demo", "--max-tokens", "1"]
    command.append("The capital of France is")
    for _ in range(repeats):
        began = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.read(1)
            wall.append(round(time.monotonic() - began, 2))
            times = psutil.Process(process.pid).cpu_times()
            cpu.append(round(times.user + times.system, 2))
    bars = [Bar("s until the first token of `tide generate`", median(wall), GENERATE_S, False)]
    return Part("generate", "`tide generate --model demo`", {"first_token_s": wall, "cpu_s": cpu}, bars)


def _until_answered(server: Server, kill: Callable[[], object]) -> float:
    """Seconds from the kill to the first answer to a request that began after it. One may wait, fail or succeed, and a
    new one begins every 0.1 s, so that none that waits hides a service that is back."""
    answered = threading.Event()
    times: list[float] = []
    kill()
    killed_at = time.monotonic()

    def ask() -> None:
        try:
            status, _ = server.post(QUESTION, timeout_s=GIVE_UP_S)
        except OSError:
            return
        if status == 200:
            times.append(time.monotonic() - killed_at)
            answered.set()

    time.sleep(EVERY_S)  # the system closes the connections of a killed process
    while not answered.is_set():
        assert time.monotonic() < killed_at + GIVE_UP_S, f"no answer in {GIVE_UP_S} s:\n{server.log[-4000:]}"
        threading.Thread(target=ask, daemon=True).start()
        answered.wait(EVERY_S)
    return round(min(times), 2)


def _wait_for_spare(server: Server, *, of_replicas: bool) -> list[int]:
    """Wait until there is a spare process that has imported everything; the sizes in MiB. None if the service has
    none."""
    deadline, before = time.monotonic() + SPARE_S, -1.0
    while time.monotonic() < deadline:
        spares = server.spares(of_replicas=of_replicas)
        now = sum(sum(process.cpu_times()[:2]) for process in spares)
        if spares and now - before < 0.05:
            return [_mib(process) for process in spares]
        before = now
        time.sleep(3.0)
    return []


def _stages(server: Server, since: datetime) -> dict[str, float]:
    """When the new replica logged each stage of its start, in seconds after `since`."""
    line = r"^\w+ (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*"
    found = {}
    for name, text in STAGES.items():
        times = [
            (datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f") - since).total_seconds()
            for at in re.findall(line + re.escape(text), server.replica_logs, re.MULTILINE)
        ]
        if after := [each for each in times if each > 0]:
            found[name] = round(min(after), 2)
    return found


def _mib(process: psutil.Process) -> int:
    """Memory that is its own, and its share of what it shares."""
    return int(process.memory_full_info().pss) >> 20


def _wait_for_new_replicas(server: Server, old: set[int]) -> None:
    wanted = server.config["applications"][0]["deployments"][0]["num_replicas"]
    deadline = time.monotonic() + 300
    while True:
        pids = {process.pid for process in server.replicas()}
        if len(pids) == wanted and not pids & old and server.is_healthy():
            return
        assert time.monotonic() < deadline, f"the update does not end:\n{server.log[-4000:]}"
        time.sleep(0.25)


@dataclass
class _Failure:
    at: str
    call: str
    code: str
    after_s: float
    text: str


class _Client(threading.Thread):
    """Short answers and model infos in turns on one connection, without retries; every failure is kept."""

    def __init__(self, server: Server, deadline_s: float) -> None:
        super().__init__(daemon=True)
        self._client = TideClient(server.address, retries=0)
        self._deadline_s = deadline_s
        self.running, self.num_done, self.slowest_s = True, 0, 0.0
        self.failures: list[_Failure] = []

    def run(self) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "Generate": lambda: self._client.generate("the cat", max_tokens=4, timeout_s=self._deadline_s),
            "GetModelInfo": lambda: self._client.model_info(),
        }
        while self.running:
            for name, call in calls.items():
                began, at = time.monotonic(), datetime.now().isoformat(timespec="milliseconds")
                try:
                    call()
                    self.num_done += 1
                except TideClientError as error:
                    code = getattr(error, "code", type(error).__name__)
                    taken = round(time.monotonic() - began, 2)
                    self.failures.append(_Failure(at, name, str(code), taken, str(error)[:300]))
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                time.sleep(0.05)
        self._client.close()


def machine_load() -> str:
    return " ".join(f"{each:.1f}" for each in os.getloadavg())

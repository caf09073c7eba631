"""The cluster of k8s/base on simulated machines: a head without replicas, workers with one replica each, HAProxy on
every node, Ray's token, and the Serve config of the overlay for CPUs."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import secrets
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import ROOT
from benchmarks.nodes.machines import Machine, Network, network

START_S = 480
POLL_S = 0.2
"""Between two looks at the cluster: the precision of what is measured, paid by its dashboard and Serve's controller."""
BIN = Path(sys.executable).parent
APP, DEPLOYMENT = "tide", "TideServer"
HTTP_PORT, GRPC_PORT, DASHBOARD_PORT, GCS_PORT = 8000, 9000, 8265, 6379
API_KEY = "key-of-the-rehearsal"


@dataclass(frozen=True, slots=True)
class Replica:
    name: str
    state: str
    address: str
    """Address of its node."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the manifest: its `rayStartParams`, and the variables for Ray."""

    options: tuple[str, ...]
    variables: Mapping[str, str]


def pods() -> tuple[Pod, Pod]:
    """Head and worker."""
    text = (ROOT / "k8s" / "base" / "service" / "ray-service.yaml").read_text(encoding="utf-8")
    spec = yaml.safe_load(text)["spec"]["rayClusterConfig"]
    return _pod(spec["headGroupSpec"]), _pod(spec["workerGroupSpecs"][0])


def _pod(group: Mapping[str, Any]) -> Pod:
    [container] = group["template"]["spec"]["containers"]
    options = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
    return Pod(
        (*options, "--metrics-export-port=8080", "--block"),
        {each["name"]: each["value"] for each in container["env"] if each["name"].startswith("RAY_")},
    )


def cluster_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "config.cpu.yaml").read_text(encoding="utf-8"))
    return config


class Cluster:
    def __init__(self, switch: Network) -> None:
        self._network, self._head_pod, self._worker_pod = switch, *pods()
        self._token = secrets.token_hex(32)
        self._keys = switch.folder / "keys.json"
        entry = {"name": "rehearsal", "sha256": hashlib.sha256(API_KEY.encode()).hexdigest()}
        self._keys.write_text(json.dumps({"keys": [entry]}))
        command = [str(BIN / "ray"), "start", "--head", "--node-ip-address={address}", f"--port={GCS_PORT}"]
        self.head = self._start("head", command, self._head_pod)
        self.workers: list[Machine] = []
        self.until(lambda: "Ray runtime started" in self.head.log, "the head")

    def add_worker(self) -> Machine:
        """Start a worker without waiting for it."""
        command = [
            str(BIN / "ray"),
            "start",
            "--node-ip-address={address}",
            f"--address={self.head.address}:{GCS_PORT}",
        ]
        worker = self._start(f"worker-{len(self.workers) + 1}", command, self._worker_pod)
        self.workers.append(worker)
        return worker

    def addresses(self) -> list[str]:
        """Addresses of all workers, including dead ones."""
        return [worker.address for worker in self.workers]

    def kill(self, worker: Machine, *, silently: bool = False) -> None:
        """Kill all processes of a worker; `silently`: cut its network first, so that no connection is closed."""
        if silently:
            self._network.unplug(worker)
        worker.kill()

    def deploy(self, config: Mapping[str, Any]) -> None:
        """The request that `serve deploy` makes, and KubeRay for a changed serveConfigV2."""
        config = copy.deepcopy(dict(config))
        config["applications"][0]["args"]["api_keys_file"] = str(self._keys)
        with self._dashboard("PUT", config) as answer:
            assert answer.status == 200, answer.read()

    def status(self) -> dict[str, Any]:
        """Status of Serve by the dashboard; empty while it does not answer."""
        try:
            with self._dashboard("GET") as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except (OSError, ValueError):
            return {}

    def _dashboard(self, method: str, body: Any = None) -> Any:
        url = f"http://{self.head.address}:{DASHBOARD_PORT}/api/serve/applications/"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=START_S)

    def replicas(self) -> list[Replica]:
        app = self.status().get("applications", {}).get(APP, {})
        found = app.get("deployments", {}).get(DEPLOYMENT, {}).get("replicas", [])
        return [Replica(each["replica_id"], each["state"], each.get("node_ip") or "") for each in found]

    def running(self) -> list[Replica]:
        """Running replicas on workers that are alive."""
        alive = {worker.address for worker in self.workers if worker.is_alive}
        return [each for each in self.replicas() if each.state == "RUNNING" and each.address in alive]

    def replica_logs(self, worker: Machine) -> str:
        files = worker.folder.glob("ray/session_2*/logs/serve/replica_*")
        return "".join(file.read_text(errors="replace") for file in files)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            logs = "\n".join(f"{each.name}: {each.log[-1500:]}" for each in (self.head, *getattr(self, "workers", ())))
            assert time.monotonic() < deadline, f"no {what} in {seconds} s:\n{self.status()}\n{logs}"
            time.sleep(POLL_S)

    def _start(self, name: str, command: list[str], pod: Pod) -> Machine:
        return self._network.start(name, [*command, *pod.options], self._environment(pod.variables))

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        ours = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(self._network.mount),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
        }
        mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**mine, **ours, **variables}


@contextlib.contextmanager
def started(num_workers: int) -> Iterator[Cluster]:
    """Head and workers, without a deployment."""
    with network() as switch:
        cluster = Cluster(switch)
        for _ in range(num_workers):
            cluster.add_worker()
        for worker in cluster.workers:
            cluster.until(lambda worker=worker: "Ray runtime started" in worker.log, worker.name)
        yield cluster

"""Idle worker processes on the node of a replica: the next replica, and the next proxy, start in them.

Ray starts an actor in an idle worker that has the actor's runtime environment and has not run anything yet; else it
starts a new process, and starting Python, Ray, Torch and transformers takes longer than all the rest of a replica's
start. There is one spare for a replica, with all its libraries imported by `deploy.preload` but without weights, and
a small one for the actor that runs HAProxy. The oldest replica of a node looks for them from time to time and asks the
raylet for one that is missing. Without a spare an actor starts as ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from deploy.preload import PRELOAD
from deploy.processes import PROC, Process, all_processes

logger = logging.getLogger("ray.serve")

IDLE = "ray::IDLE"
REPLICA = "ray::ServeReplica"
KEEP_S = 3_600
"""How long Ray must not end it for being idle. Another follows then, as long as there is a replica."""
START_S = 120.0
"""Time in which a spare that was asked for appears, even on a busy machine."""
CHECK_S, MAX_PAUSE_S = 10.0, 300.0
RPC_TIMEOUT_S = 10.0


class Spares:
    """The spare processes of this replica's node."""

    def __init__(self) -> None:
        self._environments: list[str] = []
        self._asked_at: dict[str, float] = {}

    @property
    def are_wanted(self) -> bool:
        """Whether the config of the deployment asks for them."""
        return os.environ.get(PRELOAD) == "1"

    async def keep(self) -> None:
        """Look for them from time to time, but not at once: whoever waits for this replica needs the processor."""
        pause_s, failed = CHECK_S, False
        while self.are_wanted:
            await asyncio.sleep(pause_s)
            try:
                await asyncio.to_thread(self.ensure)
                pause_s, failed = CHECK_S, False
            except Exception:
                if not failed:
                    logger.exception(
                        "tide: no spare process could be started; without one a replica starts in a new one"
                    )
                pause_s, failed = min(2 * pause_s, MAX_PAUSE_S), True

    def ensure(self) -> None:
        """Ask for each spare that is missing, unless it is starting. Of several replicas on a node the oldest asks."""
        self._environments = self._environments or environments()
        if any(other.pid < os.getpid() for other in find(_variables(self._environments[0]), title=REPLICA)):
            return
        for environment in self._environments:
            if find(_variables(environment)):
                self._asked_at.pop(environment, None)
            elif time.monotonic() >= self._asked_at.get(environment, -START_S) + START_S:
                self._asked_at[environment] = time.monotonic()
                ask_for_worker(environment)


def find(variables: Mapping[str, str], proc: Path = PROC, *, title: str = IDLE) -> list[Process]:
    """Idle workers of this process's raylet that have these variables, and libraries imported if these ask for it; or
    its workers of another kind."""
    ours = os.getppid()
    wanted = {f"{name}={value}" for name, value in variables.items()}
    preload = {f"{PRELOAD}=1"}

    def fits(process: Process) -> bool:
        given = _environment(proc / str(process.pid))
        return wanted <= given and wanted & preload == given & preload

    return [
        each
        for each in all_processes(proc).values()
        if each.parent == ours and each.command and each.command[0].startswith(title) and fits(each)
    ]


def environments() -> list[str]:
    """Runtime environments, as Ray writes them: of this replica, and of Serve's controller, which its proxies have."""
    import ray
    from ray._private.state import state
    from ray.core.generated import gcs_pb2
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    found = [ray.get_runtime_context().get_runtime_env_string()]
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    data = state._connect_and_get_accessor().get_actor_info(controller._actor_id)
    if data is not None:
        environment = gcs_pb2.ActorTableData.FromString(data).serialized_runtime_env
        found += [environment] if _variables(environment) else []  # else any idle worker would look like one
    return found


def ask_for_worker(environment: str) -> None:
    """Have the raylet of this node start an idle worker with a runtime environment."""
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

    context = ray.get_runtime_context()
    [node] = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    request = node_manager_pb2.PrestartWorkersRequest(
        language=common_pb2.Language.PYTHON,
        job_id=bytes.fromhex(context.get_job_id()),
        keep_alive_duration_secs=KEEP_S,
        num_workers=1,
    )
    request.runtime_env_info.serialized_runtime_env = environment
    with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=RPC_TIMEOUT_S)
    logger.info("tide: asked for a spare process: the next actor of its kind on this node starts in it")


def _variables(environment: str) -> Mapping[str, str]:
    """Variables that a runtime environment sets."""
    found: Mapping[str, str] = (json.loads(environment) if environment else {}).get("env_vars") or {}
    return found


def _environment(folder: Path) -> set[str]:
    try:
        return {entry.decode(errors="replace") for entry in (folder / "environ").read_bytes().split(b"\0")}
    except OSError:  # it has just ended
        return set()

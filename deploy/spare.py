"""Spare worker processes on each node with a replica, in which the next replica and the next HAProxy actor start.

Ray starts an actor in an idle worker if there is one with the actor's runtime environment that has not run anything
yet; otherwise it starts a new process. A new process has to import Ray, Torch and transformers, which takes longer than
the rest of a replica's start. A node keeps two spares: one for a replica, whose libraries `deploy.preload` has imported
and which holds no weights, and a small one for the actor that runs HAProxy. The oldest replica of a node checks for
them every few seconds and asks the raylet for a missing one. If there is no spare, Ray starts the actor in a new
process.
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
"""Time for which Ray keeps an idle spare. After it ended, another one is started if there still is a replica."""
START_S = 120.0
"""Time after which a spare that was asked for and is not there is asked for again."""
CHECK_S, MAX_PAUSE_S = 10.0, 300.0
"""Pause between two checks; after failures it doubles, up to the second value."""
RPC_TIMEOUT_S = 10.0


class Spares:
    """Keeps the spare processes of this replica's node."""

    def __init__(self) -> None:
        self._environments: list[str] = []
        self._asked_at: dict[str, float] = {}

    @property
    def are_wanted(self) -> bool:
        """Whether the deployment's config asks for spares."""
        return os.environ.get(PRELOAD) == "1"

    async def keep(self) -> None:
        """Check for the spares until cancelled. The first check waits, so that starting spares does not slow down the
        start of this replica."""
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
        """Ask for each spare that is missing, unless it was asked for lately. Does nothing if an older replica runs on
        this node, which does it."""
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
    """Workers of this process's raylet whose title begins with `title` (by default idle ones) and whose environment has
    these variables. PRELOAD is compared both ways: a worker that has it fits only if `variables` have it."""
    raylet = os.getppid()
    wanted = {f"{name}={value}" for name, value in variables.items()}
    preload = {f"{PRELOAD}=1"}

    def fits(process: Process) -> bool:
        actual = _environment(proc / str(process.pid))
        return wanted <= actual and wanted & preload == actual & preload

    return [
        each
        for each in all_processes(proc).values()
        if each.parent == raylet and each.command and each.command[0].startswith(title) and fits(each)
    ]


def environments() -> list[str]:
    """Runtime environments as serialized by Ray: that of this replica, and that of Serve's controller, in which proxies
    run, too, if it sets variables."""
    import ray
    from ray._private.state import state
    from ray.core.generated import gcs_pb2
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    found = [ray.get_runtime_context().get_runtime_env_string()]
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    data = state._connect_and_get_accessor().get_actor_info(controller._actor_id)
    if data is not None:
        environment = gcs_pb2.ActorTableData.FromString(data).serialized_runtime_env
        found += [environment] if _variables(environment) else []  # without variables any idle worker would match
    return found


def ask_for_worker(environment: str) -> None:
    """Ask the raylet of this node to start an idle worker with a runtime environment."""
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
    """Environment variables that a runtime environment sets."""
    found: Mapping[str, str] = (json.loads(environment) if environment else {}).get("env_vars") or {}
    return found


def _environment(folder: Path) -> set[str]:
    try:
        return {entry.decode(errors="replace") for entry in (folder / "environ").read_bytes().split(b"\0")}
    except OSError:  # it has just ended
        return set()

"""One idle worker process on the node of a replica, with all libraries imported: the next replica starts in it.

Ray starts an actor in an idle worker that has the actor's runtime environment and has not run anything yet; else it
starts a new process, and starting Python, Ray, Torch and transformers takes longer than all the rest of a replica's
start. A spare holds no weights. Any replica of a node looks for one from time to time and asks the raylet for another
if there is none; with `deploy.preload` it imports what a replica needs. Without a spare a replica starts as ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from deploy.preload import PRELOAD
from deploy.processes import PROC, Process, all_processes

logger = logging.getLogger("ray.serve")

IDLE = "ray::IDLE"
KEEP_S = 10 * 365 * 86_400
"""How long Ray must not end it for being idle: longer than any service runs."""
START_S = 120.0
"""Time in which a spare that was asked for appears, even on a busy machine."""
RPC_TIMEOUT_S = 10.0


class Spare:
    """The spare process of this replica's node. Its methods block."""

    def __init__(self) -> None:
        self._asked_at = -START_S

    @property
    def is_wanted(self) -> bool:
        """Whether the config of the application asks for one."""
        return os.environ.get(PRELOAD) == "1"

    def ensure(self) -> None:
        """Ask for a spare unless there is one, or one is starting."""
        if find(_variables()) or time.monotonic() < self._asked_at + START_S:
            return
        self._asked_at = time.monotonic()
        ask_for_worker()
        logger.info("tide: asked for a spare process: the next replica on this node starts in it")

    def end(self) -> None:
        """End it with the last replica. If others are left on this node they ask for another."""
        for process in find(_variables()):
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGTERM)


def find(variables: Mapping[str, str], proc: Path = PROC) -> list[Process]:
    """Idle workers of this process's raylet that have these variables in their environment."""
    ours = os.getppid()
    wanted = {f"{name}={value}" for name, value in variables.items()}
    return [
        each
        for each in all_processes(proc).values()
        if each.parent == ours
        and each.command
        and each.command[0].startswith(IDLE)
        and wanted <= _environment(proc / str(each.pid))
    ]


def ask_for_worker() -> None:
    """Have the raylet of this node start an idle worker with the runtime environment of this one."""
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
    request.runtime_env_info.serialized_runtime_env = context.get_runtime_env_string()
    with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=RPC_TIMEOUT_S)


def _variables() -> Mapping[str, str]:
    """Variables that the runtime environment of this process sets."""
    import ray

    found: Mapping[str, str] = ray.get_runtime_context().runtime_env.env_vars()
    return found


def _environment(folder: Path) -> set[str]:
    try:
        return {entry.decode(errors="replace") for entry in (folder / "environ").read_bytes().split(b"\0")}
    except OSError:  # it has just ended
        return set()

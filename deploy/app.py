"""The Serve application: it connects engine, service, APIs and metrics."""

# No `from __future__ import annotations` here: Serve reads the class of `build_app`'s argument from its annotation.

import asyncio
import contextlib
import logging
import os
import sys
import time
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from deploy.artefact_source import ArtefactSource
from deploy.autoscaling import KV_USAGE, ROWS, TARGET_WAIT_S, WAIT_S, most_replicas
from deploy.config import last_good
from deploy.config.args import AppArgs
from deploy.config.last_good import ClusterStore
from deploy.config.policy import LivePolicy
from deploy.grpc_api.api import GrpcApi
from deploy.grpc_api.servicers import use_health
from deploy.http_api.api import build_api
from deploy.keys import KeyRing
from deploy.metrics import Meter, RayExporter, TextExporter
from deploy.service import Service
from deploy.spare import Spares
from deploy.telemetry import join_serve_logs
from deploy.weights import local_model
from tide_core.errors import TideError
from tide_core.models.quick_start import quick_start

logger = logging.getLogger("ray.serve")

ABORT_TIMEOUT_S = 5.0
SWITCH_S = 0.0001
"""Python's thread switch interval. The engine thread needs the interpreter between any two kernels, and the event loop
holds it while it writes streams: at Python's default of 5 ms the engine waits for the streams."""


@serve.deployment
@serve.ingress()
class TideServer(GrpcApi):
    """One replica: an engine with its HTTP routes and gRPC methods in one process."""

    def __init__(self, args: dict[str, Any]) -> None:
        started = time.monotonic()
        configure_process()
        logger.info("tide: loading the engine's libraries")
        with quick_start():
            from tide_core.engine.engine import Engine  # torch comes with it; only replicas need that

        checked = AppArgs(**args)
        self._args, self._configured = checked, False
        self._given: dict[str, Any] = {}
        self._context = context = serve.get_replica_context()
        self._policies = ClusterStore(context.app_name, context.deployment, context.replica_id.unique_id)
        keys = KeyRing.read(checked.api_keys_file)
        logger.info("tide: building the engine (after %.1f s)", time.monotonic() - started)
        self._artefacts = ArtefactSource(checked.engine["artefact"])
        self._changing = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._spares = Spares()
        self._keeping_spares: asyncio.Task[None] | None = None
        settings = {**checked.engine, "model": local_model(checked.engine["model"])}
        if settings.get("num_threads") is None and (given := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
            settings["num_threads"] = int(given)  # comes with the actor: a spare process has imported Torch before
        # Each replica audits what it serves; together they may raise so many false alarms.
        settings["audit_delta"] /= most_replicas(getattr(context, "_deployment_config", None))
        with quick_start():
            engine = self._artefacts.first(lambda folder: Engine(**{**settings, "artefact": folder}))
        model, *other_names = checked.model_names or [engine.model_name]
        self._exporter = TextExporter(RayExporter()) if checked.metrics else RayExporter()
        self._meter = Meter(self._exporter, model=model, max_queued=engine.config.max_queued)
        self.service = Service(
            engine,
            model=model,
            other_names=other_names,
            limits=checked.limits,
            keys=keys,
            observer=self._meter,
        )
        self.service.abort_elsewhere = self._abort_elsewhere
        self.tool_parser = checked.tool_parser
        use_health(self.health)
        self._meter.start(engine.stats, lambda: self.service.tokens_in_flight, lambda: keys.num_failed)
        logger.info("tide: ready to serve %s (after %.1f s)", ", ".join(self.service.names), time.monotonic() - started)

    def __serve_build_asgi_app__(self) -> FastAPI:
        setting = self._args.playground
        playground = self.service.keys.is_open if setting is None else setting
        args = self._args
        return build_api(
            self.service,
            playground=playground,
            strict=args.strict,
            cors_origins=args.cors_origins,
            docs_url=args.docs_url,
            tool_parser=args.tool_parser,
            metrics=self._exporter.text if isinstance(self._exporter, TextExporter) else None,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply a new exit policy, or another artefact. Running requests keep theirs.

        A bad `user_config` is refused as a whole, with a log line and a metric, and the previous one stays in force:
        Serve would stop a replica that raises here. A replica that starts with a bad one takes the last good policy of
        its deployment; if there is none, as at the first deploy, it does not start."""
        async with self._changing:
            self._given = dict(user_config or {})
            await self._replace_policy(self._given)
        self._begin_tasks()

    def _begin_tasks(self) -> None:
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
            self._keeping_spares = asyncio.create_task(self._spares.keep())

    async def _follow(self) -> None:
        """Take the exits that a pointer names whenever it has moved, as if a `user_config` had been deployed."""
        while True:
            await asyncio.sleep(self._args.follow_s)
            try:
                if not await asyncio.to_thread(self._artefacts.has_moved, self._given.get("artefact")):
                    continue
                async with self._changing:
                    await self._replace_policy(self._given)
                    self._meter.on_artefact_move("taken" if self.service.policy_refused is None else "refused")
            except Exception:  # a store that does not answer, or a bug: the exits in force stay
                logger.exception("tide: the pointer to the published artefact could not be followed")

    async def _replace_policy(self, given: dict[str, Any]) -> None:
        try:
            await self._apply(given)
        except TideError as error:
            if not self._configured and not await self._apply_last_good(given):
                raise
            self._note_refused(str(error))
            logger.error("tide: user_config is refused, the last good one stays in force: %s", error)
            return
        self._note_refused(None)
        last_good.remember(self._policies, {**given, **self._pinned})

    def _note_refused(self, reason: str | None) -> None:
        """For the metric, /exit_stats and `tide status`."""
        self._meter.config_refused = self.service.policy_refused = reason
        self._policies.note_refused(reason)

    async def _apply(self, values: dict[str, Any]) -> None:
        policy = LivePolicy.read(values)
        artefact = await asyncio.to_thread(self._artefacts.local, policy.artefact)
        resolved = {} if artefact.pinned is None else {"artefact": artefact.folder}
        await self.service.apply(policy.model_copy(update=resolved))
        self._artefacts.taken(artefact)
        self._pinned = {} if artefact.pinned is None else {"artefact": artefact.pinned}
        self._configured = True
        logger.info("tide: policy in force: %s", policy.model_dump_json(exclude_defaults=True))

    async def _apply_last_good(self, refused: dict[str, Any]) -> bool:
        """Whether one of the policies that this deployment had before could be applied."""
        for values in last_good.others(self._policies, refused):
            try:
                await self._apply(values)
            except TideError as error:
                logger.error("tide: an earlier user_config is refused, too: %s", error)
            else:
                return True
        return False

    async def abort_here(self, caller_name: str, request_id: str) -> bool:
        """Called by another replica: a client's Abort may arrive at any of them."""
        return self.service.abort_of(caller_name, request_id)

    async def _abort_elsewhere(self, caller_name: str, request_id: str) -> bool:
        handle = serve.get_deployment_handle(self._context.deployment, self._context.app_name)
        response = handle.broadcast("abort_here", caller_name, request_id)
        try:
            found = await response.results_async(timeout_s=ABORT_TIMEOUT_S, return_exceptions=True)
        except TimeoutError:
            logger.warning("tide: not every replica answered whether it has request %s", request_id)
            return False
        return any(each is True for each in found)

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises here."""
        self._begin_tasks()  # without a `user_config` nobody calls `reconfigure`
        self.service.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        stats, config = self.service.engine.stats(), self.service.engine.config
        return {
            ROWS: (stats.num_running + stats.num_waiting) / config.max_rows,
            WAIT_S: self.service.longest_wait_s,
            KV_USAGE: stats.kv_usage,
            TARGET_WAIT_S: self._args.target_wait_s,
        }

    def __del__(self) -> None:
        if hasattr(self, "service"):
            for task in (self._following, self._keeping_spares):
                if task is not None:
                    with contextlib.suppress(RuntimeError):  # the loop may have ended before
                        task.get_loop().call_soon_threadsafe(task.cancel)
            self._meter.stop()
            self.service.engine.close()
            if self.service.policy_refused is not None:
                self._policies.note_refused(None)  # nobody else knows the key of this replica


def configure_process() -> None:
    """Process-wide settings of a replica: log handlers and thread switching."""
    join_serve_logs()
    sys.setswitchinterval(SWITCH_S)


def build_app(args: AppArgs) -> Application:
    """The entry point that `import_path` names: checks the arguments and binds one deployment."""
    return TideServer.bind(args.model_dump())  # type: ignore[attr-defined]  # added by serve.deployment

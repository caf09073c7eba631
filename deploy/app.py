"""The Serve application: it connects engine, service, APIs and metrics."""

# No `from __future__ import annotations` here: Serve reads the class of `build_app`'s argument from its annotation.

import logging
import sys
import time
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from deploy.autoscaling import KV_USAGE, TARGET_TOKENS, TOKENS_IN_FLIGHT
from deploy.config.args import AppArgs
from deploy.config.policy import LivePolicy
from deploy.grpc_api.api import GrpcApi
from deploy.grpc_api.servicers import use_health
from deploy.http_api.api import build_api
from deploy.keys import KeyRing
from deploy.metrics import Meter, RayExporter
from deploy.service import Service
from deploy.telemetry import join_serve_logs
from tide_core.errors import TideError

logger = logging.getLogger("ray.serve")

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
        from tide_core.engine.engine import Engine  # torch comes with it; only replicas need that

        checked = AppArgs(**args)
        self._args, self._configured = checked, False
        keys = KeyRing.read(checked.api_keys_file)
        logger.info("tide: building the engine (after %.1f s)", time.monotonic() - started)
        engine = Engine(**checked.engine)
        model = checked.served_model_name or engine.model_name
        self._meter = Meter(RayExporter(), model=model, max_queued=engine.config.max_queued)
        self.service = Service(
            engine,
            model=model,
            limits=checked.limits,
            keys=keys,
            observer=self._meter,
        )
        use_health(self.health)
        self._meter.start(engine.stats, lambda: self.service.tokens_in_flight)
        logger.info("tide: ready to serve %s (after %.1f s)", self.service.model, time.monotonic() - started)

    def __serve_build_asgi_app__(self) -> FastAPI:
        setting = self._args.playground
        playground = self.service.keys.is_open if setting is None else setting
        return build_api(self.service, playground=playground, strict=self._args.strict)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply a new exit policy, another artefact and the current key file. Running requests keep theirs.

        A bad `user_config` is refused as a whole. At the start that fails the deployment; later the previous one stays
        in force, with a log line and a metric, because Serve would stop a replica that raises here."""
        try:
            policy = LivePolicy.read(user_config or {})
            keys = KeyRing.read(self._args.api_keys_file)
            await self.service.apply(policy, keys)
        except TideError as error:
            if not self._configured:
                raise
            self._meter.config_refused = True
            logger.error("tide: user_config is refused, the previous one stays in force: %s", error)
            return
        self._configured, self._meter.config_refused = True, False
        logger.info("tide: policy in force: %s", policy.model_dump_json(exclude_defaults=True))

    def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises here."""
        self.service.check()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {
            TOKENS_IN_FLIGHT: float(self.service.tokens_in_flight),
            KV_USAGE: self.service.engine.stats().kv_usage,
            TARGET_TOKENS: float(self._args.target_tokens_in_flight),
        }

    def __del__(self) -> None:
        if hasattr(self, "service"):
            self._meter.stop()
            self.service.engine.close()


def configure_process() -> None:
    """Process-wide settings of a replica: log handlers and thread switching."""
    join_serve_logs()
    sys.setswitchinterval(SWITCH_S)


def build_app(args: AppArgs) -> Application:
    """The entry point that `import_path` names: checks the arguments and binds one deployment."""
    return TideServer.bind(args.model_dump())  # type: ignore[attr-defined]  # added by serve.deployment

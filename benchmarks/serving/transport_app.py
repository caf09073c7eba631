"""The server over an engine whose tokens are ready: the transport alone.

Loop and sinks are those of the engine; the core is a stub that outputs the next token of every open row at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from deploy.app import configure_process
from deploy.grpc_api.api import GrpcApi
from deploy.http_api.api import build_api
from deploy.metrics import Meter, RayExporter
from deploy.service import Service
from tide_core.config import EngineConfig
from tide_core.engine.loop import EngineLoop
from tide_core.engine.sinks import AsyncSink
from tide_core.outputs.exit_stats import ExitStats
from tide_core.request import Audit, FinishReason, Request, RequestOutput, SamplingParams, TokenOutput, Usage
from tide_core.stats import EngineStats, ModelFacts

NUM_LAYERS = 30
STEP_S = 0.001
"""Seconds for which a step releases the interpreter, as a real step does: at most 16,000 tokens/s for 16 rows."""


class ReadyCore:
    """A step outputs one token of every row."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, int]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    def add(self, request: Request) -> None:
        self._rows[request.request_id] = (0, request.params.max_tokens)

    def abort(self, request_id: str) -> RequestOutput | None:
        return RequestOutput(request_id, (), FinishReason.ABORT) if self._rows.pop(request_id, None) else None

    def advance(self, deliver: Callable[[list[RequestOutput]], None]) -> None:
        deliver(self._step())

    def emit(self) -> list[RequestOutput]:
        """No output is pending."""
        return []

    def _step(self) -> list[RequestOutput]:
        time.sleep(STEP_S)
        outputs = []
        for request_id, (index, total) in list(self._rows.items()):
            layer = 2 if index % 3 else NUM_LAYERS
            token = TokenOutput(index, " token", layer, score=0.5, audit=Audit.VERIFIED, mode="verified")
            if index + 1 < total:
                self._rows[request_id] = (index + 1, total)
                outputs.append(RequestOutput(request_id, (token,)))
            else:
                del self._rows[request_id]
                outputs.append(RequestOutput(request_id, (token,), FinishReason.LENGTH, Usage(1, total)))
        return outputs

    def check_idle(self) -> None:
        """Nothing to check."""


class ReadyEngine:
    """The interface of an engine that a service uses."""

    artefact_digest = "0" * 64
    default_mode = "verified"
    max_model_len = 2**20
    model_name = "ready"
    config = EngineConfig()

    class tokenizer:  # a class in place of the engine's object
        max_token_chars = 8

        @staticmethod
        def decode(ids: list[int]) -> str:
            return " token" * len(ids)

    def __init__(self) -> None:
        self._core: Any = ReadyCore()
        self._loop = EngineLoop(self._core, max_open=1000)

    async def stream(
        self, prompt: Any, params: SamplingParams, *, request_id: str, cache_salt: str = "", reserved: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        sink = AsyncSink(asyncio.get_running_loop())
        self._loop.submit([Request(request_id, (0,), params, 0)], sink, self._core)
        finished = False
        try:
            while not finished:
                output = await sink.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort(request_id)

    def abort(self, request_id: str) -> bool:
        return self._loop.abort(request_id)

    def check_params(self, params: SamplingParams) -> None:
        """Accept all."""

    def max_answer_tokens(self, num_prompt: int) -> int:
        return self.max_model_len - num_prompt

    def describe(self) -> ModelFacts:
        return ModelFacts("ready", "none", NUM_LAYERS, 2, 2**20, "none", "cpu", "0", (2,), (), ("verified",), None)

    def stats(self) -> EngineStats:
        exits = ExitStats(NUM_LAYERS).summary()
        return EngineStats(0, 0, 0, 0, 0, 0, 0, 1, 0, 0, "none", False, 0.0, exits=exits)


@serve.deployment
@serve.ingress()
class TransportServer(GrpcApi):
    def __init__(self) -> None:
        configure_process()
        engine: Any = ReadyEngine()
        meter = Meter(RayExporter(), model="ready", max_queued=0)
        self.service = Service(engine, model="ready", observer=meter)
        meter.start(engine.stats, lambda: self.service.tokens_in_flight)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self.service, playground=False)


def build_app(args: dict[str, Any]) -> Application:
    return TransportServer.bind()  # type: ignore[attr-defined]

"""The gRPC API: `tide.v1.TideService` and `grpc.health.v1.Health`, as methods that Serve finds by name.

A call that fails sets its status on the context and raises `StatusSetError`: Serve returns the status, and
`deploy.telemetry` drops the trace from the log.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from deploy.choices import begin_choices, outputs_of, whole_answers
from deploy.failures import StatusSetError, TooLargeError, report
from deploy.grpc_api import messages
from deploy.grpc_api.health import Health
from deploy.grpc_api.replies import ChoiceReply, response_of
from deploy.grpc_api.servicers import decoded
from deploy.keys import Caller
from deploy.service import Service
from deploy.tools.calls import call_reading
from deploy.tools.formats import ToolFormat, tool_format
from tide.v1 import tide_pb2 as pb
from tide_core.errors import RequestError

if TYPE_CHECKING:
    from ray.serve.grpc_util import RayServegRPCContext as Context

Reply = TypeVar("Reply")


class GrpcApi:
    """Methods of both services over `self.service`."""

    service: Service

    tool_parser: str | None = None
    """Name of the format in which the model writes calls of tools, if its chat template does not show it."""

    async def Generate(self, request: pb.GenerateRequest, grpc_context: Context) -> pb.GenerateResponse:
        async def reply(caller: Caller) -> pb.GenerateResponse:
            choices = self._begin(request, caller)
            answers = [choice.answer for choice in choices]
            return response_of(choices, await whole_answers(self.service, answers, len(answers)))

        return await self._reply(grpc_context, request, reply)

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: Context
    ) -> AsyncIterator[pb.GenerateChunk]:
        sequence = 0
        try:
            choices = self._begin(request, self._caller(grpc_context, request))
            answers = [choice.answer for choice in choices]
            async with contextlib.aclosing(outputs_of(self.service, answers, len(answers))) as outputs:
                async for index, output in outputs:
                    yield choices[index].chunk(output, sequence)
                    sequence += 1
        except Exception as error:
            raise _with_status(grpc_context, error) from None

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, grpc_context: Context) -> pb.GetModelInfoResponse:
        async def reply(caller: Caller) -> pb.GetModelInfoResponse:
            return self._model_info(caller)

        return await self._reply(grpc_context, request, reply)

    async def GetExitStats(self, request: pb.GetExitStatsRequest, grpc_context: Context) -> pb.GetExitStatsResponse:
        async def reply(caller: Caller) -> pb.GetExitStatsResponse:
            return messages.stats_of(self.service.engine.stats())

        return await self._reply(grpc_context, request, reply)

    async def Abort(self, request: pb.AbortRequest, grpc_context: Context) -> pb.AbortResponse:
        async def reply(caller: Caller) -> pb.AbortResponse:
            return pb.AbortResponse(aborted=await self.service.abort_anywhere(request.request_id, caller))

        return await self._reply(grpc_context, request, reply)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: Context) -> pb.TokenizeResponse:
        async def reply(caller: Caller) -> pb.TokenizeResponse:
            if request.HasField("text") == request.HasField("chat"):
                came = "both" if request.HasField("text") else "nothing"
                raise RequestError("text", came, "exactly one of text and chat")
            prompt = request.text if request.HasField("text") else messages.chat_of(request.chat)
            ids = await self.service.tokenize(prompt)
            return pb.TokenizeResponse(ids=ids, max_model_len=self.service.engine.max_model_len)

        return await self._reply(grpc_context, request, reply)

    async def Detokenize(self, request: pb.DetokenizeRequest, grpc_context: Context) -> pb.DetokenizeResponse:
        async def reply(caller: Caller) -> pb.DetokenizeResponse:
            return pb.DetokenizeResponse(text=await self.service.detokenize(list(request.ids)))

        return await self._reply(grpc_context, request, reply)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        """grpc.health.v1. Needs no key, like /health. Only a Python proxy of Serve routes health here: in a replica
        `servicers.HealthOnServer` answers."""
        try:
            return self.health.check(decoded(request).service)
        except Exception as error:
            raise _with_status(grpc_context, error) from None

    async def List(self, request: health_pb2.HealthListRequest, grpc_context: Context) -> health_pb2.HealthListResponse:
        return self.health.list()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """grpc.health.v1: the state, and every change of it."""
        try:
            watch = self.health.watch(decoded(request).service, grpc_context.peer())
            async with contextlib.aclosing(watch):
                async for state in watch:
                    yield state
        except Exception as error:
            raise _with_status(grpc_context, error) from None

    @functools.cached_property
    def health(self) -> Health:
        return Health(lambda: self.service.check())

    @functools.cached_property
    def _tool_format(self) -> ToolFormat | None:
        return tool_format(self.tool_parser, self.service.engine.tokenizer.chat_template)

    def _begin(self, request: pb.GenerateRequest, caller: Caller) -> list[ChoiceReply]:
        """Check a request; one writer for each of its choices."""
        service, tokenizer = self.service, self.service.engine.tokenizer
        call = messages.call_of(request)
        reading = call_reading(
            messages.tools_of(request), self._tool_format, tokenizer, other_grammar=call.params["grammar"]
        )
        call = replace(call, params={**call.params, **reading.params})
        answers = begin_choices(service, [call], messages.num_choices(request), caller)
        return [
            ChoiceReply(answer, service.model, tokenizer, index, reading.parser())
            for index, answer in enumerate(answers)
        ]

    async def _reply(self, context: Context, request: object, work: Callable[[Caller], Awaitable[Reply]]) -> Reply:
        """The result of `work` for the caller; an error becomes a status."""
        try:
            return await work(self._caller(context, request))
        except Exception as error:
            raise _with_status(context, error) from None

    def _caller(self, context: Context, request: object) -> Caller:
        """Who calls. Every method asks before it reads the request, which may be one that could not be decoded."""
        metadata = context.invocation_metadata()
        size = sum(len(key) + len(value) for key, value in metadata)
        if size > self.service.limits.metadata_bytes:
            raise TooLargeError("metadata", f"{size} bytes", f"at most {self.service.limits.metadata_bytes}")
        caller = self.service.keys.caller(dict(metadata).get("authorization"))
        decoded(request)
        return caller

    def _model_info(self, caller: Caller) -> pb.GetModelInfoResponse:
        service = self.service
        engine, policy = service.engine, service.policy
        default = policy.params({}, caller, service.natural_mode)
        about = engine.describe()
        return pb.GetModelInfoResponse(
            model=service.model,
            architecture=about.architecture,
            num_layers=about.num_layers,
            vocab_size=about.vocab_size,
            max_model_len=engine.max_model_len,
            max_tokens=service.limits.max_tokens,
            max_timeout_s=service.limits.max_timeout_s,
            dtype=about.dtype,
            device=about.device,
            version=about.version,
            checkpoint_layers=about.checkpoint_layers,
            artefact_digest=about.artefact or "",
            modes=[messages.MODES[mode] for mode in service.modes_for(caller)],
            default_exits=pb.ExitParams(
                mode=messages.MODES[default.mode or service.natural_mode],
                epsilon=default.epsilon,
                margin=default.margin,
                threshold=default.threshold,
                min_layers=default.min_layers,
            ),
        )


def _with_status(context: Context, error: Exception) -> StatusSetError:
    """Set the status of an error on the context."""
    failure = report(error)
    context.set_code(grpc.StatusCode[failure.grpc_code])
    context.set_details(failure.message)
    if failure.retry_after_s is not None:
        context.set_trailing_metadata([*context.trailing_metadata(), ("retry-after", str(failure.retry_after_s))])
    return StatusSetError()

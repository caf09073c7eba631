"""The HTTP API of one service: OpenAI's routes and the playground page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deploy.answer import Answer, Call
from deploy.choices import Outputs, begin_choices, outputs_of, whole_answers
from deploy.failures import report
from deploy.http_api.guard import ClientGoneError, Guard, HttpError, body_of, caller_of, response_to
from deploy.http_api.ignored_fields import Body, shown, without_ignored
from deploy.http_api.openai_replies import ChatChoice, ChatReply, Choice, CompletionReply, Shown
from deploy.http_api.openai_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from deploy.http_api.openapi import describe
from deploy.http_api.pages import playground_page, start_page
from deploy.http_api.reply_objects import DONE_EVENT, error_object, invalid_body, sse_event, stats_object, token_name
from deploy.http_api.responses.replies import ResponseReply, response_events
from deploy.http_api.responses.requests import ResponseRequest
from deploy.keys import Caller
from deploy.service import Service
from deploy.tools.calls import call_reading
from deploy.tools.formats import tool_format
from tide_core import __version__
from tide_core.request import RequestOutput

if TYPE_CHECKING:
    from tide_core.engine.engine import Prompt

T = TypeVar("T")
AnyBody = TypeVar("AnyBody", bound=Body)


def build_api(
    service: Service,
    *,
    playground: bool,
    strict: bool = False,
    cors_origins: Sequence[str] = (),
    docs_url: str | None = None,
    tool_parser: str | None = None,
    metrics: Callable[[], bytes] | None = None,
) -> FastAPI:
    """Routes over `service`. A strict server refuses fields that are not known here. Pages of `cors_origins` may call
    it from a browser. The start page links `docs_url`. `tool_parser` names the format of the model's tool calls, if its
    chat template does not show it. `metrics` gives the text of /metrics."""

    def read(schema: type[AnyBody], request: Request) -> AnyBody:
        body, unknown = without_ignored(schema, body_of(request), strict=strict)
        if unknown:
            request.scope["tide"]["ignored"] = shown(unknown)
            service.note_ignored(len(unknown))
        return _checked(schema, body)

    api = FastAPI(title="TIDE Serve", version=__version__, docs_url=None, redoc_url=None)
    optional_paths = {"/playground": playground, "/metrics": metrics is not None}
    open_paths = frozenset({"/", "/health", "/ping", *(path for path, is_there in optional_paths.items() if is_there)})
    api.add_middleware(Guard, service=service, open_paths=open_paths)
    if cors_origins:  # before the guard: a browser asks without a key whether it may ask
        api.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Tide-Ignored", "Retry-After"],
        )
    start_html, start_headers = start_page(playground=playground, docs_url=docs_url)
    api.add_exception_handler(HTTPException, _on_http_error)
    created = int(time.time())
    call_format = tool_format(tool_parser, service.engine.tokenizer.chat_template)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = read(CompletionRequest, request)
        prompts = body.engine_prompts
        texts = [await service.text_of(prompt) for prompt in prompts] if body.echo else None

        def choice(answer: Answer, index: int) -> Choice:
            echoed = None if texts is None else texts[index // body.num_choices]
            shown = Shown(bool(body.return_token_ids), body.prompt_logprobs is not None)
            return Choice(answer, service.engine.tokenizer, index, echoed, body.drops_output, shown)

        return await _answer(service, request, body, prompts, choice, CompletionReply)

    @api.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = read(ChatRequest, request)
        calls = call_reading(body.tool_plan(), call_format, service.engine.tokenizer, other_grammar=body.grammar)

        def choice(answer: Answer, index: int) -> Choice:
            shown = Shown(bool(body.return_token_ids), body.prompt_logprobs is not None)
            return ChatChoice(answer, service.engine.tokenizer, index, shown=shown, parser=calls.parser())

        return await _answer(service, request, body, [body.chat], choice, ChatReply, **calls.params)

    @api.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = read(ResponseRequest, request)
        calls = call_reading(body.tool_plan(), call_format, service.engine.tokenizer, other_grammar=body.grammar)
        answers = _begin(service, request, body, [body.chat], **calls.params)
        reply = ResponseReply(answers[0], body, service.model, service.engine.tokenizer, calls.parser())

        def whole(outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
            return reply.whole(outputs[0])

        return await _sent(service, request, body, answers, whole, partial(response_events, reply))

    @api.get("/v1/models")
    async def models(request: Request) -> Response:
        about = _model_object(service, caller_of(request), created)
        return JSONResponse({"object": "list", "data": [{**about, "id": name} for name in service.names]})

    @api.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        service.check_model(name)
        return JSONResponse({**_model_object(service, caller_of(request), created), "id": name})

    @api.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = read(TokenizeRequest, request)
        service.check_model(body.model)
        prompt, plain = body.engine_prompt, body.add_special_tokens is False
        named = service.engine.tokenizer.added_id(prompt) if plain and isinstance(prompt, str) else None
        ids = [named] if named is not None else await service.tokenize(prompt, add_special_tokens=not plain)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": service.engine.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [token_name(service.engine.tokenizer.token_bytes(each)) for each in ids]
        return JSONResponse(found)

    @api.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = read(DetokenizeRequest, request)
        service.check_model(body.model)
        return JSONResponse({"prompt": await service.detokenize(body.tokens)})

    @api.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        tokenizer = service.engine.tokenizer
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        return JSONResponse({**names, **tokenizer.named_tokens, "chat_template": tokenizer.chat_template})

    @api.get("/exit_stats")
    async def exit_stats() -> Response:
        return JSONResponse({**stats_object(service.engine.stats()), "policy_refused": service.policy_refused})

    @api.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def start() -> Response:
        return HTMLResponse(start_html, headers=start_headers)

    @api.head("/health", include_in_schema=False)
    @api.get("/health")
    async def health() -> Response:
        service.check()
        return JSONResponse({"status": "ok"})

    @api.post("/ping", include_in_schema=False)
    @api.get("/ping")
    async def ping() -> Response:
        return await health()

    @api.get("/load")
    async def load() -> Response:
        return JSONResponse({"server_load": service.num_open})

    @api.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    if metrics is not None:

        @api.get("/metrics", include_in_schema=False)
        async def show_metrics() -> Response:
            return Response(metrics(), media_type="text/plain; version=0.0.4")

    if playground:
        page, page_headers = playground_page()

        @api.get("/playground", include_in_schema=False)
        async def show_playground() -> Response:
            return HTMLResponse(page, headers=page_headers)

    describe(api, strict=strict)
    return api


async def _answer(
    service: Service,
    request: Request,
    body: CompletionRequest | ChatRequest,
    prompts: Sequence[Prompt],
    choice: Callable[[Answer, int], Choice],
    reply_class: type[CompletionReply],
    **more: Any,
) -> Response:
    """Run one request for completions of either kind, streamed or whole. `more`: parameters that its tools need."""
    answers = _begin(service, request, body, prompts, **more)
    choices = [choice(answer, index) for index, answer in enumerate(answers)]
    reply = reply_class(choices, service.model, body.options, body.num_choices, body.usage_options)
    return await _sent(service, request, body, answers, reply.whole, partial(_events, reply))


def _begin(service: Service, request: Request, body: Sampling, prompts: Sequence[Prompt], **more: Any) -> list[Answer]:
    """Check the calls that a request asks for."""
    params = body.params() | more
    calls = [
        Call(
            prompt,
            params,
            model=body.model,
            timeout_s=body.options.timeout_s,
            fill_context=params["max_tokens"] is None,
            count_prompt=body.needs_prompt_ids,
            keep_last=body.truncate_prompt_tokens,
        )
        for prompt in prompts
    ]
    return begin_choices(service, calls, body.num_choices, caller_of(request))


async def _sent(
    service: Service,
    request: Request,
    body: Sampling,
    answers: Sequence[Answer],
    whole: Callable[[Sequence[Sequence[RequestOutput]]], dict[str, Any]],
    events: Callable[[tuple[int, RequestOutput], Outputs], AsyncIterator[bytes]],
) -> Response:
    """Run the answers, and write them streamed or whole."""
    n = body.num_choices
    if not body.stream:
        return JSONResponse(whole(await unless_gone(request, whole_answers(service, answers, n))))
    outputs = outputs_of(service, answers, n)
    # An error before the first token still sets the HTTP status.
    first = await unless_gone(request, anext(outputs))
    return EventStream(events(first, outputs), outputs)


async def _events(reply: CompletionReply, first: tuple[int, RequestOutput], outputs: Outputs) -> AsyncIterator[bytes]:
    """The answers as events. `[DONE]` ends complete answers; an error event ends failed ones."""
    try:
        opening = [*reply.first_chunks(), *reply.chunks(*first)]
        yield b"".join(map(sse_event, opening))
        async for index, output in outputs:
            yield b"".join(map(sse_event, reply.chunks(index, output)))
    except Exception as error:
        yield sse_event(error_object(report(error)))
        return
    if reply.usage_options.include_usage:
        yield sse_event(reply.usage_chunk())
    yield DONE_EVENT


class EventStream(StreamingResponse):
    """Events over the outputs of an engine. However the response ends, the outputs are closed: that aborts a request
    whose client disconnected, even before the first event."""

    def __init__(self, events: AsyncIterator[bytes], outputs: Outputs) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._outputs.aclose()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _checked(schema: type[AnyBody], body: Any) -> AnyBody:
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        failure = invalid_body(error.errors(include_url=False, include_input=False), schema.refused_names())
        refusal = HttpError(400, failure.message)
        refusal.failure = failure
        raise refusal from None


def _model_object(service: Service, caller: Caller, created: int) -> dict[str, Any]:
    about = service.engine.describe()
    return {
        "id": service.model,
        "object": "model",
        "created": created,
        "owned_by": "tide",
        "max_model_len": service.engine.max_model_len,
        "tide": {
            "num_layers": about.num_layers,
            "checkpoint_layers": list(about.checkpoint_layers),
            "modes": service.modes_for(caller),
            "artefact": about.artefact,
        },
    }


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Responses to errors of the web framework: unknown paths, wrong methods."""
    assert isinstance(error, HTTPException)
    response = response_to(HttpError(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response

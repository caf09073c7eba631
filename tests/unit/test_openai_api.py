"""The HTTP API without a server: ASGI messages in, ASGI messages out, a fake engine behind."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.http_api import build_api
from deploy.openai_api import CompletionRequest, CompletionShape, error_reply, sse_event
from tide_core.errors import ConfigError, EngineBusyError, EngineDeadError, EngineError, RequestError
from tide_core.request import FinishReason, RequestOutput, SamplingParams, TokenOutput, Usage

USAGE = Usage(prompt_tokens=5, output_tokens=2, cached_tokens=4)
HEL = RequestOutput("r", (TokenOutput(1, "Hel", 30),))
LO = RequestOutput("r", (TokenOutput(2, "lo", 12),), FinishReason.STOP, USAGE)
FOREVER = "forever"


class FakeEngine:
    """Streams what `script` holds: outputs, errors to raise, or a wait that only a cancel ends."""

    def __init__(self, *script: Any) -> None:
        self._script = script or (HEL, LO)
        self.dead = False
        self.asked: list[tuple[str, SamplingParams]] = []
        self.num_open = 0

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(dead=self.dead)

    async def stream(
        self, prompt: str, params: SamplingParams, *, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append((prompt, params))
        self.num_open += 1
        try:
            for item in self._script:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                if item is FOREVER:
                    await asyncio.sleep(60)
                yield item
        finally:
            self.num_open -= 1


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        assert self.body.endswith(b"\n\n")
        lines = self.body.decode().removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


async def call(
    engine: FakeEngine,
    body: Any = None,
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    content_type: str = "application/json",
    leave: asyncio.Event | None = None,
    broken: bool = False,
) -> Answer:
    """One HTTP request straight into the application. The client stays until `leave` is set; nothing can be sent to
    a `broken` one."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": raw, "more_body": False}]
    answer = Answer()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if broken:
            raise OSError("connection lost")
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", content_type.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    await build_api(engine, "tiny")(scope, receive, send)  # type: ignore[arg-type]
    return answer


async def test_a_completion_has_openais_shape() -> None:
    engine = FakeEngine()
    answer = await call(engine, {"model": "tiny", "prompt": "Say", "max_tokens": 2})
    assert answer.status == 200
    whole = answer.json
    assert whole.pop("id").startswith("cmpl-")
    assert whole.pop("created") > 0
    assert whole == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert engine.num_open == 0


async def test_a_stream_joins_to_the_completion_and_ends_in_usage_and_done() -> None:
    answer = await call(FakeEngine(), {"prompt": "Say", "stream": True})
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = answer.events
    assert done == "data: [DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
    assert ["usage" in chunk for chunk in chunks] == [False, True]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_exit_layers_come_only_if_asked_for() -> None:
    asked = {"prompt": "Say", "tide": {"exit_layers": True}}
    assert (await call(FakeEngine(), asked)).json["tide"] == {"exit_layers": [30, 12]}
    chunks = (await call(FakeEngine(), {**asked, "stream": True})).events[:-1]
    assert [chunk["tide"]["exit_layers"] for chunk in chunks] == [[30], [12]]
    assert "tide" not in (await call(FakeEngine(), {"prompt": "Say", "tide": {}})).json


async def test_parameters_reach_the_engine_and_defaults_are_openais() -> None:
    engine = FakeEngine()
    body = {"prompt": "Say", "max_tokens": 3, "temperature": 0, "top_p": 0.5, "seed": 7, "stop": ["a", "b"]}
    await call(engine, body)
    await call(engine, {"prompt": "Say", "stop": "end", "max_tokens": None, "temperature": None, "seed": None})
    assert engine.asked == [
        ("Say", SamplingParams(max_tokens=3, temperature=0.0, top_p=0.5, seed=7, stop=("a", "b"))),
        ("Say", SamplingParams(max_tokens=16, temperature=1.0, stop=("end",))),
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 7.0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "7"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "temperature": float("inf")}, "temperature"),
        ({"prompt": "x", "temperature": -0.1}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "top_p": 1.0001}, "top_p"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "stop": [1]}, "stop.0"),
        ({"prompt": "x", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "x", "stop": ""}, "stop"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "max_token": 3}, "max_token"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "tide": {"exit_layer": True}}, "tide.exit_layer"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
    ],
    ids=str,
)
async def test_a_bad_value_is_400_and_names_its_field(body: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    answer = await call(engine, body)
    assert answer.status == 400
    error = answer.json["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert engine.asked == []


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b'"x"', b"[" * 50_000, b'{"seed": ' + b"9" * 5000 + b"}"])
async def test_a_body_that_is_no_object_is_400_with_the_envelope(raw: bytes) -> None:
    answer = await call(FakeEngine(), raw)
    assert answer.status == 400
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}


async def test_an_error_repeats_no_input() -> None:
    answer = await call(FakeEngine(), {"prompt": {"secret": "words"}})
    assert answer.status == 400
    assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("path", "method", "content_type", "status"),
    [
        ("/v1/completions", "POST", "text/plain", 415),
        ("/v1/completions", "GET", "application/json", 405),
        ("/nope", "POST", "application/json", 404),
    ],
)
async def test_what_the_framework_refuses_has_the_envelope_too(
    path: str, method: str, content_type: str, status: int
) -> None:
    answer = await call(FakeEngine(), {"prompt": "x"}, path=path, method=method, content_type=content_type)
    assert answer.status == status
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}


async def test_an_unknown_model_is_404() -> None:
    answer = await call(FakeEngine(), {"prompt": "x", "model": "../../etc"})
    assert answer.status == 404
    assert answer.json["error"]["code"] == "model_not_found"


ERRORS = [
    (RequestError("prompt", "9 tokens", "fewer than 8"), 400),
    (EngineBusyError("secret count"), 429),
    (EngineDeadError("secret cause"), 503),
    (EngineError("secret cause"), 500),
    (ConfigError("secret", 1, "x"), 500),
    (ZeroDivisionError("secret cause"), 500),
]


@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_errors_before_the_first_token_become_a_status_without_internals(
    error: Exception, status: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)  # Serve's logger does not propagate once Serve has set it up
    try:
        answer = await call(FakeEngine(error), {"prompt": "x", "stream": stream})
    finally:
        logger.removeHandler(caplog.handler)
    assert answer.status == status
    assert b"secret" not in answer.body
    assert b"Traceback" not in answer.body
    assert ("retry-after" in answer.headers) == (status == 429)
    if status >= 500:
        error_id = next(record.args[0] for record in caplog.records if record.args)  # type: ignore[index]
        assert str(error_id) in answer.json["error"]["message"]
        assert "secret" in caplog.text


@pytest.mark.parametrize(
    "failure",
    [
        ZeroDivisionError("secret"),
        RequestOutput("r", (), FinishReason.ERROR, None, EngineError("secret")),
        RequestOutput("r", (), FinishReason.ERROR),
        RequestOutput("r", (), FinishReason.ABORT),
    ],
    ids=str,
)
async def test_an_error_in_the_middle_of_a_stream_is_an_event_and_no_done(failure: Any) -> None:
    answer = await call(FakeEngine(HEL, failure), {"prompt": "x", "stream": True})
    assert answer.status == 200
    first, last = answer.events
    assert first["choices"][0]["text"] == "Hel"
    assert last["error"]["type"] == "server_error"
    assert b"secret" not in answer.body
    assert b"[DONE]" not in answer.body


@pytest.mark.parametrize("script", [(HEL, FOREVER), (FOREVER,)], ids=["midway", "before the first token"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_ends_its_request(script: Sequence[Any], stream: bool) -> None:
    engine, leave = FakeEngine(*script), asyncio.Event()
    request = asyncio.create_task(call(engine, {"prompt": "x", "stream": stream}, leave=leave))
    while not engine.num_open:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    leave.set()
    answer = await asyncio.wait_for(request, timeout=5)
    assert engine.num_open == 0
    assert answer.status == (200 if stream and len(script) == 2 else 499)


async def test_a_connection_lost_before_the_first_event_ends_its_request() -> None:
    engine, kept = FakeEngine(HEL, FOREVER), []
    stream = engine.stream
    engine.stream = lambda *args, **kwargs: kept.append(stream(*args, **kwargs)) or kept[0]  # type: ignore[method-assign]
    with pytest.raises(OSError, match="connection lost"):
        await call(engine, {"prompt": "x", "stream": True}, broken=True)
    assert engine.num_open == 0, "only the garbage collector would have closed it"


async def test_a_cancelled_handler_ends_its_request() -> None:
    engine = FakeEngine(HEL, FOREVER)
    request = asyncio.create_task(call(engine, {"prompt": "x"}))
    while not engine.num_open:
        await asyncio.sleep(0)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert engine.num_open == 0


async def test_health_is_503_when_the_engine_is_dead() -> None:
    engine = FakeEngine()
    assert (await call(engine, path="/health", method="GET")).json == {"status": "ok"}
    engine.dead = True
    assert (await call(engine, path="/health", method="GET")).status == 503


async def test_models_lists_the_one_model() -> None:
    models = (await call(FakeEngine(), path="/v1/models", method="GET")).json
    assert [model["id"] for model in models["data"]] == ["tiny"]


def test_an_event_is_one_line_whatever_the_text_holds() -> None:
    text = "a\nb\r\n\u2028\x00é"
    shape = CompletionShape("cmpl-1", "tiny", with_exit_layers=False)
    event = sse_event(shape.chunk(RequestOutput("r", (TokenOutput(1, text, 3),))))
    assert event.startswith(b"data: ")
    assert len(event.splitlines()) == 2
    assert json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] == text


def test_errors_are_told_apart_by_type_and_not_by_text() -> None:
    assert error_reply(ValueError("the queue is full; RequestError"), "id").status == 500


def test_a_request_cannot_be_changed_after_it_was_checked() -> None:
    request = CompletionRequest(prompt="x")
    with pytest.raises(ValueError, match="frozen"):
        request.max_tokens = 3  # type: ignore[misc]

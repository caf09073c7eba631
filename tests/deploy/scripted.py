"""A service over an engine with scripted outputs, and one HTTP request to it without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from deploy.http_api.api import build_api
from deploy.service import Service
from tide_core.request import FinishReason, RequestOutput, SamplingParams, TokenOutput, Usage

USAGE = Usage(prompt_tokens=5, output_tokens=2, cached_tokens=4, layers_run=42, deep_passes=1, exits={12: 1, 30: 1})
HEL = RequestOutput("r", (TokenOutput(1, "Hel", 30),))
LO = RequestOutput("r", (TokenOutput(2, "lo", 12),), FinishReason.STOP, USAGE)
FOREVER = "forever"


class ScriptedEngine:
    """Streams what `script` holds: outputs, errors to raise, or a wait that only a cancel ends."""

    max_model_len = 64
    artefact_digest = None
    config = SimpleNamespace(artefact="none", max_rows=4)
    tokenizer = SimpleNamespace(
        chat_template=None,
        decode=lambda ids: "".join(f"<{one}>" for one in ids),
        token_bytes=lambda one: f"<{one}>".encode(),
        stream=lambda ids: None,
        added_id=lambda text: 7 if text == "[TOOL_CALLS]" else None,
        is_special=lambda token_id: True,
        max_token_chars=16,
    )

    def __init__(self, *script: Any) -> None:
        self._script = script or (HEL, LO)
        self.dead = False
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.num_open = 0
        self.waits_forever = asyncio.Event()

    @property
    def default_mode(self) -> str:
        return "full" if self.artefact_digest is None else "verified"

    def max_answer_tokens(self, num_prompt: int) -> int:
        return self.max_model_len - num_prompt

    def stats(self) -> Any:
        return SimpleNamespace(dead=self.dead, last_step_age_s=0.0)

    def abort(self, request_id: str) -> bool:
        return False

    def reserve(self, wanted: int) -> int:
        return wanted

    def release(self, num_places: int) -> None:
        pass

    async def stream(
        self, prompt: Any, params: SamplingParams, *, request_id: str, cache_salt: str, reserved: bool
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append((prompt, params))
        self.num_open += 1
        try:
            for item in self._script:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                if item is FOREVER:
                    self.waits_forever.set()
                    await asyncio.sleep(60)
                yield item
        finally:
            self.num_open -= 1


@dataclass
class Reply:
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
    engine: ScriptedEngine,
    body: Any = None,
    *,
    path: str = "/v1/completions",
    method: str = "POST",
    leave: asyncio.Event | None = None,
    broken: bool = False,
    observer: Any = None,
    **settings: Any,
) -> Reply:
    """One request straight into the application. The client stays until `leave` is set; nothing can be sent to a
    `broken` one."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": raw, "more_body": False}]
    reply = Reply()

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if broken:
            raise OSError("connection lost")
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

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
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    service = Service(engine, model="tiny", observer=observer)  # type: ignore[arg-type]
    await build_api(service, playground=False, **settings)(scope, receive, send)  # type: ignore[arg-type]
    return reply

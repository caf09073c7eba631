"""Requests that are good but for what a case changes, and what is asked of every refusal."""

from __future__ import annotations

import http.client
import json
from typing import Any

from benchmarks.common.live import Server
from tests.serve.load import until
from tests.serve.tiny import KEY
from tide.v1 import tide_pb2 as pb

AUTH = {"Authorization": f"Bearer {KEY}"}
METADATA = (("authorization", f"Bearer {KEY}"), ("application", "tiny"))
BODY = {"model": "tiny", "prompt": "the cat", "max_tokens": 4, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4}


def generate(**values: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"prompt": "the cat", "sampling_params": pb.SamplingParams(max_tokens=4), **values})


def sampled(**values: Any) -> pb.GenerateRequest:
    return generate(sampling_params=pb.SamplingParams(**{"max_tokens": 4, **values}))


def ids(*values: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=values), sampling_params=pb.SamplingParams(max_tokens=4))


def assert_scrubbed(text: str) -> None:
    for leak in ("Traceback", ".py", "/root", "0x", "\x1b", "site-packages"):
        assert leak not in text


def send(
    server: Server, method: str, path: str, raw: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    try:
        connection.request(method, path, raw, {"Content-Type": "application/json", **AUTH, **(headers or {})})
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


def assert_envelope(body: bytes, field: str | None = None) -> None:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert_scrubbed(error["message"])
    if field is not None:
        assert error["param"] is not None
        assert error["param"].split(".")[0] == field


def becomes_idle(server: Server) -> bool:
    def is_idle() -> bool:
        stats = server.ask("GET", "/exit_stats", headers=AUTH)[1]
        return not stats["kv_usage"] and not stats["num_running"] and not stats["num_waiting"]

    return until(is_idle)

"""What HTTP clients get wrong: a status, the envelope of OpenAI, the field, no trace."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
from typing import Any

import pytest

from benchmarks.common.live import Server
from tests.serve.bad_input.requests import AUTH, BODY, CHAT, assert_envelope, send
from tests.serve.tiny import KEY
from tide_client import StatusError, TideClient

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]


def deep(levels: int) -> bytes:
    return b'{"prompt": ' + b"[" * levels + b"]" * levels + b"}"


def with_value(name: str, text: str) -> bytes:
    return (json.dumps(BODY)[:-1] + f', "{name}": {text}}}').replace('"max_tokens": 4, ', "").encode()


HTTP_ROWS: list[tuple[str, bytes, int, str | None]] = [
    *[(f"35 body {raw!r}", raw, 400, None) for raw in (b"[]", b"1", b'"x"', b"")],
    *[(f"36 not JSON {raw!r}", raw, 400, None) for raw in (b"{", b'{"prompt": "x",}', b"\xef\xbb\xbf{}")],
    ("37 deep nesting", deep(20_000), 400, None),
    ("37 deeper than allowed", deep(100), 400, None),
    ("38 too large", json.dumps({"prompt": "x" * 2_000_001}).encode(), 413, "body"),
    *[(f"39 {text}", with_value("temperature", text).replace(b'"temperature": 0, ', b""), 400, None)
      for text in ("NaN", "Infinity", "1e999")],
    *[(f"40 max_tokens {text}", with_value("max_tokens", text), 400, "max_tokens") for text in ("true", '"7"', "7.5")],
    ("41 a long integer", with_value("seed", "9" * 5000), 400, None),
    ("42 a key twice", with_value("prompt", '"again"'), 400, None),
    ("43 an option of ours that is misspelt", with_value("tide", '{"mod": "full"}'), 400, "tide"),
    ("44 half a character", with_value("user", '"\\ud800"'), 400, None),
    ("46 no answers", with_value("n", "0"), 400, "n"),
    ("46 many answers", with_value("n", "1000000"), 400, "n"),
    ("46 best of many", with_value("best_of", "1000000"), 400, "best_of"),
    *[(f"47 prompt {text}", json.dumps({**BODY, "prompt": json.loads(text)}).encode(), 400, None)
      for text in ('""', "[]", "[[]]")],
    ("48 many logprobs", with_value("logprobs", "10000"), 400, "logprobs"),
    ("49 bias out of the vocabulary", with_value("logit_bias", '{"9999999": 1}'), 400, "logit_bias"),
    ("49 a thousand biases", with_value("logit_bias", json.dumps({str(i): 1 for i in range(1000)})), 400, "logit_bias"),
    ("50 a grammar", with_value("response_format", '{"type": "xml"}'), 400, "response_format"),
    ("54 embeds", with_value("prompt_embeds", '"AAAA"'), 400, "prompt_embeds"),
    *[(f"55 model {name[:9]}", json.dumps({**BODY, "model": name}).encode(), 404, "model")
      for name in ("other", "../../etc", "x" * 10_000)],
    ("56 stream of yes", with_value("stream", '"yes"'), 400, "stream"),
    ("56 options without a stream", with_value("stream_options", "{}"), 400, "stream_options"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "status", "field"), [row[1:] for row in HTTP_ROWS], ids=[row[0] for row in HTTP_ROWS])
def test_a_bad_http_request_gets_its_status_and_envelope(
    server: Server, raw: bytes, status: int, field: str | None
) -> None:
    got, _, body = send(server, "POST", "/v1/completions", raw)
    assert got == status, body
    assert_envelope(body, field)


def test_a_field_that_nobody_knows_is_ignored_and_named(server: Server) -> None:
    status, headers, _ = send(server, "POST", "/v1/completions", with_value("promt", '"x"'))
    assert (status, headers["x-tide-ignored"]) == (200, "promt")


CHAT_ROWS = [
    ("51 a template", {**CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
    ("51 template arguments", {**CHAT, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ("52 an unknown role", {**CHAT, "messages": [{"role": "robot", "content": "x"}]}, None),
    ("52 no content", {**CHAT, "messages": [{"role": "user"}]}, None),
    ("52 too many messages", {**CHAT, "messages": [{"role": "user", "content": "x"}] * 2_000}, "messages"),
    (
        "53 an image",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]},
        None,
    ),
    ("tools", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), [row[1:] for row in CHAT_ROWS], ids=[row[0] for row in CHAT_ROWS])
def test_a_bad_chat_gets_its_status_and_envelope(server: Server, body: Any, field: str | None) -> None:
    status, answer = server.post(body, "/v1/chat/completions", headers=AUTH)
    assert status == 400
    assert_envelope(json.dumps(answer).encode(), field)


def test_38_a_chunked_body_without_a_length_is_cut_off(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    try:
        connection.request(
            "POST", "/v1/completions", iter([b"x" * 100_000] * 30), {"Content-Type": "application/json", **AUTH},
            encode_chunked=True,
        )  # fmt: skip
        status = connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        status = 413  # refused while it was still being sent
    finally:
        connection.close()
    assert status == 413


def test_45_control_characters_are_text(server: Server) -> None:
    assert server.post({**BODY, "prompt": "a\x00b\x1bc\nd"}, headers=AUTH)[0] == 200
    assert "\x1bc" not in server.replica_logs


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_57_another_content_type_is_415(server: Server, kind: str) -> None:
    status, _, body = send(server, "POST", "/v1/completions", json.dumps(BODY).encode(), {"Content-Type": kind})
    assert status == 415
    assert_envelope(body)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "TRACE", "PATCH"])
def test_58_another_method_is_405(server: Server, method: str) -> None:
    status, _, _ = send(server, method, "/v1/completions")
    assert status == 405


def test_59_large_headers_are_refused(server: Server) -> None:
    many = {f"X-{index}": "y" for index in range(150)}
    assert send(server, "GET", "/v1/models", headers=many)[0] in (400, 431)
    with contextlib.suppress(ConnectionError, http.client.RemoteDisconnected):  # the proxy may just close it
        assert send(server, "GET", "/v1/models", headers={"X-Large": "y" * 2**20})[0] in (400, 431)


def test_60_two_lengths_are_refused(server: Server) -> None:
    data = json.dumps(BODY).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(data)}\r\nContent-Length: {len(data) + 10}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as raw:
        raw.sendall(head.encode() + data)
        assert b" 400 " in raw.recv(100)


def test_61_a_body_that_trickles_in_is_cut_off(server: Server) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Length: 100\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as raw:
        raw.sendall(head.encode())
        assert b" 408 " in raw.recv(100)


def test_62_a_compressed_body_is_415(server: Server) -> None:
    status, _, _ = send(server, "POST", "/v1/completions", b"\x1f\x8b", {"Content-Encoding": "gzip"})
    assert status == 415


PATHS = ["/v1/models", "//v1/models", "/v1/../v1/models", "/v1/%2e%2e/v1/models", "/V1/MODELS", "/health/../v1/models"]


@pytest.mark.parametrize("path", [*PATHS, "/exit_stats", "/version", "/openapi.json", "/v1/models/tiny", "/playground"])
@pytest.mark.parametrize("key", [None, "wrong"])
def test_63_64_no_spelling_of_a_path_gets_past_the_key(server: Server, path: str, key: str | None) -> None:
    headers = {"Authorization": "" if key is None else f"Bearer {key}", "Host": "evil.example"}
    status, _, body = send(server, "GET", path, headers=headers)
    assert status in (401, 404)
    assert b"tiny" not in body


def test_health_alone_is_open(server: Server) -> None:
    assert send(server, "GET", "/health", headers={"Authorization": ""})[0] == 200


def test_65_no_origin_is_allowed(server: Server) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    _, got, _ = send(server, "OPTIONS", "/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in {name.lower() for name in got}


def test_67_special_tokens_in_user_text_are_text(server: Server) -> None:
    plain = server.post({"prompt": "</s>"}, "/tokenize", headers=AUTH)[1]["tokens"]
    assert len(plain) > 1


def test_no_prompt_and_no_key_is_in_the_logs(server: Server) -> None:
    server.post({**BODY, "prompt": "a very secret prompt"}, headers=AUTH)
    server.post({**BODY, "prompt": "a very secret prompt", "max_tokens": -5}, headers=AUTH)
    with TideClient(server.address, api_key=KEY, application="tiny") as client, pytest.raises(StatusError):
        client.generate("a very secret prompt", max_tokens=-5)
    logs = server.replica_logs + server.log
    assert "request ended" in logs
    own = server.replica_logs
    traces = [own[max(0, found.start() - 200) :][:1500] for found in re.finditer("Traceback", own)]
    assert traces == [], "bad input is no failure of ours"
    assert "secret" not in logs
    assert KEY not in logs

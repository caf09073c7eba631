"""What clients get wrong, against a live app: a status, the field, no trace, and the next request is fine."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from benchmarks.live import Server, serving
from tests.serve.tiny import KEY, NARROW_KEY, tiny_config
from tide.v1 import tide_pb2 as pb
from tide.v1 import tide_pb2_grpc
from tide_client import StatusError, TideClient

pytestmark = pytest.mark.serve

AUTH = {"Authorization": f"Bearer {KEY}"}
METADATA = (("authorization", f"Bearer {KEY}"), ("application", "tiny"))
BODY = {"model": "tiny", "prompt": "the cat", "max_tokens": 4, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4}
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tiny_config(tmp_path_factory.mktemp("tiny")), health="/full/health") as server:
        deadline = time.monotonic() + 60
        while not server.is_healthy():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield server


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[tide_pb2_grpc.TideServiceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield tide_pb2_grpc.TideServiceStub(channel)


@pytest.fixture(autouse=True)
def _the_next_request_is_fine(server: Server) -> Iterator[None]:
    yield
    assert server.post(BODY, headers=AUTH)[0] == 200
    stats = server.ask("GET", "/exit_stats", headers=AUTH)[1]
    assert stats["kv_usage"] == 0


def generate(**values: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**{"prompt": "the cat", "sampling_params": pb.SamplingParams(max_tokens=4), **values})


def sampled(**values: Any) -> pb.GenerateRequest:
    return generate(sampling_params=pb.SamplingParams(**{"max_tokens": 4, **values}))


def ids(*values: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=values), sampling_params=pb.SamplingParams(max_tokens=4))


INVALID = "INVALID_ARGUMENT"
GRPC_ROWS: list[tuple[int, str, pb.GenerateRequest, str, str]] = [
    (1, "empty message", pb.GenerateRequest(), INVALID, "prompt"),
    (2, "prompt and ids", generate(prompt_ids=pb.TokenIds(ids=[1])), INVALID, "prompt"),
    (3, "neither", pb.GenerateRequest(sampling_params=pb.SamplingParams(max_tokens=4)), INVALID, "prompt"),
    (4, "id of the vocabulary's size", ids(1, 10**6), INVALID, "prompt[1]"),
    (4, "negative id", ids(-1), INVALID, "prompt[0]"),
    (4, "largest id", ids(2**31 - 1), INVALID, "prompt[0]"),
    (5, "no ids", ids(), INVALID, "prompt_ids"),
    (6, "prompt too long", ids(*[3] * 300), INVALID, "prompt"),
    (8, "no tokens", sampled(max_tokens=0), INVALID, "max_tokens"),
    (8, "negative tokens", sampled(max_tokens=-1), INVALID, "max_tokens"),
    (9, "too many tokens", sampled(max_tokens=2**31 - 1), INVALID, "max_tokens"),
    *[
        (10, f"temperature {bad}", sampled(temperature=bad), INVALID, "temperature")
        for bad in (NAN, INFINITE, -0.1, 1e30)
    ],
    *[(11, f"top_p {bad}", sampled(top_p=bad), INVALID, "top_p") for bad in (0.0, 1.0001, NAN)],
    (12, "top_k", sampled(top_k=-2), INVALID, "top_k"),
    *[
        (13, f"threshold {bad}", generate(exits=pb.ExitParams(threshold=bad)), INVALID, "threshold")
        for bad in (NAN, -1, 1e9)
    ],
    (14, "min_layers", generate(exits=pb.ExitParams(min_layers=99)), INVALID, "min_layers"),
    (14, "negative min_layers", generate(exits=pb.ExitParams(min_layers=-1)), INVALID, "min_layers"),
    (17, "five stops", sampled(stop=list("abcde")), INVALID, "stop"),
    (17, "an empty stop", sampled(stop=[""]), INVALID, "stop"),
    (17, "a long stop", sampled(stop=["x" * 10_000]), INVALID, "stop"),
    (21, "a million ids", ids(*[1] * 1_000_000), INVALID, "prompt"),
    (27, "a name with a line end", generate(request_id="a\r\nb"), INVALID, "request_id"),
    (27, "a long name", generate(request_id="x" * 10_000), INVALID, "request_id"),
    (28, "hardly any time", generate(timeout_s=1e-9), "DEADLINE_EXCEEDED", "longer"),
    (55, "another model", generate(model="../../etc"), "NOT_FOUND", "model"),
]


@pytest.mark.parametrize(
    ("message", "code", "said"), [row[2:] for row in GRPC_ROWS], ids=[f"{row[0]} {row[1]}" for row in GRPC_ROWS]
)
def test_a_bad_grpc_request_gets_its_status(stub: Any, message: pb.GenerateRequest, code: str, said: str) -> None:
    for call in (stub.Generate, lambda *args, **options: list(stub.GenerateStream(*args, **options))):
        with pytest.raises(grpc.RpcError) as caught:
            call(message, metadata=METADATA, timeout=20)
        assert caught.value.code().name == code
        assert said in caught.value.details()
        assert_scrubbed(caught.value.details())


def assert_scrubbed(text: str) -> None:
    for leak in ("Traceback", ".py", "/root", "0x", "\x1b", "site-packages"):
        assert leak not in text


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_16_the_ends_of_the_seeds_are_fine_and_repeat(stub: Any, seed: int) -> None:
    message = sampled(seed=seed, temperature=1.0)
    one, two = (stub.Generate(message, metadata=METADATA, timeout=20).text for _ in range(2))
    assert one == two


def test_12_a_large_top_k_keeps_all(stub: Any) -> None:
    assert stub.Generate(sampled(top_k=2**31 - 1), metadata=METADATA, timeout=20).tokens


def test_7_a_message_beyond_4_mib_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(generate(prompt="x" * (5 * 2**20)), metadata=METADATA, timeout=20)
    assert caught.value.code().name == "RESOURCE_EXHAUSTED"


def test_33_a_compressed_bomb_is_refused(server: Server) -> None:
    with grpc.insecure_channel(server.address, compression=grpc.Compression.Gzip) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            tide_pb2_grpc.TideServiceStub(channel).Generate(
                generate(prompt="\0" * (64 * 2**20)), metadata=METADATA, timeout=60
            )
        assert caught.value.code().name == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    "data", [b"\xff\xfe\x01", b"\x0a\x05\xff\xff\xff\xff\xff", b"\x08"], ids=["random", "utf8", "cut"]
)
def test_18_19_bytes_that_are_no_message_are_an_error_and_no_more(server: Server, data: bytes) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/tide.v1.TideService/Generate", lambda raw: raw, lambda raw: raw)
        with pytest.raises(grpc.RpcError) as caught:
            call(data, metadata=METADATA, timeout=20)
        assert caught.value.code().name in ("INTERNAL", "INVALID_ARGUMENT", "UNKNOWN"), "gRPC's own, before any method"
        assert_scrubbed(caught.value.details())


def test_20_unknown_fields_are_ignored(server: Server) -> None:
    known = generate().SerializeToString()
    unknown = b"\xfa\x7f" + _varint(100_000) + b"x" * 100_000  # field 2047, 100 kB
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/tide.v1.TideService/Generate", lambda raw: raw, pb.GenerateResponse.FromString)
        assert call(known + unknown, metadata=METADATA, timeout=20).tokens


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


@pytest.mark.parametrize("path", ["/tide.v1.TideService/Nothing", "/other.Service/Generate"])
def test_22_an_unknown_method_is_unimplemented(server: Server, path: str) -> None:
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary(path, lambda raw: raw, lambda raw: raw)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", metadata=METADATA, timeout=20)
        assert caught.value.code().name == "UNIMPLEMENTED"


@pytest.mark.parametrize("application", [None, "other"])
def test_24_without_its_application_a_call_is_not_found(server: Server, application: str | None) -> None:
    client = TideClient(server.address, api_key=KEY, application=application, retries=0)
    with client, pytest.raises(StatusError) as caught:
        client.model_info()
    assert caught.value.code in ("NOT_FOUND", "UNAVAILABLE")


@pytest.mark.parametrize("bearer", [None, "Bearer ", "Bearer wrong", "Basic " + KEY, "Bearer " + "x" * 6000])
def test_25_without_its_key_no_method_answers(stub: Any, bearer: str | None) -> None:
    metadata = [("application", "tiny")] + ([] if bearer is None else [("authorization", bearer)])
    calls: list[tuple[Any, Any]] = [
        (stub.Generate, generate()),
        (lambda *args, **options: list(stub.GenerateStream(*args, **options)), generate()),
        (stub.GetModelInfo, pb.GetModelInfoRequest()),
        (stub.GetExitStats, pb.GetExitStatsRequest()),
        (stub.Abort, pb.AbortRequest(request_id="x")),
        (stub.Tokenize, pb.TokenizeRequest(text="x")),
        (stub.Detokenize, pb.DetokenizeRequest(ids=[1])),
    ]
    assert len(calls) == len(pb.DESCRIPTOR.services_by_name["TideService"].methods)
    for call, message in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call(message, metadata=metadata, timeout=20)
        assert caught.value.code().name == "UNAUTHENTICATED"


def test_26_too_much_metadata_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(generate(), metadata=[*METADATA, *((f"k{i}", "v" * 60) for i in range(1000))], timeout=20)
    assert caught.value.code().name in ("RESOURCE_EXHAUSTED", "CANCELLED", "INTERNAL", "UNAVAILABLE", "UNKNOWN")


def test_15_what_a_key_does_not_allow_is_denied(server: Server) -> None:
    with TideClient(server.address, api_key=NARROW_KEY, application="tiny") as client:
        assert client.generate("the cat", max_tokens=2, threshold=0.6).tokens
        assert set(client.model_info().modes) == {"full", "verified"}
        for options in ({"mode": "fast"}, {"mode": "verified", "threshold": 0.4}):
            with pytest.raises(StatusError) as caught:
                client.generate("the cat", max_tokens=2, **options)  # type: ignore[arg-type]
            assert caught.value.code == "PERMISSION_DENIED"


def test_27_two_live_requests_of_one_name_do_not_meet(server: Server) -> None:
    with TideClient(server.address, api_key=KEY, application="tiny") as client:
        first = client.stream("the cat", max_tokens=200, ignore_eos=True, request_id="same")
        tokens = iter(first)
        next(tokens)
        with contextlib.suppress(StatusError):  # refused unless the first has ended already
            client.generate("the dog", max_tokens=4, request_id="same")
        assert len(list(tokens)) + 1 == 200
        assert first.answer.text == client.generate("the cat", max_tokens=200, ignore_eos=True).text


def test_29_a_call_that_is_cancelled_before_its_first_token_leaves_nothing(server: Server, stub: Any) -> None:
    calls = [stub.GenerateStream(sampled(max_tokens=200, ignore_eos=True), metadata=METADATA) for _ in range(20)]
    for call in calls:
        call.cancel()
    for call in calls:
        assert call.code().name == "CANCELLED"
    assert idle_within(server, 5.0)


def test_31_more_streams_than_one_connection_carries_wait_their_turn(server: Server, stub: Any) -> None:
    futures = [stub.Generate.future(generate(), metadata=METADATA, timeout=60) for _ in range(150)]
    assert len({future.result().text for future in futures}) == 1


def test_34_a_client_that_never_reads_holds_no_blocks_once_its_text_is_made(server: Server, stub: Any) -> None:
    calls = [stub.GenerateStream(sampled(max_tokens=200, ignore_eos=True), metadata=METADATA) for _ in range(8)]
    assert idle_within(server, 20.0)
    for call in calls:
        assert sum(len(chunk.tokens) for chunk in call) == 200


def test_68_idle_connections_do_not_keep_others_out(server: Server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.http_port), timeout=20) for _ in range(500)]
    try:
        assert server.is_healthy()
        assert server.post(BODY, headers=AUTH)[0] == 200
    finally:
        for each in idle:
            each.close()


def idle_within(server: Server, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stats = server.ask("GET", "/exit_stats", headers=AUTH)[1]
        if not stats["kv_usage"] and not stats["num_running"] and not stats["num_waiting"]:
            return True
        time.sleep(0.05)
    return False


def test_two_models_in_one_cluster_each_answer_for_themselves(server: Server) -> None:
    with TideClient(server.address, application="full") as client:
        assert client.model_info().model == "full"
        assert client.model_info().modes == ("full",)
    assert server.ask("GET", "/full/v1/models")[1]["data"][0]["id"] == "full"
    assert server.ask("GET", "/v1/models", headers=AUTH)[1]["data"][0]["id"] == "tiny"


def test_a_full_queue_says_when_to_come_again(server: Server) -> None:
    def one(_: int) -> tuple[int, Any]:
        return server.post({"prompt": "the cat", "max_tokens": 200, "ignore_eos": True}, "/full/v1/completions")

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(one, range(24)))
    statuses = [status for status, _ in answers]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 3
    assert statuses.count(429) >= 1
    refused = next(body for status, body in answers if status == 429)
    assert refused["error"]["code"] == "engine_busy"


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
    ("43 an unknown field", with_value("promt", '"x"'), 400, "promt"),
    ("44 half a character", with_value("user", '"\\ud800"'), 400, None),
    ("46 no answers", with_value("n", "0"), 400, "n"),
    ("46 many answers", with_value("n", "1000000"), 400, "n"),
    ("46 best of many", with_value("best_of", "1000000"), 400, "best_of"),
    *[(f"47 prompt {text}", json.dumps({**BODY, "prompt": json.loads(text)}).encode(), 400, None)
      for text in ('""', "[]", "[[]]")],
    ("48 many logprobs", with_value("logprobs", "10000"), 400, "logprobs"),
    ("49 bias out of the vocabulary", with_value("logit_bias", '{"9999999": 1}'), 400, "logit_bias"),
    ("49 a thousand biases", with_value("logit_bias", json.dumps({str(i): 1 for i in range(1000)})), 400, "logit_bias"),
    ("50 a grammar", with_value("response_format", '{"type": "json_object"}'), 400, "response_format"),
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


CHAT_ROWS = [
    ("51 a template", {**CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
    ("51 template arguments", {**CHAT, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ("52 an unknown role", {**CHAT, "messages": [{"role": "robot", "content": "x"}]}, None),
    ("52 no content", {**CHAT, "messages": [{"role": "user"}]}, None),
    ("52 too many messages", {**CHAT, "messages": [{"role": "user", "content": "x"}] * 10_000}, "messages"),
    (
        "53 an image",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]},
        None,
    ),
    ("tools", {**CHAT, "tools": []}, "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "field"), [row[1:] for row in CHAT_ROWS], ids=[row[0] for row in CHAT_ROWS])
def test_a_bad_chat_gets_its_status_and_envelope(server: Server, body: Any, field: str | None) -> None:
    status, answer = server.post(body, "/v1/chat/completions", headers=AUTH)
    assert status == 400
    assert_envelope(json.dumps(answer).encode(), field)


def send(
    server: Server, method: str, path: str, raw: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
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


def test_38_a_chunked_body_without_a_length_is_cut_off(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
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
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=20) as raw:
        raw.sendall(head.encode() + data)
        assert b" 400 " in raw.recv(100)


def test_61_a_body_that_trickles_in_is_cut_off(server: Server) -> None:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Length: 100\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=20) as raw:
        raw.sendall(head.encode())
        started = time.monotonic()
        assert b" 408 " in raw.recv(100)
        assert time.monotonic() - started < 10


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

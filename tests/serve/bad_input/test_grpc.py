"""What gRPC clients get wrong: a status, the field, no trace."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import pytest

from benchmarks.common.live import Server
from tests.serve.bad_input.requests import AUTH, METADATA, assert_scrubbed, becomes_idle, generate, ids, sampled
from tests.serve.load import until
from tests.serve.tiny import KEY, NARROW_KEY
from tide.v1 import tide_pb2 as pb
from tide.v1 import tide_pb2_grpc
from tide_client import StatusError, TideClient

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1800)]

NAN, INFINITE = float("nan"), float("inf")

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
    (17, "17 stops", sampled(stop=["a"] * 17), INVALID, "stop"),
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
            call(message, metadata=METADATA, timeout=60)
        assert caught.value.code().name == code
        assert said in caught.value.details()
        assert_scrubbed(caught.value.details())


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_16_the_ends_of_the_seeds_are_fine_and_repeat(stub: Any, seed: int) -> None:
    message = sampled(seed=seed, temperature=1.0)
    one, two = (stub.Generate(message, metadata=METADATA, timeout=60).text for _ in range(2))
    assert one == two


def test_12_a_large_top_k_keeps_all(stub: Any) -> None:
    assert stub.Generate(sampled(top_k=2**31 - 1), metadata=METADATA, timeout=60).tokens


def test_7_a_message_beyond_4_mib_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(generate(prompt="x" * (5 * 2**20)), metadata=METADATA, timeout=60)
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
            call(data, metadata=METADATA, timeout=60)
        assert caught.value.code().name in ("INTERNAL", "INVALID_ARGUMENT", "UNKNOWN"), "gRPC's own, before any method"
        assert_scrubbed(caught.value.details())


def test_20_unknown_fields_are_ignored(server: Server) -> None:
    known = generate().SerializeToString()
    unknown = b"\xfa\x7f" + _varint(100_000) + b"x" * 100_000  # field 2047, 100 kB
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/tide.v1.TideService/Generate", lambda raw: raw, pb.GenerateResponse.FromString)
        assert call(known + unknown, metadata=METADATA, timeout=60).tokens


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
            call(b"", metadata=METADATA, timeout=60)
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
            call(message, metadata=metadata, timeout=60)
        assert caught.value.code().name == "UNAUTHENTICATED"


def test_26_too_much_metadata_is_refused(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(generate(), metadata=[*METADATA, *((f"k{i}", "v" * 60) for i in range(1000))], timeout=60)
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
    assert becomes_idle(server)


def test_34_a_client_that_never_reads_holds_no_blocks_once_its_text_is_made(server: Server, stub: Any) -> None:
    def tokens() -> int:
        return int(server.ask("GET", "/exit_stats", headers=AUTH)[1]["total_tokens"])

    before = tokens()
    calls = [stub.GenerateStream(sampled(max_tokens=200, ignore_eos=True), metadata=METADATA) for _ in range(8)]
    assert until(lambda: tokens() >= before + 8 * 200)
    assert becomes_idle(server)
    for call in calls:
        assert sum(len(chunk.tokens) for chunk in call) == 200

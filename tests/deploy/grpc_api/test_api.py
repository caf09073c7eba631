"""The gRPC API without a server: chunks in order, one final message, a status for every failure."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from deploy.config.args import Limits
from deploy.config.policy import LivePolicy
from deploy.failures import StatusSetError
from deploy.keys import Caller, KeyRing
from deploy.service import Service
from tests.deploy.in_process import Context, Grpc, all_of, make_service
from tests.engine.runners import HANG_S
from tide.v1 import tide_pb2 as pb
from tide_client.results import AuditReport, exit_stats_of
from tide_core.errors import EngineBusyError
from tide_core.stats import AuditSnapshot, EngineStats


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = make_service()
    yield service
    service.engine.close()


@pytest.fixture
def api(service: Service) -> Grpc:
    return Grpc(service)


def request(**values: Any) -> pb.GenerateRequest:
    params = pb.SamplingParams(max_tokens=12, ignore_eos=True)
    return pb.GenerateRequest(**{"prompt": "hello there", "sampling_params": params, **values})


async def test_a_stream_is_numbered_without_a_gap_and_its_last_chunk_alone_is_final(api: Grpc) -> None:
    context = Context()
    chunks = await all_of(api.GenerateStream(request(), context))
    assert context.status is grpc.StatusCode.OK
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.HasField("final") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len({chunk.request_id for chunk in chunks}) == 1
    final = chunks[-1].final
    assert final.finish_reason == pb.FINISH_REASON_LENGTH
    assert final.usage.completion_tokens == 12 == sum(len(chunk.tokens) for chunk in chunks)
    assert sum(final.exits.tokens_per_layer.values()) == 12


async def test_the_stream_joins_to_the_whole_answer(api: Grpc) -> None:
    whole = await api.Generate(request(), Context())
    chunks = await all_of(api.GenerateStream(request(), Context()))
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert [token.id for token in tokens] == [token.id for token in whole.tokens]
    assert "".join(token.text for token in tokens) == whole.text
    assert whole.final.artefact_digest == api.service.engine.artefact_digest


async def test_tokens_carry_layer_score_audit_and_mode(api: Grpc) -> None:
    whole = await api.Generate(request(sampling_params=pb.SamplingParams(max_tokens=24, ignore_eos=True)), Context())
    layers = {token.exit_layer for token in whole.tokens}
    num_layers = api.service.engine.describe().num_layers
    assert min(layers) < num_layers
    assert max(layers) <= num_layers
    assert {token.audit for token in whole.tokens} == {pb.AUDIT_VERIFIED}
    assert {token.mode for token in whole.tokens} == {pb.MODE_VERIFIED}
    assert any(token.HasField("score") for token in whole.tokens)


async def test_logprobs_come_when_asked_for(api: Grpc) -> None:
    params = pb.SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True)
    whole = await api.Generate(request(sampling_params=params), Context())
    for token in whole.tokens:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 2


STRUCTURED = [
    ({"choices": ["red", "blue"]}, "red|blue"),
    ({"regex": "[0-9]{3}-x"}, "[0-9]{3}-x"),
    ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    ({"json_schema": '{"enum": ["a", "b"]}'}, '"a"|"b"'),
]


@pytest.mark.parametrize(("asked", "expected"), STRUCTURED, ids=lambda value: next(iter(value)))
async def test_the_text_is_what_the_schema_asks_for(api: Grpc, asked: Any, expected: str) -> None:
    reply = await api.Generate(request(sampling_params=pb.SamplingParams(max_tokens=20, **asked)), Context())
    assert re.fullmatch(expected, reply.text)


@pytest.mark.parametrize("asked", [{"regex": "a("}, {"json_schema": "{"}, {"regex": "a", "choices": ["b"]}])
async def test_a_structure_that_cannot_be_is_refused_by_its_field(api: Grpc, asked: Any) -> None:
    context = Context()
    with pytest.raises(StatusSetError):
        await api.Generate(request(sampling_params=pb.SamplingParams(**asked)), context)
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT
    assert next(iter(asked)) in context.text


async def test_a_chat_and_ids_are_prompts_too(api: Grpc) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hello")])
    ids = (await api.Tokenize(pb.TokenizeRequest(chat=chat), Context())).ids
    params = pb.SamplingParams(max_tokens=4, ignore_eos=True)
    by_chat = await api.Generate(pb.GenerateRequest(chat=chat, sampling_params=params), Context())
    by_ids = await api.Generate(pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=ids), sampling_params=params), Context())
    assert by_chat.text == by_ids.text


async def test_the_model_tells_what_it_can(api: Grpc) -> None:
    info = await api.GetModelInfo(pb.GetModelInfoRequest(), Context())
    assert info.model == "tiny"
    assert list(info.checkpoint_layers) == list(api.service.engine.describe().checkpoint_layers)
    assert pb.MODE_VERIFIED in info.modes
    assert info.default_exits.mode == pb.MODE_VERIFIED
    assert info.max_tokens == api.service.limits.max_tokens


async def test_exit_stats_count_what_ran(api: Grpc) -> None:
    before = await api.GetExitStats(pb.GetExitStatsRequest(), Context())
    await api.Generate(request(), Context())
    after = await api.GetExitStats(pb.GetExitStatsRequest(), Context())
    assert after.total_tokens - before.total_tokens == 12
    assert sum(after.tokens_per_layer.values()) == after.total_tokens


async def test_exit_stats_have_the_audits_of_each_tenant_and_contract(
    api: Grpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    audits = (
        AuditSnapshot("a1b2", 0.05, 40, 0.125, 1e30, 0.025, alarmed=True),
        AuditSnapshot("anyone", None, 7, 0.25, 1.0, 0.05, alarmed=False),
    )
    found = replace(api.service.engine.stats(), audits=audits, num_audits_dropped=3)
    monkeypatch.setattr(api.service.engine, "stats", lambda: found)
    stats = exit_stats_of(await api.GetExitStats(pb.GetExitStatsRequest(), Context()))
    assert stats.audits == (
        AuditReport("fast(0.05)", "a1b2", 0.05, 40, 0.125, 1e30, 0.025, alarmed=True),
        AuditReport("fast", "anyone", None, 7, 0.25, 1.0, 0.05, alarmed=False),
    )
    assert stats.answers_not_judged == 3


async def test_ids_become_text_again(api: Grpc) -> None:
    ids = (await api.Tokenize(pb.TokenizeRequest(text="hello there"), Context())).ids
    assert "hello" in (await api.Detokenize(pb.DetokenizeRequest(ids=ids), Context())).text


REFUSED = [
    (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
    (request(prompt_ids=pb.TokenIds(ids=[1])), "INVALID_ARGUMENT", "prompt"),
    (pb.GenerateRequest(prompt_ids=pb.TokenIds()), "INVALID_ARGUMENT", "prompt_ids"),
    (pb.GenerateRequest(prompt_ids=pb.TokenIds(ids=[-1])), "INVALID_ARGUMENT", "prompt[0]"),
    (request(sampling_params=pb.SamplingParams(max_tokens=0)), "INVALID_ARGUMENT", "max_tokens"),
    (request(sampling_params=pb.SamplingParams(temperature=float("nan"))), "INVALID_ARGUMENT", "temperature"),
    (request(exits=pb.ExitParams(mode=77)), "INVALID_ARGUMENT", "mode"),
    (request(exits=pb.ExitParams(threshold=float("nan"))), "INVALID_ARGUMENT", "threshold"),
    (request(exits=pb.ExitParams(min_layers=1000)), "INVALID_ARGUMENT", "min_layers"),
    (request(model="other"), "NOT_FOUND", "model"),
    (request(timeout_s=-1.0), "INVALID_ARGUMENT", "timeout_s"),
    (request(timeout_s=1e-9), "DEADLINE_EXCEEDED", "longer"),
    (request(request_id="a\nb"), "INVALID_ARGUMENT", "request_id"),
]


@pytest.mark.parametrize(("message", "code", "expected"), REFUSED, ids=[case[2] + case[1] for case in REFUSED])
async def test_a_bad_request_gets_its_status_and_the_name_of_the_field(
    api: Grpc, message: pb.GenerateRequest, code: str, expected: str
) -> None:
    whole, stream = Context(), Context()
    with pytest.raises(StatusSetError):
        await api.Generate(message, whole)
    with pytest.raises(StatusSetError):
        await anext(api.GenerateStream(message, stream))
    assert [whole.status.name, stream.status.name] == [code, code]
    assert expected in whole.text
    assert api.service.num_open == 0


async def test_any_name_of_the_model_is_accepted_and_the_answer_has_the_first() -> None:
    service = make_service(other_names=["gpt-4o"])
    try:
        for name in ("", "tiny", "gpt-4o"):
            answer = await Grpc(service).Generate(request(model=name), Context())
            assert answer.final.model == "tiny"
    finally:
        service.engine.close()


async def test_our_own_faults_give_nothing_away(api: Grpc, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise OSError("/secret/path")

    monkeypatch.setattr(api.service, "begin", broken)
    context = Context()
    with pytest.raises(StatusSetError):
        await api.Generate(request(), context)
    assert context.status is grpc.StatusCode.INTERNAL
    assert "secret" not in context.text
    assert context.text.startswith("internal error ")


async def test_health_is_told_by_name(api: Grpc) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    for name in ("", "tide.v1.TideService"):
        reply = await api.Check(health_pb2.HealthCheckRequest(service=name), Context())
        assert reply.status == serving
    unknown = Context()
    with pytest.raises(StatusSetError):
        await api.Check(health_pb2.HealthCheckRequest(service="other"), unknown)
    assert unknown.status is grpc.StatusCode.NOT_FOUND


async def test_too_much_metadata_is_refused(api: Grpc) -> None:
    context = Context(metadata=[("x", "y" * 70_000)])
    with pytest.raises(StatusSetError):
        await api.Generate(request(), context)
    assert context.status is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("size", "code"), [(1024, "OK"), (1025, "RESOURCE_EXHAUSTED")])
async def test_metadata_is_counted_with_its_names_up_to_the_limit(
    api: Grpc, monkeypatch: pytest.MonkeyPatch, size: int, code: str
) -> None:
    monkeypatch.setattr(api.service, "limits", Limits(metadata_bytes=1024))
    context = Context(metadata=[("x" * 500, "y" * (size - 500))])
    with contextlib.suppress(StatusSetError):
        await api.GetModelInfo(pb.GetModelInfoRequest(), context)
    assert context.status.name == code


async def test_a_busy_engine_says_when_to_come_again(api: Grpc, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*args: Any) -> None:
        raise EngineBusyError("full")

    monkeypatch.setattr(api.service, "begin", busy)
    context = Context(trailing=[("kept", "yes")])
    with pytest.raises(StatusSetError):
        await api.Generate(request(), context)
    assert context.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert context.trailing == [("kept", "yes"), ("retry-after", "1")]


async def test_a_client_that_leaves_a_stream_ends_its_request_at_once(api: Grpc) -> None:
    params = pb.SamplingParams(max_tokens=200, ignore_eos=True)
    stream = api.GenerateStream(request(sampling_params=params), Context())
    await anext(stream)
    assert api.service.num_open == 1
    await stream.aclose()  # type: ignore[attr-defined]
    assert api.service.num_open == 0


async def test_a_caller_is_known_by_its_key_and_aborts_its_own_request_and_no_other(
    api: Grpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = {hashlib.sha256(key.encode()).digest(): Caller(key, key) for key in ("one", "two")}
    monkeypatch.setattr(api.service, "keys", KeyRing(callers))
    one, two = ([("authorization", f"Bearer {key}")] for key in ("one", "two"))
    anonymous = Context()
    with pytest.raises(StatusSetError):
        await api.GetModelInfo(pb.GetModelInfoRequest(), anonymous)
    assert anonymous.status is grpc.StatusCode.UNAUTHENTICATED

    params = pb.SamplingParams(max_tokens=200, ignore_eos=True)
    stream = api.GenerateStream(request(sampling_params=params, request_id="mine"), Context(one))
    await anext(stream)
    assert not (await api.Abort(pb.AbortRequest(request_id="mine"), Context(two))).aborted
    assert (await api.Abort(pb.AbortRequest(request_id="mine"), Context(one))).aborted
    await stream.aclose()  # type: ignore[attr-defined]


async def test_only_modes_that_policy_and_key_allow_are_listed(api: Grpc, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Caller("team-a", "salt", modes=("full", "verified"))
    monkeypatch.setattr(api.service, "keys", KeyRing({hashlib.sha256(b"one").digest(): limited}))
    monkeypatch.setattr(api.service, "policy", LivePolicy.read({"modes": ["full", "fast"]}))
    info = await api.GetModelInfo(pb.GetModelInfoRequest(), Context([("authorization", "Bearer one")]))
    assert list(info.modes) == [pb.MODE_FULL]
    assert info.default_exits.mode == pb.MODE_FULL


@pytest.mark.parametrize("fields", [{}, {"text": "hello", "chat": pb.Chat()}], ids=["nothing", "both"])
async def test_text_to_ids_needs_one_of_text_and_chat(api: Grpc, fields: dict[str, Any]) -> None:
    context = Context()
    with pytest.raises(StatusSetError):
        await api.Tokenize(pb.TokenizeRequest(**fields), context)
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT
    assert "exactly one of text and chat" in context.text


async def test_health_is_sent_again_only_when_it_changes(api: Grpc, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, num_looks, looked_again = api.service.engine, 0, asyncio.Event()
    healthy = engine.stats()
    dead, is_dead = replace(healthy, dead=True), False

    def stats() -> EngineStats:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:  # the second one has sent nothing
            looked_again.set()
        return dead if is_dead else healthy

    monkeypatch.setattr(engine, "stats", stats)
    monkeypatch.setattr("deploy.grpc_api.health.LOOK_EVERY_S", 0)
    watch = api.Watch(health_pb2.HealthCheckRequest(), Context())
    assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
    change = asyncio.ensure_future(anext(watch))
    await asyncio.wait_for(looked_again.wait(), HANG_S)
    assert not change.done()
    is_dead = True
    assert (await asyncio.wait_for(change, HANG_S)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    reply = await api.Check(health_pb2.HealthCheckRequest(), Context())
    assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await watch.aclose()  # type: ignore[attr-defined]

"""Several choices over gRPC: each chunk says its choice, each choice ends once, one id stands for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from deploy.answer import Call
from deploy.choices import begin_choices
from deploy.config.args import Limits
from deploy.failures import StatusSetError
from deploy.keys import Caller
from deploy.service import Service
from tests.deploy.in_process import Context, Grpc, all_of, make_service
from tests.deploy.scripted import FOREVER, HEL, ScriptedEngine
from tests.engine.runners import HANG_S, Gate
from tide.v1 import tide_pb2 as pb
from tide_core.errors import EngineBusyError

LONG = "the quick brown fox jumps over the lazy dog " * 4


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = make_service(max_rows=3, max_queued=8)
    yield service
    service.engine.close()


@pytest.fixture
def api(service: Service) -> Any:
    return Grpc(service)


def request(n: int, **values: Any) -> pb.GenerateRequest:
    """Drawn, so that the choices differ."""
    params = pb.SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.5, seed=5)
    return pb.GenerateRequest(
        **{"prompt": LONG, "sampling_params": params, "n": n, "exits": pb.ExitParams(mode=pb.MODE_FULL), **values}
    )


def ids_of(tokens: Any) -> list[int]:
    return [token.id for token in tokens]


async def test_a_chunk_says_its_choice_and_each_choice_ends_once_with_the_answer_that_it_has_whole(api: Any) -> None:
    whole = await api.Generate(request(4), Context())
    chunks = await all_of(api.GenerateStream(request(4), Context()))
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    assert len({chunk.request_id for chunk in chunks}) == 1
    assert [choice.index for choice in whole.other_choices] == [1, 2, 3]
    for index, expected in enumerate([whole, *whole.other_choices]):
        mine = [chunk for chunk in chunks if chunk.choice == index]
        assert ids_of(token for chunk in mine for token in chunk.tokens) == ids_of(expected.tokens)
        assert "".join(token.text for token in expected.tokens) == expected.text
        assert [chunk.HasField("final") for chunk in mine] == [False] * (len(mine) - 1) + [True]
        for final in (mine[-1].final, expected.final):
            assert final.finish_reason == pb.FINISH_REASON_LENGTH
            assert final.usage.completion_tokens == 12


async def test_each_choice_is_the_answer_to_a_seed_of_its_own(api: Any) -> None:
    several = await api.Generate(request(3), Context())
    alone = []
    for seed in (5, 6, 7):
        asked = request(1)
        asked.sampling_params.seed = seed
        alone.append((await api.Generate(asked, Context())).text)
    assert [several.text, *(choice.text for choice in several.other_choices)] == alone
    assert len(set(alone)) == 3


async def test_choices_run_their_prompt_once(api: Any, service: Service) -> None:
    before = service.engine.stats().num_prompt_tokens
    reply = await api.Generate(request(3, prompt="another " + LONG), Context())
    ran, length = service.engine.stats().num_prompt_tokens - before, reply.final.usage.prompt_tokens
    assert length <= ran <= length + 2 * service.engine.config.block_size, "what fills no block runs again"


@pytest.mark.parametrize("n", [0, -1, 10_000])
async def test_too_few_and_too_many_choices_are_refused(api: Any, n: int) -> None:
    context = Context()
    with pytest.raises(StatusSetError):
        await api.Generate(request(n), context)
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT
    assert f"n: got {n}" in context.text
    assert str(Limits().max_choices) in context.text


@pytest.fixture
def gate() -> Gate:
    """One step is let through: the first choice has its first token."""
    return Gate(1)


@pytest.fixture
def held(gate: Gate) -> Iterator[Any]:
    """One row whose steps the gate holds: only the first choice has begun."""
    service = make_service(gate=gate, max_rows=1)
    yield Grpc(service)
    gate.open()
    service.engine.close()


async def test_abort_ends_every_choice_also_those_that_have_not_begun(held: Any, gate: Gate) -> None:
    stream = held.GenerateStream(request(3, prompt="hello", request_id="mine"), Context())
    chunks = [await anext(stream)]
    assert (await held.Abort(pb.AbortRequest(request_id="mine"), Context())).aborted
    gate.open()
    async with asyncio.timeout(HANG_S):
        chunks += await all_of(stream)
    finals = [(chunk.choice, chunk.final.finish_reason) for chunk in chunks if chunk.HasField("final")]
    assert sorted(finals) == [(index, pb.FINISH_REASON_ABORT) for index in range(3)]
    assert {chunk.choice for chunk in chunks if chunk.tokens} == {0}
    assert held.service.num_open == 0
    assert not (await held.Abort(pb.AbortRequest(request_id="mine"), Context())).aborted


async def test_an_id_is_taken_until_the_last_of_its_choices_has_ended(held: Any, gate: Gate) -> None:
    stream = held.GenerateStream(request(2, prompt="hello", request_id="mine"), Context())
    await anext(stream)
    for n in (1, 2):
        context = Context()
        with pytest.raises(StatusSetError):
            await held.Generate(request(n, request_id="mine"), context)
        assert context.status is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in context.text
    gate.open()
    await stream.aclose()
    assert (await held.Generate(request(2, prompt="hello", request_id="mine"), Context())).request_id == "mine"


async def test_an_id_is_taken_also_while_none_of_its_choices_runs() -> None:
    service = Service(ScriptedEngine(), model="tiny")  # type: ignore[arg-type]
    api, context = Grpc(service), Context()
    answers = begin_choices(service, [Call("hello", request_id="mine")], 2, Caller())
    with service.held(answers):
        assert service.num_open == 0
        with pytest.raises(StatusSetError):
            await api.Generate(request(1, request_id="mine"), context)  # type: ignore[arg-type]
    assert context.status is grpc.StatusCode.INVALID_ARGUMENT
    assert (await api.Generate(request(1, request_id="mine"), Context())).text == "Hello"  # type: ignore[arg-type]


async def test_an_error_of_one_choice_is_the_status_of_the_call_and_ends_the_others() -> None:
    engine = ScriptedEngine(HEL, FOREVER)
    real, num = engine.stream, 0

    async def stream(*args: Any, **values: Any) -> Any:
        nonlocal num
        num += 1
        if num == 2:
            raise EngineBusyError("full")
        async for output in real(*args, **values):
            yield output

    engine.stream = stream  # type: ignore[method-assign]
    service = Service(engine, model="tiny")  # type: ignore[arg-type]
    context = Context()
    with pytest.raises(StatusSetError):
        async with asyncio.timeout(HANG_S):
            await all_of(Grpc(service).GenerateStream(request(2), context))  # type: ignore[arg-type]
    assert context.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (engine.num_open, service.num_open) == (0, 0)

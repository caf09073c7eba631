"""The places in which the choices of one request take turns: in the engine's queue, and of the caller's key."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.answer import Call
from deploy.choices import begin_choices, whole_answers
from deploy.failures import QuotaError
from deploy.keys import Caller, KeyLimits, KeyRing
from deploy.service import Service
from tests.deploy.in_process import Context, Grpc, Http, make_service
from tests.deploy.scripted import ScriptedEngine
from tide.v1 import tide_pb2 as pb
from tide_core.errors import EngineBusyError

TEAM = "key-of-the-team"


class Counting(ScriptedEngine):
    """Counts answers at once; has so many places for others to take."""

    def __init__(self, num_free: int = 100) -> None:
        super().__init__()
        self.num_free, self.most, self.num_ended = num_free, 0, 0

    def reserve(self, wanted: int) -> int:
        if self.num_free == 0:
            raise EngineBusyError("full")
        taken = min(wanted, self.num_free)
        self.num_free -= taken
        return taken

    def release(self, num_places: int) -> None:
        self.num_free += num_places

    async def stream(self, *args: Any, **values: Any) -> Any:
        async for output in super().stream(*args, **values):
            self.most = max(self.most, self.num_open)
            yield output
        self.num_ended += 1


def service_of(engine: ScriptedEngine, **settings: Any) -> Service:
    return Service(engine, model="tiny", **settings)  # type: ignore[arg-type]


async def answered(service: Service, num: int, caller: Caller) -> int:
    """How many of so many prompts were answered."""
    answers = begin_choices(service, [Call("x")] * num, 1, caller)
    return len(await whole_answers(service, answers, 1))


async def test_a_list_that_was_let_in_is_answered_whole_although_others_take_every_place_that_frees() -> None:
    taken: list[int] = []

    def take_the_rest(*_: Any) -> None:
        try:
            taken.append(service.engine.reserve(100))
        except EngineBusyError:
            taken.append(0)

    service = make_service(max_rows=1, max_queued=3)
    service._observer = SimpleNamespace(on_output=take_the_rest, on_end=take_the_rest)  # type: ignore[assignment]
    try:
        asked = {"model": "tiny", "prompt": ["hello", "a dog", "x", "y"], "max_tokens": 2, "temperature": 0}
        reply = await Http(service).ask("POST", "/v1/completions", asked)
        assert reply.status == 200, reply.json
        assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2, 3]
        assert sum(taken) == 3, "all but the one of the list"
        take_the_rest()
        assert sum(taken) == 4, "the list gave its own back"
        refused = await Http(service).ask("POST", "/v1/completions", asked)
        assert (refused.status, refused.json["error"]["code"]) == (429, "engine_busy")
        assert refused.headers["retry-after"]
        service.engine.release(sum(taken))
        assert (await Http(service).ask("POST", "/v1/completions", asked)).status == 200
    finally:
        service.engine.close()


@pytest.mark.parametrize("num_free", [1, 2, 100])
async def test_a_list_runs_in_the_places_that_are_free_and_gives_all_of_them_back(num_free: int) -> None:
    engine = Counting(num_free)
    assert await answered(service_of(engine), 20, Caller()) == 20
    assert engine.most == min(num_free, engine.config.max_rows)
    assert engine.num_free == num_free


async def test_a_list_that_began_in_one_place_gets_more_when_they_free() -> None:
    engine = Counting(1)
    service = service_of(engine)
    service._observer = SimpleNamespace(  # type: ignore[assignment]
        on_output=lambda *_: None, on_end=lambda *_: engine.num_ended == 1 and engine.release(2)
    )
    assert await answered(service, 20, Caller()) == 20
    assert engine.most == 3
    assert engine.num_free == 3


async def test_a_request_of_several_choices_that_is_refused_counts_once_and_holds_nothing() -> None:
    engine, ends = Counting(0), list[str]()
    observer: Any = SimpleNamespace(on_output=lambda *_: None, on_end=lambda answer, reason: ends.append(reason))
    service = service_of(engine, observer=observer)
    with pytest.raises(EngineBusyError):
        await answered(service, 5, Caller())
    limited = Caller("team", limits=KeyLimits(concurrent_requests=2))
    engine.num_free = 3
    service._quotas.enter(limited, 2)
    with pytest.raises(QuotaError):
        await answered(service, 5, limited)
    assert ends == ["EngineBusyError", "QuotaError"]
    assert (engine.num_free, service.num_open) == (3, 0)
    service._quotas.leave(limited, 2)
    assert await answered(service, 5, limited) == 5


@pytest.mark.parametrize("api", ["http", "grpc"])
@pytest.mark.parametrize("limit", ["concurrent_requests", "requests_per_minute"])
async def test_more_choices_than_a_key_may_have_open_take_turns(api: str, limit: str) -> None:
    engine = Counting()
    digest = hashlib.sha256(TEAM.encode()).digest()
    keys = KeyRing({digest: Caller("team", limits=KeyLimits(**{limit: 2}))})
    service = service_of(engine, keys=keys)
    bearer = f"Bearer {TEAM}"
    if api == "http":
        asked = {"model": "tiny", "prompt": "x", "n": 5}
        reply = await Http(service).ask("POST", "/v1/completions", asked, headers={"authorization": bearer})
        assert reply.status == 200, reply.json
        num = len(reply.json["choices"])
    else:
        asked_over_grpc: Any = pb.GenerateRequest(prompt="x", n=5)
        answer = await Grpc(service).Generate(asked_over_grpc, Context([("authorization", bearer)]))  # type: ignore[arg-type]
        num = 1 + len(answer.other_choices)
    assert num == 5
    assert engine.most == (2 if limit == "concurrent_requests" else 4)
    if limit == "requests_per_minute":
        with pytest.raises(QuotaError):
            service._quotas.enter(keys.caller(bearer))

"""One request through the service: names, deadlines, aborts, and its one end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import Any

import pytest

from deploy.failures import DeadlineError, ForbiddenError, NotServedError
from deploy.keys import Caller
from deploy.limits import Limits
from deploy.policy import LivePolicy
from deploy.service import Call, Service
from tests.deploy.faces import make_service
from tide_core.errors import ConfigError, EngineDeadError, RequestError
from tide_core.request import FinishReason, RequestOutput

ANYONE = Caller()
PROMPT = [2, 3, 4]
SHORT = {"max_tokens": 40, "ignore_eos": True}
LONG = {"max_tokens": 250, "ignore_eos": True}


@pytest.fixture
def service() -> Any:
    service = make_service(step_s=0.002)
    yield service
    service.engine.close()


async def run(service: Service, call: Call, caller: Caller = ANYONE) -> list[RequestOutput]:
    return await service.whole(service.begin(call, caller))


async def until_idle(service: Service) -> None:
    async with asyncio.timeout(5):
        while service.engine.stats().blocks_owned:
            await asyncio.sleep(0.005)


async def test_an_answer_is_that_of_the_engine_and_ends_once(service: Service) -> None:
    outputs = await run(service, Call(PROMPT, SHORT))
    tokens = [token.token_id for output in outputs for token in output.tokens]
    [alone] = service.engine.generate([PROMPT], service.policy.params(SHORT, ANYONE, "verified"))
    assert tokens == [token.token_id for token in alone.tokens]
    assert [output.finish_reason for output in outputs].count(None) == len(outputs) - 1
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert service.num_open == 0


async def test_another_model_is_refused_by_name(service: Service) -> None:
    with pytest.raises(NotServedError, match="expected tiny"):
        service.begin(Call(PROMPT, model="other"), ANYONE)


async def test_two_open_requests_of_one_caller_never_share_a_name_but_two_callers_may(service: Service) -> None:
    first = service.outputs(service.begin(Call(PROMPT, LONG, "mine"), ANYONE))
    await anext(first)
    with pytest.raises(RequestError, match="request_id"):
        await run(service, Call(PROMPT, LONG, "mine"))
    assert await run(service, Call(PROMPT, LONG, "mine"), Caller("other"))
    await first.aclose()
    assert await run(service, Call(PROMPT, LONG, "mine"))


async def test_a_caller_aborts_its_own_request_and_no_other(service: Service) -> None:
    answer = service.begin(Call(PROMPT, LONG, "mine"), ANYONE)
    outputs = service.outputs(answer)
    await anext(outputs)
    assert not service.abort("mine", Caller("other"))
    assert service.abort("mine", ANYONE)
    rest = [output async for output in outputs]
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert not service.abort("mine", ANYONE)
    await until_idle(service)


async def test_a_request_that_takes_too_long_ends_with_a_deadline_and_gives_its_blocks_back() -> None:
    service = make_service(step_s=0.02, limits=Limits(max_timeout_s=0.2))
    with contextlib.closing(service.engine), pytest.raises(DeadlineError, match=r"0\.2 s"):
        await run(service, Call(PROMPT, LONG))
    assert service.num_open == 0


async def test_a_deadline_that_passes_while_the_prompt_is_read_still_ends_the_request(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = service.engine._make_request

    def slow(*args: Any) -> Any:
        import time

        time.sleep(0.3)
        return make(*args)

    monkeypatch.setattr(service.engine, "_make_request", slow)
    call = Call(PROMPT, LONG, timeout_s=0.05)
    with pytest.raises(DeadlineError):
        await run(service, call)
    await until_idle(service)


async def test_leaving_early_ends_the_request_and_gives_its_blocks_back(service: Service) -> None:
    outputs = service.outputs(service.begin(Call(PROMPT, LONG), ANYONE))
    await anext(outputs)
    await outputs.aclose()
    assert service.num_open == 0
    await until_idle(service)


async def test_a_closed_engine_is_an_error_and_not_an_answer(service: Service) -> None:
    outputs = service.outputs(service.begin(Call(PROMPT, LONG), ANYONE))
    await anext(outputs)
    await asyncio.to_thread(service.engine.close)
    with pytest.raises(EngineDeadError):
        async for _ in outputs:
            pass
    with pytest.raises(EngineDeadError):
        service.check()


async def test_a_request_without_a_length_goes_on_to_the_room_there_is(service: Service) -> None:
    outputs = await run(service, Call(PROMPT, {"ignore_eos": True}, fills=True))
    total = outputs[-1].usage
    assert total is not None
    assert total.prompt_tokens + total.output_tokens == service.engine.max_model_len


async def test_the_policy_fills_in_what_a_request_leaves_open_and_requests_that_run_keep_theirs(
    service: Service,
) -> None:
    outputs = service.outputs(service.begin(Call(PROMPT, LONG), ANYONE))
    first = await anext(outputs)
    await service.take(LivePolicy.read({"mode": "full"}), service.keys)
    rest = [output async for output in outputs]
    assert {token.mode for output in (first, *rest) for token in output.tokens} == {"verified"}
    later = await run(service, Call(PROMPT, LONG))
    assert {token.mode for output in later for token in output.tokens} == {"full"}


async def test_a_mode_that_is_not_allowed_is_forbidden_to_those_who_name_it(service: Service) -> None:
    await service.take(LivePolicy.read({"modes": ["full"]}), service.keys)
    with pytest.raises(ForbiddenError, match="mode"):
        service.begin(Call(PROMPT, {"mode": "fast"}), ANYONE)
    assert service.begin(Call(PROMPT), ANYONE).params.mode == "full"


async def test_a_policy_that_the_artefact_cannot_keep_is_refused_and_the_old_one_stays(service: Service) -> None:
    before = service.policy
    with pytest.raises(ConfigError, match=r"user_config\.epsilon"):
        await service.take(LivePolicy.read({"mode": "bounded", "epsilon": 0.0001}), service.keys)
    assert service.policy is before


async def test_the_log_of_a_request_has_counts_and_never_its_text(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        await run(service, Call("secret words", {"max_tokens": 3}))
    [record] = [record for record in caplog.records if "request ended" in record.message]
    assert record.output_tokens == 3  # type: ignore[attr-defined]
    assert "secret" not in caplog.text


def test_an_engine_that_stands_still_is_unhealthy(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.check()
    still = replace(service.engine.stats(), last_step_age_s=service.limits.stuck_after_s + 1)
    monkeypatch.setattr(service.engine, "stats", lambda: still)
    with pytest.raises(EngineDeadError, match="61 s"):
        service.check()


async def test_callers_of_two_keys_do_not_meet_in_the_prefix_cache(service: Service) -> None:
    prompt = list(range(2, 40))
    one, two = Caller("one", "salt of one"), Caller("two", "salt of two")
    cached = []
    for caller in (one, one, two):
        outputs = await run(service, Call(prompt, {"max_tokens": 2}), caller)
        assert outputs[-1].usage is not None
        cached.append(outputs[-1].usage.cached_tokens)
    assert cached[0] == 0 < cached[1]
    assert cached[2] == 0


async def test_the_load_is_the_tokens_that_open_requests_may_still_make(service: Service) -> None:
    outputs = service.outputs(service.begin(Call(PROMPT, LONG), ANYONE))
    first = await anext(outputs)
    assert service.tokens_in_flight == 250 - len(first.tokens)
    await outputs.aclose()
    assert service.tokens_in_flight == 0

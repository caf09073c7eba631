"""One request through the service: ids, deadlines, aborts, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.answer import Answer, Call
from deploy.config.args import Limits
from deploy.config.policy import LivePolicy
from deploy.failures import DeadlineError, ForbiddenError, NotServedError, QuotaError, failure_of
from deploy.keys import Caller, KeyLimits
from deploy.service import Service
from tests.deploy.in_process import make_service
from tests.deploy.scripted import FOREVER, HEL, LO, ScriptedEngine
from tests.engine.runners import HANG_S, Gate
from tide_core.errors import ConfigError, EngineBusyError, EngineDeadError, RequestError
from tide_core.request import Chat, FinishReason, RequestOutput, SamplingParams
from tide_core.stats import tenant_label

ANYONE = Caller()
PROMPT = [2, 3, 4]
SHORT = {"max_tokens": 40, "ignore_eos": True}
LONG = {"max_tokens": 250, "ignore_eos": True}


@pytest.fixture
def service() -> Iterator[Service]:
    service = make_service()
    yield service
    service.engine.close()


@pytest.fixture
def gate() -> Gate:
    """Lets one step through: a request gets its first token and stays open."""
    return Gate(1)


@pytest.fixture
def held(gate: Gate) -> Iterator[Service]:
    """A service whose steps the gate holds."""
    service = make_service(gate=gate, max_rows=1)
    yield service
    gate.open()
    service.engine.close()


def scripted_service(engine: ScriptedEngine | None = None, **settings: Any) -> Service:
    return Service(engine or ScriptedEngine(), model="tiny", **settings)  # type: ignore[arg-type]


async def run(service: Service, call: Call, caller: Caller = ANYONE) -> list[RequestOutput]:
    return await service.whole(service.begin(call, caller))


async def until_idle(service: Service) -> None:
    async with asyncio.timeout(HANG_S):
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


async def test_a_caller_aborts_its_own_request_and_no_other(held: Service, gate: Gate) -> None:
    answer = held.begin(Call(PROMPT, LONG, "mine"), ANYONE)
    outputs = held.outputs(answer)
    await anext(outputs)
    assert not held.abort("mine", Caller("other"))
    assert held.abort("mine", ANYONE)
    gate.open()
    rest = [output async for output in outputs]
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert not held.abort("mine", ANYONE)
    await until_idle(held)


async def test_a_request_that_takes_too_long_ends_with_a_deadline_and_gives_its_blocks_back(
    held: Service, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    abort = held.engine.abort

    def aborted(request_id: str) -> bool:
        found = abort(request_id)
        gate.open()
        return found

    monkeypatch.setattr(held.engine, "abort", aborted)
    monkeypatch.setattr(held, "limits", Limits(max_timeout_s=0.2))
    with pytest.raises(DeadlineError, match=r"0\.2 s"):
        await run(held, Call(PROMPT, LONG))
    assert held.num_open == 0
    await until_idle(held)


async def test_a_deadline_that_passes_while_the_prompt_is_read_still_ends_the_request(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, abort, expired = service.engine._make_request, service.engine.abort, threading.Event()

    def slow(*args: Any) -> Any:
        assert expired.wait(HANG_S)
        return make(*args)

    def aborted(request_id: str) -> bool:
        expired.set()
        return abort(request_id)

    monkeypatch.setattr(service.engine, "_make_request", slow)
    monkeypatch.setattr(service.engine, "abort", aborted)
    call = Call(PROMPT, LONG, timeout_s=0.05)
    with pytest.raises(DeadlineError):
        await run(service, call)
    await until_idle(service)


async def test_leaving_early_ends_the_request_and_gives_its_blocks_back(held: Service, gate: Gate) -> None:
    outputs = held.outputs(held.begin(Call(PROMPT, LONG), ANYONE))
    await anext(outputs)
    await outputs.aclose()
    assert held.num_open == 0
    gate.open()
    await until_idle(held)
    assert held.engine.stats().num_output_tokens < LONG["max_tokens"]


async def test_a_closed_engine_is_an_error_and_not_an_answer(held: Service, gate: Gate) -> None:
    outputs = held.outputs(held.begin(Call(PROMPT, LONG), ANYONE))
    await anext(outputs)
    await asyncio.to_thread(gate.close_engine, held.engine)
    with pytest.raises(EngineDeadError):
        async for _ in outputs:
            pass
    with pytest.raises(EngineDeadError):
        held.check()


async def test_a_request_without_a_length_goes_on_to_the_end_of_the_context(service: Service) -> None:
    outputs = await run(service, Call(PROMPT, {"ignore_eos": True}, fill_context=True))
    total = outputs[-1].usage
    assert total is not None
    assert total.prompt_tokens + total.output_tokens == service.engine.max_model_len


async def test_the_policy_fills_in_what_a_request_leaves_open_and_requests_that_run_keep_theirs(
    held: Service, gate: Gate
) -> None:
    outputs = held.outputs(held.begin(Call(PROMPT, LONG), ANYONE))
    first = await anext(outputs)
    await held.apply(LivePolicy.read({"mode": "full"}))
    gate.open()
    rest = [output async for output in outputs]
    assert {token.mode for output in (first, *rest) for token in output.tokens} == {"verified"}
    later = await run(held, Call(PROMPT, LONG))
    assert {token.mode for output in later for token in output.tokens} == {"full"}


async def test_a_mode_that_is_not_allowed_is_forbidden_to_those_who_name_it(service: Service) -> None:
    await service.apply(LivePolicy.read({"modes": ["full"]}))
    with pytest.raises(ForbiddenError, match="mode"):
        service.begin(Call(PROMPT, {"mode": "fast"}), ANYONE)
    assert service.begin(Call(PROMPT), ANYONE).params.mode == "full"


async def test_a_policy_that_the_artefact_cannot_keep_is_refused_and_the_old_one_stays(service: Service) -> None:
    before = service.policy
    with pytest.raises(ConfigError, match=r"user_config\.min_layers"):
        await service.apply(LivePolicy.read({"min_layers": 99}))
    assert service.policy is before


async def test_the_log_of_a_request_has_counts_and_never_its_text(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        await run(service, Call("secret words", {"max_tokens": 3}))
    [record] = [record for record in caplog.records if "request ended" in record.message]
    assert record.output_tokens == 3  # type: ignore[attr-defined]
    assert (record.caller, record.tenant) == ("anyone", tenant_label(""))  # type: ignore[attr-defined]
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


async def test_the_load_is_read_by_another_thread_while_requests_come_and_go() -> None:
    service, errors, done = scripted_service(), [], threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                assert service.tokens_in_flight >= 0
            except Exception as error:
                errors.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        await asyncio.gather(*(run(service, Call(PROMPT)) for _ in range(20)))
    done.set()
    reader.join()
    assert errors == []


# What begins, and with what.


async def test_a_request_for_more_than_a_limit_is_refused_before_it_begins_and_time_is_cut_to_it() -> None:
    service = scripted_service(limits=Limits(max_tokens=10, max_timeout_s=5.0))
    with pytest.raises(RequestError, match="max_tokens: got 11, expected at most 10"):
        service.begin(Call(PROMPT, {"max_tokens": 11}), ANYONE)
    assert service.begin(Call(PROMPT, {"max_tokens": 10}, timeout_s=60.0), ANYONE).timeout_s == 5.0


async def test_a_request_without_a_length_goes_on_to_the_limit_if_the_context_is_longer() -> None:
    service = make_service(limits=Limits(max_tokens=7))
    with contextlib.closing(service.engine):
        outputs = await run(service, Call(PROMPT, {"ignore_eos": True}, fill_context=True))
    assert sum(len(output.tokens) for output in outputs) == 7


TOO_LONG = "x" * (64 * 16 + 1)


@pytest.mark.parametrize(
    "prompt",
    [
        TOO_LONG,
        [{"role": "user", "content": TOO_LONG[:512]}, {"role": "user", "content": TOO_LONG[:513]}],
        Chat([{"role": "user", "content": TOO_LONG[:512]}], ({"function": {"description": TOO_LONG[:513]}},)),
        Chat(
            [
                {"role": "user", "content": TOO_LONG[:512]},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"arguments": {"a": TOO_LONG[:513]}}}],
                },
            ]
        ),
    ],
)
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(prompt: Any) -> None:
    engine = ScriptedEngine()
    service = scripted_service(engine)
    with pytest.raises(RequestError, match=r"1025 characters.*at most 1024: 64 tokens of at most 16 characters each"):
        service.begin(Call(prompt), ANYONE)
    with pytest.raises(RequestError, match="1025 characters"):
        await service.tokenize(prompt)
    assert service.begin(Call(TOO_LONG[:-1]), ANYONE), "the tokens decide"
    assert engine.asked == []


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb"], ids=["none", "too long", "two lines"])
def test_a_name_that_no_request_may_have_is_refused_wherever_it_is_given(name: str) -> None:
    service = scripted_service()
    assert service.begin(Call(PROMPT, request_id="x" * 128), ANYONE).request_id == "x" * 128
    with pytest.raises(RequestError, match="request_id"):
        service.begin(Call(PROMPT, request_id=name), ANYONE)
    with pytest.raises(RequestError, match="request_id"):
        service.abort(name, ANYONE)


async def test_an_answer_tells_the_exits_that_it_began_with_and_none_at_full_depth() -> None:
    engine = ScriptedEngine()
    engine.artefact_digest = "old"  # type: ignore[assignment]
    service = scripted_service(engine)
    exiting, full = (service.begin(Call(PROMPT, {"mode": mode}), ANYONE) for mode in ("verified", "full"))
    for answer in (exiting, full):
        engine.artefact_digest = "old"  # type: ignore[assignment]
        outputs = service.outputs(answer)
        await anext(outputs)
        engine.artefact_digest = "new"  # type: ignore[assignment]
        assert [output async for output in outputs]
    assert (exiting.artefact, full.artefact) == ("old", None)


# Ends.


class Ends:
    """An observer that keeps how requests ended, and when their first token came."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.num_moves = 0

    def on_output(self, answer: Answer, output: RequestOutput) -> None:
        self.num_moves += 1

    def on_end(self, answer: Answer, reason: str) -> None:
        self.reasons.append(reason)


async def test_whoever_counts_is_told_of_every_piece_and_once_of_every_end() -> None:
    ends = Ends()
    for script in ((HEL, LO), (HEL, EngineBusyError("full")), (HEL, FOREVER)):
        service = scripted_service(ScriptedEngine(*script), observer=ends)
        outputs = service.outputs(service.begin(Call(PROMPT), ANYONE))
        await anext(outputs)
        if FOREVER not in script:
            with contextlib.suppress(EngineBusyError):
                await anext(outputs)
                await anext(outputs, None)
        await outputs.aclose()
    assert ends.reasons == ["stop", "EngineBusyError", "cancelled"]
    assert ends.num_moves == 4


async def test_the_error_of_a_failed_answer_is_the_engines_own() -> None:
    failed = RequestOutput("r", (), FinishReason.ERROR, None, EngineDeadError("the loop died"))
    with pytest.raises(EngineDeadError, match="the loop died"):
        await run(scripted_service(ScriptedEngine(HEL, failed)), Call(PROMPT))


async def test_the_first_token_is_timed_once() -> None:
    service = scripted_service(ScriptedEngine(HEL, HEL, LO))
    answer = service.begin(Call(PROMPT), ANYONE)
    outputs = service.outputs(answer)
    await anext(outputs)
    assert answer.first_at is not None
    answer.first_at = first_at = -1.0  # no clock reads so
    assert [output async for output in outputs]
    assert answer.first_at == first_at


async def test_a_request_that_has_ended_leaves_no_timer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    later = loop.call_later

    def kept(*args: Any) -> asyncio.TimerHandle:
        timers.append(later(*args))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", kept)
    await run(scripted_service(), Call(PROMPT))
    assert [timer.cancelled() for timer in timers] == [True], "it would hold the prompt until the deadline"


@pytest.mark.parametrize("ended_by", ["deadline", "caller"])
async def test_a_request_that_is_ended_while_its_prompt_is_read_does_not_wait_for_others(
    ended_by: str, held: Service, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, abort = held.engine._make_request, held.engine.abort
    begun, too_soon, reads = threading.Event(), threading.Event(), threading.Event()
    others = held.outputs(held.begin(Call(PROMPT, {**LONG, "mode": "full"}), ANYONE))  # has the only row
    await anext(others)

    def slow(*args: Any) -> Any:
        begun.set()
        assert reads.wait(HANG_S)
        return make(*args)

    def aborted(request_id: str) -> bool:
        found = abort(request_id)
        if found:
            gate.let(1)  # aborts are carried out between steps
        else:
            too_soon.set()
        return found

    monkeypatch.setattr(held.engine, "_make_request", slow)
    monkeypatch.setattr(held.engine, "abort", aborted)
    timeout_s = 0.05 if ended_by == "deadline" else HANG_S
    waits = asyncio.create_task(run(held, Call(PROMPT, LONG, "mine", timeout_s=timeout_s)))
    assert await asyncio.to_thread(begun.wait, HANG_S)
    if ended_by == "caller":
        assert held.abort("mine", ANYONE), "it is open, and it is theirs"
    assert await asyncio.to_thread(too_soon.wait, HANG_S), "the engine does not have it yet"
    reads.set()
    async with asyncio.timeout(HANG_S):
        if ended_by == "caller":
            assert (await waits)[-1].finish_reason is FinishReason.ABORT
        else:
            with pytest.raises(DeadlineError):
                await waits
    assert held.num_open == 1
    stats = held.engine.stats()
    assert (stats.num_running, stats.dead) == (1, False), "the other still has the row"
    await others.aclose()


# Another policy.


class SwappingEngine(ScriptedEngine):
    """Takes any artefact with exits, and refuses every bound."""

    def __init__(self, *, suffix_drafts: bool = False) -> None:
        super().__init__()
        self.suffix_drafts = suffix_drafts
        self.config = SimpleNamespace(artefact="own")
        self.taken: list[str] = []

    @property
    def default_mode(self) -> str:
        return "verified" if self.suffix_drafts else super().default_mode

    def use_artefact(self, artefact: str, wanted: Callable[[str], SamplingParams]) -> None:
        self.check_params(wanted("verified"))
        self.config = SimpleNamespace(artefact=artefact)
        self.taken.append(artefact)

    def check_params(self, params: SamplingParams) -> None:
        if params.epsilon is not None:
            raise RequestError("epsilon", params.epsilon, "another one")


async def test_exits_come_with_their_policy_and_go_with_it() -> None:
    engine = SwappingEngine()
    service = scripted_service(engine)
    await service.apply(LivePolicy.read({"artefact": "other"}))
    await service.apply(LivePolicy.read({"artefact": "other", "mode": "full"}))
    await service.apply(LivePolicy.read({}))
    assert engine.taken == ["other", "own"]


async def test_another_audit_epoch_makes_the_engine_forget_its_audits_and_nothing_else_does() -> None:
    engine, forgotten = SwappingEngine(), []
    engine.forget_audits = lambda: forgotten.append(1)  # type: ignore[attr-defined]
    service = scripted_service(engine)
    for policy, num in (({}, 0), ({"audit_epoch": 2}, 1), ({"audit_epoch": 2, "mode": "full"}, 1), ({}, 2)):
        await service.apply(LivePolicy.read(policy))
        assert len(forgotten) == num
    refused = LivePolicy.read({"audit_epoch": 3, "mode": "bounded", "epsilon": 0.01})
    with pytest.raises(ConfigError):
        await service.apply(refused)
    assert len(forgotten) == 2


async def test_a_policy_is_checked_in_the_mode_that_requests_get_also_without_an_artefact() -> None:
    policy = LivePolicy.read({"threshold": 0.5})
    service = scripted_service(SwappingEngine(suffix_drafts=True))
    await service.apply(policy)
    assert service.policy == policy
    with pytest.raises(ConfigError, match=r"user_config\.threshold"):
        await scripted_service(SwappingEngine()).apply(policy)


async def test_of_a_policy_that_is_refused_nothing_is_taken_not_even_for_a_moment() -> None:
    engine = SwappingEngine()
    service = scripted_service(engine)
    await service.apply(LivePolicy.read({"artefact": "first"}))
    refused = LivePolicy.read({"artefact": "second", "mode": "bounded", "epsilon": 0.01})
    with pytest.raises(ConfigError, match=r"user_config\.epsilon"):
        await service.apply(refused)
    assert service.policy.artefact == "first"
    assert engine.taken == ["first"]


# Abort at another replica.


async def test_a_request_that_is_not_here_is_aborted_where_it_is() -> None:
    service, asked = scripted_service(), []

    async def elsewhere(caller_name: str, request_id: str) -> bool:
        asked.append((caller_name, request_id))
        return request_id == "there"

    service.abort_elsewhere = elsewhere
    assert await service.abort_anywhere("there", Caller("team"))
    assert not await service.abort_anywhere("nowhere", Caller("team"))
    assert asked == [("team", "there"), ("team", "nowhere")]
    outputs = service.outputs(service.begin(Call(PROMPT, request_id="here"), Caller("team")))
    await anext(outputs)
    assert await service.abort_anywhere("here", Caller("team"))
    assert len(asked) == 2
    await outputs.aclose()
    with pytest.raises(RequestError, match="request_id"):
        await service.abort_anywhere("", Caller("team"))


# Limits of a key.


async def test_a_request_over_the_limit_of_its_key_is_refused_counted_and_leaves_no_trace() -> None:
    ends: list[str] = []
    observer = SimpleNamespace(on_output=lambda answer, output: None, on_end=lambda answer, reason: ends.append(reason))
    service = scripted_service(ScriptedEngine(), observer=observer)
    limited = Caller("team", limits=KeyLimits(concurrent_requests=1))
    first = service.outputs(service.begin(Call(PROMPT), limited))
    await anext(first)
    with pytest.raises(QuotaError) as caught:
        await run(service, Call(PROMPT), limited)
    failure = failure_of(caught.value, "id")
    assert (failure.status, failure.grpc_code, failure.retry_after_s) == (429, "RESOURCE_EXHAUSTED", 1)
    assert (ends, service.num_open) == (["QuotaError"], 1)
    assert (await run(service, Call(PROMPT), Caller("other")))[-1].finish_reason is not None
    await first.aclose()
    assert (await run(service, Call(PROMPT), limited))[-1].finish_reason is not None


async def test_tokens_of_prompt_and_answer_are_spent() -> None:
    service = scripted_service(ScriptedEngine())  # 5 of a prompt, 2 of an answer
    limited = Caller("team", limits=KeyLimits(tokens_per_minute=8))
    await run(service, Call(PROMPT), limited)
    await run(service, Call(PROMPT), limited)
    with pytest.raises(QuotaError, match="8 tokens a minute"):
        await run(service, Call(PROMPT), limited)


async def test_the_longest_wait_is_that_of_the_oldest_request_without_a_token() -> None:
    service = scripted_service(ScriptedEngine())
    assert service.longest_wait_s == 0.0
    answers = [service.begin(Call(PROMPT), ANYONE) for _ in range(2)]
    answers[0].started_at -= 60.0
    streams = [service.outputs(answer) for answer in answers]
    tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    assert 60.0 <= service.longest_wait_s < 120.0
    await asyncio.gather(*tasks)
    assert service.longest_wait_s == 0.0
    for stream in streams:
        await stream.aclose()

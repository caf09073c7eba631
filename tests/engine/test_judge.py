"""Answers of mode fast, judged by full depth: what is found, what follows from it, and that nobody else notices."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.exit_engines import easy_model, exit_parts, ids
from tests.engine.runners import Gate, RunnerOf
from tests.engine.test_faults import wait_until
from tests.factories import random_prompts
from tide_core.batch import RowResult, ScheduledBatch, StepResult
from tide_core.engine import assemble
from tide_core.engine.core import EngineCore
from tide_core.engine.engine import Engine
from tide_core.engine.judge import MAX_PROCESSES, MAX_WAITING, Judge, is_judged
from tide_core.exits.cost import RowAcceptance
from tide_core.exits.policy import resolve_policy
from tide_core.kv.block_manager import BlockTable
from tide_core.request import (
    Audit,
    ExitPolicy,
    FinishReason,
    Grammar,
    Request,
    RequestOutput,
    SamplingParams,
)
from tide_core.row import Row
from tide_core.stats import tenant_label

PROMPTS = random_prompts(6, 11)
EPSILON = 0.05
FAST = ExitPolicy("fast", (0.0,), epsilon=EPSILON)
PARAMS = SamplingParams(mode="fast", max_tokens=24, ignore_eos=True)


def request(name: str, prompt: list[int], *, salt: str = "", policy: ExitPolicy = FAST, **changes: Any) -> Request:
    params = replace(PARAMS, mode=policy.mode, **changes)
    return Request(name, tuple(prompt), params, 0, (0,), salt, policy)


def run(core: EngineCore, *requests: Request, judges: bool = True) -> dict[str, list[RequestOutput]]:
    """All outputs of the requests; with `judges` until the engine has nothing to do."""
    for each in requests:
        core.add(each)
    outputs: dict[str, list[RequestOutput]] = {each.request_id: [] for each in requests}
    while core.has_work if judges else core.scheduler.has_work:
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token.token_id for output in outputs for token in output.tokens]


def requests(num: int = 6, **changes: Any) -> list[Request]:
    return [request(f"r{n}", PROMPTS[n % len(PROMPTS)], **changes) for n in range(num)]


def differing(model: Any, prompt: list[int], output: list[int]) -> float:
    """The share of the tokens that the library's model, given the text before each, would have chosen otherwise."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    return sum(int(row.argmax()) != token for row, token in zip(logits, output, strict=True)) / len(output)


@pytest.mark.parametrize("chunk", [8, 64])
def test_the_finding_is_that_of_the_library_at_full_depth(chunk: int) -> None:
    parts = exit_parts(share=0.3, audit_share=1.0, max_batch_tokens=chunk)
    model = copy.deepcopy(easy_model(share=0.3))
    losses = []
    for each in requests():
        outputs = run(parts.core, each)[each.request_id]
        losses.append(min(0.5, differing(model, list(each.prompt_ids), tokens_of(outputs))))
        [audit] = parts.core.judge.snapshots()
        assert audit.num_answers == len(losses)
        assert audit.mean_loss == pytest.approx(sum(losses) / len(losses))
    assert len(set(losses)) > 2, "some answers are better than others"
    parts.core.check_idle()


def test_an_answer_of_one_token_and_one_that_ends_with_an_end_id_are_judged_whole() -> None:
    parts = exit_parts(share=0.3, audit_share=1.0)
    [whole] = run(parts.core, request("whole", PROMPTS[0])).values()
    end = tokens_of(whole)[9]
    [short] = run(parts.core, request("short", PROMPTS[0], max_tokens=1)).values()
    [ended] = run(parts.core, request("ended", PROMPTS[0], stop_ids=(end,))).values()
    assert (len(tokens_of(short)), ended[-1].finish_reason) == (1, FinishReason.STOP)
    found = parts.core.judge.snapshots()[0]
    losses = [min(0.5, differing(easy_model(share=0.3), PROMPTS[0], tokens_of(out))) for out in (whole, short, ended)]
    assert (found.num_answers, found.mean_loss) == (3, pytest.approx(sum(losses) / 3))


def test_a_judge_runs_only_the_head_rows_that_it_needs() -> None:
    parts = exit_parts(audit_share=1.0)
    seen: list[range] = []
    inner = parts.runner.run

    def watched(batch: ScheduledBatch) -> StepResult:
        seen.extend(step.prompt_targets for step in batch.rows if step.request.scores_from is not None)
        return inner(batch)

    parts.core._runner = RunnerOf(watched)
    run(parts.core, request("r", PROMPTS[0]))
    assert [place for targets in seen for place in targets] == list(range(11, 11 + 23))


def test_judged_answers_and_those_beside_them_are_the_same_and_no_count_has_the_judge() -> None:
    quiet, judging = exit_parts(), exit_parts(audit_share=1.0)
    more = [request(f"v{n}", PROMPTS[n], policy=ExitPolicy("verified", (0.0,))) for n in range(3)]
    got = []
    for parts in (quiet, judging):
        first = run(parts.core, *requests(), judges=False)
        second = run(parts.core, *more)  # beside the judge, which starts before they come
        got.append({**first, **second})
    for name, outputs in got[0].items():
        assert tokens_of(outputs) == tokens_of(got[1][name])
        assert [out.finish_reason for out in outputs if out.finished] == [FinishReason.LENGTH]
        [mine], [theirs] = ([out.usage for out in found[name] if out.usage] for found in got)
        assert replace(mine, queue_s=0, first_token_s=0, total_s=0) == replace(
            theirs, queue_s=0, first_token_s=0, total_s=0
        )
    assert judging.core.judge.snapshots()[0].num_answers == 6
    counters = [replace(parts.core.counters, num_steps=0, max_blocks_owned=0) for parts in (quiet, judging)]
    assert counters[0] == counters[1]
    assert quiet.core.exits.summary() == judging.core.exits.summary()
    assert quiet.core.scheduler.num_preemptions == judging.core.scheduler.num_preemptions == 0


def test_each_exited_token_is_unaudited_even_if_its_answer_is_judged() -> None:
    [outputs] = run(exit_parts(audit_share=1.0).core, request("r", PROMPTS[0])).values()
    audits = {token.audit for output in outputs for token in output.tokens if token.exit_layer == 1}
    assert audits == {Audit.UNAUDITED}


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7},
        {"repetition_penalty": 1.2},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 3},
        {"policy": ExitPolicy("verified", (0.0,))},
        {"policy": ExitPolicy("full")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_full_depth_would_choose_otherwise_for_another_reason_is_not_judged(changes: dict[str, Any]) -> None:
    core = exit_parts(audit_share=1.0).core
    run(core, *requests(2, **changes))
    assert core.judge.snapshots() == ()
    assert core.judge.num_dropped == 0


def test_a_request_with_a_grammar_is_not_judged() -> None:
    plain = request("r", PROMPTS[0])
    assert is_judged(plain, 1.0)
    parts = exit_parts(audit_share=1.0)
    mask = parts.grammars.matcher(Grammar("regex", "[a-z]+"))
    assert not is_judged(replace(plain, mask=mask), 1.0)


def test_an_answer_that_was_aborted_or_failed_is_not_judged() -> None:
    core = exit_parts(audit_share=1.0).core
    for each in requests(2):
        core.add(each)
    core.step()
    core.step()
    assert core.abort("r0") is not None
    assert not core.judge.has_work
    inner = core._runner

    def broken(batch: ScheduledBatch) -> StepResult:
        return StepResult(tuple(RowResult(error="a fault") for _ in batch.rows))

    core._runner = RunnerOf(broken)
    core.step()
    core._runner = inner
    assert not core.has_work
    assert core.judge.snapshots() == ()
    assert core.judge.num_dropped == 0


def test_the_share_is_kept_by_the_request_id_alone() -> None:
    names = [f"name-{n}" for n in range(2000)]
    chosen = {name for name in names if is_judged(request(name, PROMPTS[0]), 0.1)}
    assert 150 < len(chosen) < 250
    assert chosen == {name for name in names if is_judged(request(name, PROMPTS[1], salt="other"), 0.1)}
    assert chosen < {name for name in names if is_judged(request(name, PROMPTS[0]), 0.2)}
    assert not any(is_judged(request(name, PROMPTS[0]), 0.0) for name in names)


def test_answers_wait_for_requests_and_are_taken_in_the_order_in_which_they_ended() -> None:
    core = exit_parts(share=0.3, audit_share=1.0, max_rows=2).core
    seen: list[tuple[str, float]] = []
    core.judge._observe = lambda answer, loss: seen.append((answer.tenant, loss))  # type: ignore[method-assign]
    for n in range(6):
        core.add(request(f"r{n}", PROMPTS[n], salt=f"s{n}"))
    outputs: dict[str, list[RequestOutput]] = {f"r{n}": [] for n in range(6)}
    while core.has_work:
        assert core.scheduler.judging is None or not core.scheduler.waiting
        for output in core.step():
            outputs[output.request_id].append(output)
    # rows of equal length end as they came
    losses = [
        differing(easy_model(share=0.3), prompt, tokens_of(outputs[name]))
        for name, prompt in zip(outputs, PROMPTS, strict=True)
    ]
    assert seen == [(f"s{n}", pytest.approx(loss)) for n, loss in enumerate(losses)]
    assert len(set(losses)) > 2


def test_a_judge_that_gives_way_starts_again_and_finds_the_same() -> None:
    alone, pressed = (exit_parts(share=0.3, audit_share=1.0, max_rows=1, max_batch_tokens=8) for _ in range(2))
    run(alone.core, request("r", PROMPTS[0]))
    run(pressed.core, request("r", PROMPTS[0]), judges=False)
    for n in range(2):
        while pressed.core.scheduler.judging is None:
            pressed.core.step()
        pressed.core.step()
        run(pressed.core, request(f"full{n}", PROMPTS[1], policy=ExitPolicy("full")), judges=False)
        assert pressed.core.scheduler.judging is None
    assert pressed.core.judge.snapshots() == ()
    run(pressed.core)
    assert pressed.core.judge.snapshots() == alone.core.judge.snapshots() != ()


def test_too_many_waiting_answers_are_dropped_and_counted() -> None:
    core = exit_parts(audit_share=1.0).core
    judge, row = core.judge, Row(request("r", PROMPTS[0]), None, BlockTable(), RowAcceptance(), [5, 6])
    for _ in range(MAX_WAITING + 3):
        judge.offer(row, FinishReason.LENGTH)
    assert judge.num_dropped == 3
    run(core)
    assert judge.snapshots()[0].num_answers == MAX_WAITING


@pytest.mark.parametrize("fault", ["a step that raises", "too few scores"])
def test_a_judge_that_fails_is_dropped_and_logged_once_and_harms_nobody(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts = exit_parts(audit_share=1.0)
    inner = parts.runner.run

    def broken(batch: ScheduledBatch) -> StepResult:
        if all(step.request.scores_from is None for step in batch.rows):
            return inner(batch)
        if fault == "a step that raises":
            raise RuntimeError("a fault of the judge")
        return StepResult(tuple(row._replace(prompt_logprobs=()) for row in inner(batch).rows))

    parts.core._runner = RunnerOf(broken)
    with caplog.at_level(logging.WARNING, "tide"):
        got = run(parts.core, *requests(3))
        run(parts.core, request("later", PROMPTS[1]))
    assert [outputs[-1].finish_reason for outputs in got.values()] == [FinishReason.LENGTH] * 3
    assert parts.core.judge.num_dropped == 4
    assert parts.core.judge.snapshots() == ()
    assert len([each for each in caplog.records if "could not be judged" in each.message]) == 1
    parts.core.check_idle()


def judged_engine(monkeypatch: pytest.MonkeyPatch, *, easy: bool, **settings: Any) -> Engine:
    """An engine that judges every answer; requests for fast without a threshold have a contract."""

    def certified(params: SamplingParams, *args: Any, **kwargs: Any) -> ExitPolicy:
        policy = resolve_policy(params, *args, **kwargs)
        is_certified = policy.mode == "fast" and params.threshold is None
        return replace(policy, epsilon=EPSILON, draft_thresholds=(0.0,)) if is_certified else policy

    monkeypatch.setattr(assemble, "resolve_policy", certified)
    return Engine.from_parts(exit_parts(easy=easy, audit_share=1.0, **settings))


async def answer(engine: Engine, prompt: list[int], *, salt: str = "", **changes: Any) -> list[Any]:
    outputs = [out async for out in engine.stream(prompt, replace(PARAMS, **changes), cache_salt=salt)]
    return [token for output in outputs for token in output.tokens]


async def answered_and_judged(engine: Engine, num: int, *, salt: str = "", **changes: Any) -> None:
    before = sum(audit.num_answers for audit in engine.stats().audits)
    for n in range(num):
        await answer(engine, PROMPTS[n % len(PROMPTS)], salt=salt, **changes)
    wait_until(lambda: sum(audit.num_answers for audit in engine.stats().audits) == before + num)


async def alarmed(engine: Engine, *, salt: str = "") -> None:
    """Ask for fast until it is served as verified."""
    for n in range(30):
        tokens = await answer(engine, PROMPTS[n % len(PROMPTS)], salt=salt)
        if {token.mode for token in tokens} == {"verified"}:
            return
        wait_until(lambda num=n + 1: sum(audit.num_answers for audit in engine.stats().audits) == num)
    pytest.fail("no alarm after 30 answers")


async def test_exits_that_are_wrong_raise_the_alarm_and_their_tenant_is_served_as_verified(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with judged_engine(monkeypatch, easy=False) as engine:
        with caplog.at_level(logging.WARNING, "tide"):
            await alarmed(engine, salt="ours")
        [audit] = engine.stats().audits
        assert audit.alarmed
        assert (audit.tenant, audit.epsilon) == (tenant_label("ours"), EPSILON)
        full = await answer(engine, PROMPTS[0], salt="ours", mode="full")
        served = await answer(engine, PROMPTS[0], salt="ours")
        theirs = await answer(engine, PROMPTS[0], salt="theirs")
        own_threshold = await answer(engine, PROMPTS[0], salt="ours", threshold=0.0)
    assert {token.mode for token in served} == {"verified"}
    assert [token.token_id for token in served] == [token.token_id for token in full]
    assert {token.mode for token in theirs} == {token.mode for token in own_threshold} == {"fast"}
    assert [token.token_id for token in theirs] != [token.token_id for token in full]
    [line] = [each.message for each in caplog.records if "served as verified" in each.message]
    assert f"fast(0.05) of tenant {tenant_label('ours')} " in line
    assert "ours" not in line


async def test_exits_that_are_right_raise_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    with judged_engine(monkeypatch, easy=True, share=0.0) as engine:
        await answered_and_judged(engine, 30)
        [audit] = engine.stats().audits
        assert audit.mean_loss < EPSILON / 2, "a few tokens are not in the shortlist"
        assert not audit.alarmed
        assert {token.mode for token in await answer(engine, PROMPTS[0])} == {"fast"}


async def test_without_a_contract_the_mean_loss_is_reported_and_nothing_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with judged_engine(monkeypatch, easy=False) as engine:
        await answered_and_judged(engine, 20, threshold=0.0)
        [audit] = engine.stats().audits
        assert (audit.epsilon, audit.alarmed, audit.evidence) == (None, False, 1.0)
        assert audit.mean_loss > 0.2
        assert {token.mode for token in await answer(engine, PROMPTS[0], threshold=0.0)} == {"fast"}


async def test_an_operator_can_make_the_engine_forget_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    with judged_engine(monkeypatch, easy=False) as engine:
        await alarmed(engine)
        engine.forget_audits()
        assert engine.stats().audits == ()
        assert {token.mode for token in await answer(engine, PROMPTS[0])} == {"fast"}


def test_other_exits_start_with_no_evidence_and_answers_of_those_before_are_not_judged() -> None:
    old, new = exit_parts(audit_share=1.0).core, exit_parts(audit_share=1.0).core
    run(old, *requests(3))
    old.add(request("open", PROMPTS[0]))
    old.judge.num_dropped = 7
    new.take_over_counts(old)
    run(old)
    assert old.judge.snapshots()[0].num_answers == 3
    assert not old.has_work
    assert new.judge.snapshots() == ()
    assert new.judge.num_dropped == 7


def test_an_engine_that_closes_drops_what_is_still_to_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = judged_engine(monkeypatch, easy=True)
    gate = Gate(100)
    with gate.hold(engine):
        [answered] = engine.generate([PROMPTS[0]], replace(PARAMS, max_tokens=2))
        gate.close_engine(engine)
    assert len(ids(answered)) == 2
    assert engine._loop._death is None


def test_an_idle_engine_ends_its_judging_and_owns_no_block_then(monkeypatch: pytest.MonkeyPatch) -> None:
    with judged_engine(monkeypatch, easy=True) as engine:
        engine.generate(PROMPTS, PARAMS)
        wait_until(lambda: sum(audit.num_answers for audit in engine.stats().audits) == len(PROMPTS))
        wait_until(lambda: engine.stats().blocks_owned == 0)
        stats = engine.stats()
    assert (stats.num_finished, stats.num_running, stats.num_waiting) == (6, 0, 0)
    assert not stats.dead


def test_tenants_are_bounded_and_those_with_an_alarm_stay() -> None:
    core = exit_parts(audit_share=1.0).core
    row = Row(request("r", PROMPTS[0]), None, BlockTable(), RowAcceptance(), [5])
    judge: Judge = core.judge

    def observe(tenant: str, loss: float, times: int = 1) -> None:
        judge.offer(replace_salt(row, tenant), FinishReason.LENGTH)
        given = judge._waiting.pop()
        for _ in range(times):
            judge._observe(given, loss)

    observe("bad", 1.0, 100)
    observe("early", 0.0)
    for n in range(MAX_PROCESSES - 2):
        observe(f"t{n}", 0.0)
    observe("early", 0.0)  # now t0 is the one used longest ago
    observe("one more", 0.0)
    found = judge.snapshots()
    assert len(found) == MAX_PROCESSES
    assert found[0].tenant == tenant_label("bad")
    assert judge.is_alarmed("bad", EPSILON)
    labels = {audit.tenant for audit in found}
    assert tenant_label("early") in labels
    assert tenant_label("one more") in labels
    assert tenant_label("t0") not in labels


def replace_salt(row: Row, salt: str) -> Row:
    return Row(replace(row.request, cache_salt=salt), None, row.table, row.acceptance, row.output_ids)

"""The next cycle begins before anybody has asked for it; on the CPU, with the CUDA kernels' twin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.engine.exit_engines import all_ids, exit_layers, exit_parts, poisoned
from tests.factories import random_prompts
from tests.kernels.twin import twin_kernels
from tide_core.batch import DraftCounts, RowResult, RowStep, TokenResult
from tide_core.engine import assemble
from tide_core.engine.captured_cycle import CapturedCycles
from tide_core.engine.engine import Engine
from tide_core.engine.run_ahead import Ahead, next_steps
from tide_core.kv.block_manager import BlockTable
from tide_core.request import ExitPolicy, Request, RequestOutput, SamplingParams

GREEDY: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
POLICY = ExitPolicy("verified", (0.5,), (float("inf"),))


@pytest.fixture(autouse=True)
def on_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "select_kernels", lambda choice, device: twin_kernels())


@pytest.fixture
def foreseen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every cycle that something was begun for: whether it was that."""
    seen: list[bool] = []
    foresaw = Ahead.foresaw

    def counted(self: Ahead[Any], steps: Sequence[RowStep]) -> bool:
        seen.append(foresaw(self, steps))
        return seen[-1]

    monkeypatch.setattr(Ahead, "foresaw", counted)
    return seen


@contextlib.contextmanager
def engine_of(*, ahead: bool, **options: Any) -> Iterator[Engine]:
    """With freed blocks full of NaN, by an identity head that is right now and then."""
    parts = exit_parts(**{"share": 0.3, "drafts": 3, **options})
    assert isinstance(parts.runner.cycles, CapturedCycles)
    parts.runner.cycles.runs_ahead = ahead
    with poisoned(parts) as engine:
        yield engine
        assert not parts.core.scheduler.blocks.num_owned


@pytest.mark.parametrize("num_rows", [1, 2, 5])
@pytest.mark.parametrize("mode", ["full", "verified"])
def test_tokens_and_exits_are_the_same_with_and_without(num_rows: int, mode: str, foreseen: list[bool]) -> None:
    answers = []
    for ahead in (False, True):
        with engine_of(ahead=ahead) as engine:
            answers.append(engine.generate(random_prompts(num_rows, 11), SamplingParams(**GREEDY, mode=mode)))
    assert all_ids(answers[0]) == all_ids(answers[1])
    assert list(map(exit_layers, answers[0])) == list(map(exit_layers, answers[1]))
    assert sum(foreseen) >= 4
    assert sum(foreseen) > 0.6 * len(foreseen)


def test_rows_that_end_and_rows_that_come_spoil_nothing(foreseen: list[bool]) -> None:
    """Twelve texts of different lengths, three at a time: rows end in most steps, and prompts get their blocks."""
    prompts = random_prompts(12, 19)
    lengths = [SamplingParams(**{**GREEDY, "max_tokens": 3 + 5 * row % 17}) for row in range(12)]
    answers = []
    for ahead in (False, True):
        with engine_of(ahead=ahead, max_rows=3) as engine:
            answers.append(all_ids(engine.generate(prompts, lengths)))
    assert answers[0] == answers[1]
    assert any(foreseen)


def test_what_was_begun_for_a_row_that_is_gone_is_for_nothing_and_its_blocks_may_be_anothers(
    foreseen: list[bool],
) -> None:
    said = [_with_an_abort(ahead=ahead) for ahead in (False, True)]
    assert said[0] == said[1]
    assert len(said[1]["d"]) == 12
    assert foreseen.count(False) == 2, "the step behind the abort, asked by prompts and by cycles"
    assert foreseen.count(True) >= 4


def _with_an_abort(*, ahead: bool) -> dict[str, list[int]]:
    """The tokens of four requests, of which the second is aborted amid its text; the fourth gets its blocks."""
    parts = exit_parts(share=0.3, drafts=3, max_rows=3)
    core, cycles = parts.core, parts.runner.cycles
    assert cycles is not None
    cycles.runs_ahead = ahead
    parts.runner.cache.poison(range(parts.runner.cache.num_blocks))
    core.scheduler.blocks._on_release = parts.runner.cache.poison
    said: dict[str, list[int]] = {name: [] for name in "abcd"}

    def deliver(outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            said[output.request_id] += [token.token_id for token in output.tokens]

    policy = ExitPolicy("verified", (0.0,), (float("inf"),))
    requests = [
        Request(name, prompt, SamplingParams(max_tokens=length, ignore_eos=True), seed=0, policy=policy)
        for name, prompt, length in zip("abcd", random_prompts(4, 11), (40, 40, 40, 12), strict=True)
    ]
    for request in requests[:3]:
        core.add(request)
    for _ in range(4):
        core.advance(deliver)
    core.abort("b")
    core.add(requests[3])
    while core.has_work:
        core.advance(deliver)
    core.check_idle()
    del said["b"]
    return said


def test_a_stop_string_or_a_temperature_in_a_row_lets_all_wait() -> None:
    step, result = steps_of(), results_of(5, 6)
    assert next_steps([step], [result], 16) is not None
    for more in ({"stop": ("x",)}, {"temperature": 0.5}):
        assert next_steps([step, steps_of(**more)], [result, result], 16) is None


def steps_of(*, start: int = 14, drafts: int = 2, blocks: Sequence[int] = (4, 7), **params: Any) -> RowStep:
    request = Request("r", (1,), SamplingParams(**{"max_tokens": 9, **params}), seed=0, eos_ids=(2,))
    return RowStep(request, BlockTable([start], list(blocks)), (3,), (9, 3), True, POLICY, drafts)


def results_of(*token_ids: int, error: str | None = None) -> RowResult:
    tokens = tuple(TokenResult(token_id, 4) for token_id in token_ids)
    return RowResult(tokens, len(tokens), 10, DraftCounts(2, len(tokens) - 1), error)


def test_what_follows_begins_with_the_last_token_behind_those_that_count() -> None:
    step = steps_of()
    [following] = next_steps([step], [results_of(5, 6)], 16) or ()
    assert following.token_ids == [6]
    assert following.table == BlockTable([16], [4, 7])
    assert (following.request, following.policy, following.num_drafts) == (step.request, step.policy, 2)
    assert Ahead([following], None).foresaw([following])


@pytest.mark.parametrize(
    ("step", "result"),
    [
        (steps_of(), results_of(5, 2)),
        (steps_of(stop_ids=(5,)), results_of(5, 6)),
        (steps_of(max_tokens=6), results_of(5, 6)),
        (steps_of(blocks=(4,)), results_of(5, 6)),
        (steps_of(), results_of(error="numerical_error")),
    ],
    ids=["end of text", "stop id", "too few tokens left for as many drafts", "a block is missing", "error"],
)
def test_where_a_row_may_not_go_on_as_it_did_nothing_is_foreseen(step: RowStep, result: RowResult) -> None:
    assert next_steps([step], [result], 16) is None


def test_the_end_of_text_is_a_token_like_others_where_the_request_says_so() -> None:
    assert next_steps([steps_of(ignore_eos=True)], [results_of(5, 2)], 16) is not None


@pytest.mark.parametrize(
    "other",
    [
        {"start": 17},
        {"drafts": 1},
        {"blocks": (4, 8)},
        {"blocks": (4,)},
    ],
    ids=["another length", "another number of drafts", "another block", "a block fewer"],
)
def test_another_step_is_not_the_one_that_was_foreseen(other: dict[str, Any]) -> None:
    foreseen = steps_of(start=16)
    assert Ahead([foreseen], None).foresaw([foreseen])
    for step in (steps_of(start=16), steps_of(**{"start": 16, **other})):  # the first is of another request
        assert not Ahead([foreseen], None).foresaw([step])
    changed = steps_of(**{"start": 16, **other})
    same_request = RowStep(foreseen.request, changed.table, (3,), (9, 3), True, POLICY, changed.num_drafts)
    assert not Ahead([foreseen], None).foresaw([same_request])
    assert not Ahead([foreseen], None).foresaw([foreseen, foreseen])

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.factories import make_request, make_scheduler
from tide_core.engine.scheduler import Scheduler, SuffixSource
from tide_core.exits.cost import Acceptance, DraftPlanner, SuffixPlan
from tide_core.exits.suffix import SuffixDraft, SuffixDrafts
from tide_core.request import ExitPolicy
from tide_core.row import Row

pytestmark = pytest.mark.unit

SPACE = b"space"
EXITS = ExitPolicy("verified", draft_thresholds=(0.5,))
FAST = ExitPolicy("fast", draft_thresholds=(0.5,))


def add(scheduler: Scheduler, name: str, prompt_len: int, first: int = 2, **params: Any) -> Row:
    prompt = range(first, first + prompt_len)
    return scheduler.add(make_request(prompt, request_id=name, **params), SPACE)


def step(scheduler: Scheduler, accepted: int = 0, lookahead: int = 0) -> dict[str, int]:
    """Run one step as if every row sampled token 1 and kept up to `accepted` drafts; how many tokens each row ran."""
    rows, batch = scheduler.schedule(lookahead=lookahead)
    for row, share in zip(rows, batch.rows, strict=True):
        kept = min(accepted, share.num_drafts)
        scheduler.advance(row, len(share.token_ids) + kept, [1] * (kept + 1) if share.samples else [])
    scheduler.check_integrity()
    ran = {row.request.request_id: len(share.token_ids) for row, share in zip(rows, batch.rows, strict=True)}
    num_drafts = sum(share.num_drafts for share in batch.rows)
    assert sum(ran.values()) + num_drafts <= scheduler.max_batch_tokens
    return ran


def test_rows_run_in_arrival_order() -> None:
    scheduler = make_scheduler()
    for name in "cab":
        add(scheduler, name, 3)
    assert list(step(scheduler)) == ["c", "a", "b"]
    assert list(step(scheduler)) == ["c", "a", "b"]


def test_a_long_prompt_runs_in_chunks_within_the_budget() -> None:
    scheduler = make_scheduler(max_batch_tokens=8)
    row = add(scheduler, "long", 20)
    assert [step(scheduler)["long"] for _ in range(4)] == [8, 8, 4, 1]
    assert len(row.output_ids) == 2


def test_a_long_prompt_does_not_stall_decoding_rows() -> None:
    scheduler = make_scheduler(max_batch_tokens=8)
    add(scheduler, "early", 3)
    step(scheduler)
    add(scheduler, "long", 30, first=100)
    assert step(scheduler) == {"early": 1, "long": 7}


def test_only_the_last_token_of_a_row_samples() -> None:
    scheduler = make_scheduler(max_batch_tokens=4)
    add(scheduler, "a", 6)
    _, batch = scheduler.schedule()
    assert not batch.rows[0].samples
    scheduler.advance(scheduler.running[0], 4, [])
    _, batch = scheduler.schedule()
    assert batch.rows[0].samples
    assert list(batch.rows[0].token_ids) == [6, 7]


def test_no_more_rows_run_than_allowed() -> None:
    scheduler = make_scheduler(num_blocks=64, max_rows=2)
    for index in range(5):
        add(scheduler, str(index), 3, first=index * 50)
    assert list(step(scheduler)) == ["0", "1"]
    assert len(scheduler.waiting) == 3


def test_a_row_is_admitted_only_when_its_prompt_fits_beside_the_others() -> None:
    scheduler = make_scheduler(num_blocks=4)  # 16 tokens
    add(scheduler, "a", 8)
    add(scheduler, "b", 12, first=100)
    assert list(step(scheduler)) == ["a"]


def test_the_youngest_row_gives_way_when_the_pool_is_full_and_comes_back() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=False)
    old = add(scheduler, "old", 7)
    young = add(scheduler, "young", 7, first=100)
    for _ in range(6):
        step(scheduler)
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert list(scheduler.waiting) == [young]
    assert young.table.block_ids == []
    scheduler.remove(old)
    tokens_before = list(young.output_ids)
    assert step(scheduler)["young"] == 7 + len(tokens_before)
    assert young.output_ids[: len(tokens_before)] == tokens_before


def test_a_preempted_row_goes_before_those_that_never_ran() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=False)
    add(scheduler, "old", 7)
    young = add(scheduler, "young", 7, first=100)
    step(scheduler)
    add(scheduler, "new", 7, first=200)
    while not young.num_preemptions:
        step(scheduler)
    assert [row.request.request_id for row in scheduler.waiting] == ["young", "new"]


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "preempted"])
def test_a_row_can_be_removed_in_any_phase_and_every_block_comes_back(phase: str) -> None:
    scheduler = make_scheduler(num_blocks=5, max_batch_tokens=4, max_rows=2, prefix_caching=False)
    other = add(scheduler, "other", 7)
    row = add(scheduler, "row", 7, first=100)
    if phase == "prefill":
        step(scheduler)
        step(scheduler)
    elif phase == "decode":
        while not row.output_ids:
            step(scheduler)
    elif phase == "preempted":
        while not row.num_preemptions:
            step(scheduler)
    scheduler.remove(row)
    scheduler.check_integrity()
    scheduler.remove(other)
    assert scheduler.blocks.num_available == 5
    assert not scheduler.has_work


def test_an_equal_prompt_runs_only_what_the_cache_does_not_hold() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, "first", 10)
    step(scheduler)
    scheduler.remove(first)
    second = add(scheduler, "second", 10)
    assert step(scheduler) == {"second": 2}
    assert second.cached_tokens == 8


def test_only_rows_that_may_exit_and_have_one_token_to_run_draft() -> None:
    scheduler = make_scheduler(max_batch_tokens=32, drafts=3)
    add(scheduler, "exits", 5, policy=EXITS)
    add(scheduler, "full", 5, first=50)
    _, prompts = scheduler.schedule()
    assert [share.num_drafts for share in prompts.rows] == [0, 0]
    step(scheduler)
    _, batch = scheduler.schedule()
    assert [share.num_drafts for share in batch.rows] == [3, 0]


def test_no_row_drafts_past_its_last_token() -> None:
    scheduler = make_scheduler(drafts=5)
    add(scheduler, "r", 3, policy=EXITS, max_tokens=4)
    step(scheduler)
    _, batch = scheduler.schedule()
    assert batch.rows[0].num_drafts == 2, "three tokens are left, and the deep pass gives one of them"


def test_drafts_preempt_nobody_and_shrink_to_what_the_pool_has() -> None:
    scheduler = make_scheduler(num_blocks=3, drafts=6, prefix_caching=False)
    old = add(scheduler, "old", 4, policy=EXITS)
    young = add(scheduler, "young", 3, policy=EXITS, first=100)
    step(scheduler)
    _, batch = scheduler.schedule()
    assert [share.num_drafts for share in batch.rows] == [3, 0], "one block of four is left, and the old row has it"
    assert old.num_preemptions == young.num_preemptions == 0


def judge(scheduler: Scheduler, length: int, answer: int = 0) -> Row | None:
    """`length` tokens, the last of which are those of the answer."""
    request = make_request(range(200, 200 + length), request_id="judge", max_tokens=1)
    return scheduler.add_judge(replace(request, scores_from=length - answer))


def test_a_row_that_judges_starts_only_in_what_nobody_needs() -> None:
    scheduler = make_scheduler(num_blocks=8, max_rows=2, prefix_caching=False)
    assert judge(scheduler, 33) is None, "nine blocks"
    add(scheduler, "waits", 3)
    assert judge(scheduler, 3) is None, "somebody waits"
    step(scheduler)
    assert judge(scheduler, 13) is None, "four blocks are left for the row that runs"
    assert judge(scheduler, 12) is not None
    assert judge(scheduler, 3) is None, "one at a time"
    scheduler = make_scheduler(max_rows=1)
    add(scheduler, "only", 3)
    step(scheduler)
    assert judge(scheduler, 3) is None, "no slot is left"


def test_a_row_that_judges_runs_in_the_budget_that_others_leave_and_stays_the_last() -> None:
    scheduler = make_scheduler(num_blocks=32, max_batch_tokens=8, prefix_caching=False)
    row = judge(scheduler, 12)
    assert step(scheduler) == {"judge": 8}
    add(scheduler, "client", 7)
    assert step(scheduler) == {"client": 7, "judge": 1}
    assert scheduler.running[-1] is row is scheduler.judging
    assert scheduler.num_running == 1


def test_a_row_that_judges_runs_in_short_pieces_whatever_the_budget() -> None:
    scheduler = make_scheduler(num_blocks=200, max_batch_tokens=2048, prefix_caching=False)
    judge(scheduler, 600, answer=40)
    assert [step(scheduler)["judge"] for _ in range(6)] == [256, 256, 48, 16, 16, 8], "the answer as if decoded"


@pytest.mark.parametrize("lacks", ["a slot", "blocks", "blocks for its next token", "blocks for drafts"])
def test_a_row_that_judges_gives_way_to_a_request_that_lacks(lacks: str) -> None:
    drafts = 6 if lacks == "blocks for drafts" else 0
    max_rows = 1 if lacks == "a slot" else 8
    scheduler = make_scheduler(num_blocks=8, max_rows=max_rows, drafts=drafts, prefix_caching=False)
    if lacks in ("a slot", "blocks"):
        judging = judge(scheduler, 12)
        client = add(scheduler, "client", 24)
    else:
        client = add(scheduler, "client", 4, policy=EXITS, max_tokens=40)
        step(scheduler)
        judging = judge(scheduler, 12)
    assert judging is not None
    while True:
        rows, batch = scheduler.schedule()
        if scheduler.judging is None:
            break
        assert rows == [client, judging]
        scheduler.advance(client, 1, [1])
    assert rows == scheduler.running == [client]
    assert batch.rows[0].num_drafts == drafts
    assert client.num_tokens + drafts > (0 if lacks == "a slot" else 20), "all that the judge left was in use"
    assert scheduler.num_preemptions == 0
    assert not scheduler.waiting
    scheduler.check_integrity()


def test_with_lookahead_decoding_rows_get_blocks_for_the_next_step_too() -> None:
    scheduler = make_scheduler(num_blocks=16, drafts=2, prefix_caching=False)
    talks = add(scheduler, "talks", 3, policy=EXITS, max_tokens=50)
    step(scheduler)
    add(scheduler, "prompt", 6, first=100)
    _, batch = scheduler.schedule(lookahead=1)
    assert batch.allows_lookahead
    # 4 tokens; this step may run 2 drafts more, the next one a token and 2 drafts behind the 3 that this one gives.
    assert len(talks.table.block_ids) * 4 >= 4 + 2 + 3
    assert len(batch.rows[1].table.block_ids) == 2, "a prompt has what it needs"


def test_blocks_for_the_next_step_are_given_only_while_every_row_can_have_one_more() -> None:
    scheduler = make_scheduler(num_blocks=5, drafts=0, prefix_caching=False)
    rows = [add(scheduler, name, 3, first=first, max_tokens=50) for name, first in (("old", 2), ("young", 100))]
    step(scheduler)  # 4 tokens each, and 4 slots
    scheduler.schedule(lookahead=1)
    assert [len(row.table.block_ids) for row in rows] == [2, 1], "three were left, and two must be"
    assert [row.num_preemptions for row in rows] == [0, 0]


@pytest.mark.parametrize(("num_blocks", "expected"), [(60, [7, 7]), (13, [5, 5]), (9, [3, 3]), (7, [3, 2])])
def test_blocks_for_several_cycles_are_given_as_far_as_all_rows_can_have_them(
    num_blocks: int, expected: list[int]
) -> None:
    """Four tokens, three drafts, and five cycles of four tokens behind them: seven blocks of each row."""
    scheduler = make_scheduler(num_blocks=num_blocks, drafts=3, prefix_caching=False)
    rows = [add(scheduler, n, 3, first=f, max_tokens=50, policy=EXITS) for n, f in (("old", 2), ("young", 100))]
    step(scheduler)
    scheduler.schedule(lookahead=5)
    assert [len(row.table.block_ids) for row in rows] == expected
    assert scheduler.blocks.num_available >= len(rows)
    assert [row.num_preemptions for row in rows] == [0, 0]


def test_while_somebody_waits_for_blocks_rows_get_them_for_one_cycle_beforehand() -> None:
    scheduler = make_scheduler(num_blocks=14, drafts=3, prefix_caching=False)
    talks = add(scheduler, "talks", 3, max_tokens=50, policy=EXITS)
    step(scheduler)
    waits = add(scheduler, "waits", 50, first=100)
    scheduler.schedule(lookahead=5)
    assert list(scheduler.waiting) == [waits]
    assert len(talks.table.block_ids) == 3, "four tokens, three drafts, and four tokens behind them"


def test_drafts_and_a_prompt_share_the_budget() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batch_tokens=16, drafts=100)
    add(scheduler, "talks", 3, policy=EXITS, max_tokens=100)
    step(scheduler)
    add(scheduler, "long", 40, first=100)
    _, batch = scheduler.schedule()
    assert batch.rows[0].num_drafts == 11
    assert len(batch.rows[1].token_ids) == 4, "a quarter of the budget is the prompt's, whatever others would draft"


def test_rows_that_skip_layers_draft_what_they_can_whatever_is_planned() -> None:
    scheduler = make_scheduler(drafts=0)
    scheduler.max_drafts = 4
    add(scheduler, "fast", 3, policy=FAST)
    add(scheduler, "ends soon", 3, policy=FAST, first=50, max_tokens=4)
    add(scheduler, "verified", 3, policy=EXITS, first=100)
    step(scheduler)
    _, batch = scheduler.schedule()
    assert [share.num_drafts for share in batch.rows] == [4, 2, 0]


def test_rows_that_skip_layers_share_a_token_budget_that_ends_and_still_skip() -> None:
    scheduler = make_scheduler(num_blocks=64, max_rows=8, max_batch_tokens=32, drafts=2)
    scheduler.max_drafts = 5
    for row in range(7):
        add(scheduler, f"fast {row}", 3, policy=FAST, first=10 * row + 2)
    add(scheduler, "verified", 3, policy=EXITS, first=100)
    step(scheduler)
    _, batch = scheduler.schedule()
    assert [share.num_drafts for share in batch.rows] == [3, 3, 3, 3, 3, 3, 3, 2]


def test_a_row_that_gives_way_after_it_was_given_its_share_does_not_run() -> None:
    scheduler = make_scheduler(num_blocks=2, prefix_caching=False)
    old, young = add(scheduler, "old", 3), add(scheduler, "young", 3, first=100)
    scheduler.running = [old, young]
    scheduler.waiting.clear()
    for row in (old, young):
        scheduler.blocks.allocate(row.table, 4)
        scheduler.advance(row, 3, [1])
    scheduler.advance(old, 0, [1])  # two tokens to run, so it comes after the young row, and needs a block more
    rows, batch = scheduler.schedule()
    assert rows == [old]
    assert [share.token_ids for share in batch.rows] == [[1, 1]]
    assert list(scheduler.waiting) == [young]
    scheduler.check_integrity()


def prefilling_ahead(**settings: Any) -> Scheduler:
    scheduler = make_scheduler(**settings)
    scheduler.prefills_ahead = True
    return scheduler


def test_a_prompt_that_prefills_ahead_runs_and_its_row_decodes_as_soon_as_one_before_it_ends() -> None:
    scheduler = prefilling_ahead(num_blocks=64, max_rows=2)
    rows = [add(scheduler, name, 5, first=100 * number, max_tokens=20) for number, name in enumerate("abcd")]
    assert step(scheduler) == {"a": 5, "b": 5, "c": 5}, "one prefills ahead for two slots"
    assert step(scheduler) == {"a": 1, "b": 1}
    assert len(rows[2].output_ids) == 1, "its first token is known"
    scheduler.remove(rows[0])
    assert step(scheduler) == {"b": 1, "c": 1, "d": 5}


def test_without_prefill_ahead_no_row_is_admitted_before_one_ends() -> None:
    scheduler = make_scheduler(num_blocks=64, max_rows=2)
    for number, name in enumerate("abc"):
        add(scheduler, name, 5, first=100 * number, max_tokens=20)
    assert step(scheduler) == {"a": 5, "b": 5}


def test_more_slots_let_more_rows_prefill_ahead() -> None:
    scheduler = prefilling_ahead(num_blocks=400, max_rows=17, max_batch_tokens=100)
    for number in range(30):
        add(scheduler, str(number), 2, first=10 * number, max_tokens=20)
    assert len(step(scheduler)) == 17 + 3


def test_a_row_prefills_ahead_only_where_running_rows_have_blocks_for_a_while() -> None:
    scheduler = prefilling_ahead(num_blocks=12, max_rows=2, prefix_caching=False)
    for number, name in enumerate("abc"):
        add(scheduler, name, 5, first=100 * number, max_tokens=20)
    assert step(scheduler) == {"a": 5, "b": 5}, "eight are left, four of them for each of the two, and none for a third"


def test_the_planner_is_asked_once_per_step_for_the_rows_that_may_draft() -> None:
    asked: list[tuple[int, int]] = []
    scheduler = make_scheduler(num_blocks=40, max_rows=4, max_batch_tokens=5)
    scheduler.plan_drafts = lambda drafting, rows, _: asked.append((drafting, rows)) or 3  # type: ignore[func-returns-value]
    for name, policy in (("a", EXITS), ("b", None), ("c", EXITS)):
        add(scheduler, name, 1, policy=policy)
    step(scheduler)
    asked.clear()
    _, batch = scheduler.schedule()
    assert [share.num_drafts for share in batch.rows] == [1, 0, 1], "the token budget has no more"
    assert asked == [(2, 3)]


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps and removals: blocks add up, rows advance in order, and all of them end."""

    num_blocks, max_batch_tokens, prefills_ahead, lookahead = 9, 8, False, 0

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_blocks": self.num_blocks, "max_batch_tokens": self.max_batch_tokens}
        self.scheduler = make_scheduler(**sizes, max_rows=4, drafts=3)
        self.scheduler.prefills_ahead = self.prefills_ahead
        self.scheduler.max_drafts = 2
        self.rows: list[Row] = []
        self.count = 0

    @rule(
        prompt_len=st.integers(1, 20),
        max_tokens=st.integers(1, 14),
        first=st.sampled_from([2, 3, 100]),
        policy=st.sampled_from([None, EXITS, FAST]),
    )
    def arrive(self, prompt_len: int, max_tokens: int, first: int, policy: ExitPolicy | None) -> None:
        if prompt_len + max_tokens <= 36:
            self.count += 1
            params: dict[str, Any] = {"max_tokens": max_tokens, "policy": policy}
            self.rows.append(add(self.scheduler, str(self.count), prompt_len, first=first, **params))

    @rule(accepted=st.integers(0, 3))
    def step(self, accepted: int = 0) -> None:
        said = {row.request.request_id: len(row.output_ids) for row in self.rows if row.output_ids}
        shares = step(self.scheduler, accepted, lookahead=self.lookahead)
        talked = [row for row in self.rows if len(row.output_ids) > said.get(row.request.request_id, 999)]
        assert len(talked) <= self.scheduler.max_rows
        assert bool(shares) == bool(self.rows), "a step with rows must move one"
        assert sum(shares.values()) <= self.scheduler.max_batch_tokens, "drafts included"
        for row in [row for row in self.rows if len(row.output_ids) >= row.request.params.max_tokens]:
            self.scheduler.remove(row)
            self.rows.remove(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.scheduler.remove(row)
        self.rows.remove(row)

    @invariant()
    def blocks_add_up_and_order_is_kept(self) -> None:
        self.scheduler.check_integrity()
        order = [int(row.request.request_id) for row in (*self.scheduler.running, *self.scheduler.waiting)]
        assert order == sorted(order)

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.rows:
                break
            self.step()
        assert not self.rows, "a row never ended"
        assert self.scheduler.blocks.num_available == self.num_blocks


class PrefillAheadMachine(SchedulerMachine):
    num_blocks, prefills_ahead = 40, True


class LookaheadMachine(SchedulerMachine):
    num_blocks, max_batch_tokens, lookahead = 30, 24, 1


class LongLookaheadMachine(LookaheadMachine):
    num_blocks, lookahead = 20, 5


TestSchedulerMachine, TestPrefillAheadMachine = SchedulerMachine.TestCase, PrefillAheadMachine.TestCase
TestLookaheadMachine, TestLongLookaheadMachine = LookaheadMachine.TestCase, LongLookaheadMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefillAheadMachine.settings = TestLookaheadMachine.settings = TestSchedulerMachine.settings
TestLongLookaheadMachine.settings = TestSchedulerMachine.settings


class Always(SuffixDrafts):
    """Six tokens for every row."""

    def propose(self, row: Row) -> SuffixDraft | None:
        return SuffixDraft([5, 6, 7, 8, 9, 10], 0.9)


def with_suffixes(scheduler: Scheduler, num_suffix: int = 7) -> Scheduler:
    """Always `num_suffix` suffix drafts, whatever they cost."""

    class Planner(DraftPlanner):
        max_suffix_rows = 64

        def plan_suffix(self, *of: object) -> SuffixPlan:
            return SuffixPlan(0, num_suffix)

    planner = Planner(0, Acceptance.prior((), 0))
    scheduler.suffixes = SuffixSource(Always(), planner)
    return scheduler


def decoding(scheduler: Scheduler, **params: Any) -> Row:
    row = scheduler.add(make_request(policy=ExitPolicy("verified"), **params), None)
    scheduler.schedule()
    scheduler.advance(row, 3, [9])
    return row


def test_suffix_drafts_get_blocks_and_such_a_step_is_not_launched_ahead() -> None:
    scheduler = with_suffixes(make_scheduler())
    row = decoding(scheduler)
    _, batch = scheduler.schedule(lookahead=2)
    assert batch.rows[0].suffix_drafts == [5, 6, 7, 8, 9, 10]
    assert batch.rows[0].num_drafts == 6
    assert not batch.allows_lookahead
    assert len(row.table.block_ids) * scheduler.blocks.block_size >= row.num_tokens + 6


def test_suffix_drafts_shrink_to_the_answer_the_budget_and_the_pool() -> None:
    scheduler = with_suffixes(make_scheduler())
    decoding(scheduler, max_tokens=4)
    assert scheduler.schedule()[1].rows[0].suffix_drafts == [5, 6]
    tight = with_suffixes(make_scheduler(max_batch_tokens=5, max_rows=5))
    decoding(tight)
    assert tight.schedule()[1].rows[0].suffix_drafts == [5, 6, 7]
    full = with_suffixes(make_scheduler(num_blocks=2))
    decoding(full)
    assert full.schedule()[1].rows[0].suffix_drafts == [5, 6, 7, 8]


def test_only_rows_in_mode_verified_have_suffix_drafts() -> None:
    scheduler = with_suffixes(make_scheduler())
    row = scheduler.add(make_request(), None)
    scheduler.schedule()
    scheduler.advance(row, 3, [9])
    assert not scheduler.schedule()[1].rows[0].suffix_drafts

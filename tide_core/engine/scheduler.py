"""Which rows run next, and with how many tokens. Plain Python values only.

There is no separate prefill and decode phase: a row has tokens (prompt, then output) and a valid length, the number of
tokens that have K and V. A step runs some of the tokens after the valid length. A row whose last token is in the step
samples the next one. A prompt longer than the budget runs in chunks; a preempted row has lost its blocks, so its tokens
run again.

Rows are served in arrival order. Within the token budget, rows that need one token come first, so that a long prompt
never stalls decoding rows; the rest goes to prompts, oldest first. When the pool is full the youngest row gives up its
blocks, so the oldest always advances and every row ends.

Prefill-ahead: where prompts run concurrently with decoding rows, a few rows beyond `max_rows` are admitted. Their
prompts run, and each starts to decode as soon as a row before it ends. They are the youngest, so they are the first to
lose blocks and budget.

A row that may exit drafts some tokens before its deep pass. The planner decides how many, once per step; the number is
limited by what the row can use, by free blocks, and by the token budget, of which a part is reserved for prompts.
Drafts preempt no row. A row whose last tokens have a match may use suffix drafts instead.

One more row may run in what nobody else needs: it judges an answer (`judge.py`). It starts if nobody waits, is always
the youngest, and gives way as soon as a request lacks its slot or its blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tide_core.batch import FEW_QUERIES, RowStep, ScheduledBatch
from tide_core.errors import EngineError
from tide_core.exits.cost import ROWS_APART, DraftPlanner, RowAcceptance
from tide_core.exits.suffix import SuffixDraft, SuffixDrafts
from tide_core.kv.block_manager import BlockManager, BlockTable
from tide_core.request import Request
from tide_core.row import Row

PROMPT_SHARE = 0.25
"""Share of the token budget that drafts leave free while a prompt has tokens to run."""
ROWS_PER_PREFILL_AHEAD, SPARE_BLOCKS_PER_ROW = 8, 4
"""Row slots for each row that prefills ahead; and blocks that must be left for each running row before one is admitted,
or the row that judges, so that it is not preempted at once."""

JUDGE_CHUNK = 256
"""Most tokens of the prompt of an answer that is judged in a step: streams beside it are held up little."""


class SuffixSource:
    """Suffix drafts for the rows of a step, if the planner predicts that they pay."""

    def __init__(self, drafts: SuffixDrafts, planner: DraftPlanner) -> None:
        self.drafts, self._planner = drafts, planner

    def plan(
        self, missing: dict[Row, int], num_drafting: int, num_decoding: int, planned: int
    ) -> tuple[int, dict[Row, Sequence[int]]]:
        """The number of drafts by exits of rows without suffix drafts, and the suffix drafts of the others. `planned`
        is the number of drafts if no row has suffix drafts."""
        if num_decoding > self._planner.max_suffix_rows:
            return planned, {}
        found: dict[Row, SuffixDraft] = {}
        for row, num in missing.items():
            if num == 1 and row.policy.mode in ("verified", "bounded") and row.request.may_copy:
                draft = self.drafts.propose(row)
                if draft is not None:
                    found[row] = draft
        if not found:
            return planned, {}
        drafts, num_suffix = self._planner.plan_suffix(
            num_drafting, num_decoding, [each.chance for each in found.values()]
        )
        if not num_suffix:
            return planned, {}
        chosen = {row: _usable(row, draft.token_ids[:num_suffix]) for row, draft in found.items()}
        return drafts, {row: token_ids for row, token_ids in chosen.items() if token_ids}


class Scheduler:
    """Two queues in arrival order, a token budget and the block pool."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_rows: int,
        max_batch_tokens: int,
        plan_drafts: Callable[[int, int, Sequence[float]], int] | None = None,
        max_drafts: int = 0,
        prefills_ahead: bool = False,
        suffixes: SuffixSource | None = None,
    ) -> None:
        """`plan_drafts(num_drafting, num_rows, factors)`: number of drafts of each row that may draft, in a step of
        `num_rows`; with few rows `factors` has the factor of each (`RowAcceptance`).

        Rows that skip layers (mode fast) make up to `max_drafts` whatever the load, because each draft saves work;
        fewer where the token budget ends. With `prefills_ahead` the prompts of a few rows beyond `max_rows` run before
        these rows have a slot. `suffixes` proposes and plans suffix drafts."""
        self.blocks = blocks
        self.max_rows = max_rows
        self.prefills_ahead = prefills_ahead
        self.max_batch_tokens = max_batch_tokens
        self.plan_drafts = plan_drafts
        self.max_drafts = max_drafts
        self.suffixes = suffixes
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.judging: Row | None = None
        """The row that judges an answer; it is the last of those that run."""
        self.num_preemptions = 0
        self._refused: tuple[Row, int, int] | None = None

    def add(self, request: Request, namespace: bytes | None) -> Row:
        """Put a request at the end of the queue. It must fit the pool alone: the caller has checked."""
        row = Row(request, namespace, BlockTable(), RowAcceptance())
        self.waiting.append(row)
        return row

    def add_judge(self, request: Request) -> Row | None:
        """Run a request in what nobody else needs; None if there is too little of it. It gives way without notice:
        `judging` is another row then, or none."""
        row = Row(request, None, BlockTable(), RowAcceptance())
        reserve = len(self.running) * SPARE_BLOCKS_PER_ROW
        if self.waiting or self.judging is not None or len(self.running) >= self.max_rows:
            return None
        if not self.blocks.can_allocate(row.table, row.num_tokens, reserve=reserve):
            return None
        self.blocks.allocate(row.table, row.num_tokens)
        self.running.append(row)
        self.judging = row
        return row

    def remove(self, row: Row) -> None:
        """Take a row out, whatever its phase, and give its blocks back."""
        if row is self.judging:
            self._give_way()
            return
        if row in self.running:
            self.running.remove(row)
        else:
            self.waiting.remove(row)
        self.blocks.free(row.table)
        if self.suffixes is not None:
            self.suffixes.drafts.remove(row)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return max(0, len(self.running) - (self.judging is not None))  # another thread may ask

    def schedule(self, lookahead: int = 0) -> tuple[list[Row], ScheduledBatch]:
        """Choose the next step: rows and their share of it, in arrival order. Empty only when there is no row.

        With `lookahead`, decoding rows get blocks for that many further cycles where the pool has them, so that a
        runner can launch those before it has read this one."""
        self._admit()
        missing = {row: row.num_missing for row in self.running[: self.max_rows]}
        missing |= {row: num for row in self.running[self.max_rows :] if (num := row.num_missing) > 1}
        drafting = self._drafting(missing)
        wanted, suffix_drafts = self._plan(drafting, missing)
        shares = self._shares(missing, self.max_batch_tokens - sum(wanted.values()))
        judging = self.judging
        drafts = self._allocate_drafts(wanted, shares)
        if judging is not None and self.judging is None:  # it gave way to drafts
            shares.pop(judging, None)
        if suffix_drafts:  # the next step depends on this one's tokens, so it cannot be launched ahead
            lookahead = 0
        if lookahead:
            self._allocate_lookahead(lookahead, shares, missing, drafts)
        steps = [
            _step(row, share, missing[row], drafts.get(row, 0), suffix_drafts.get(row, ()))
            for row, share in shares.items()
        ]
        return list(shares), ScheduledBatch(tuple(steps), allows_lookahead=lookahead > 0)

    def advance(self, row: Row, num_valid: int, token_ids: Sequence[int]) -> None:
        """Record by how much a row's valid length has grown, and the tokens it has gained."""
        row.output_ids += token_ids
        row.table.advance(num_valid)
        if row.namespace is not None:
            self.blocks.seal(row.table, row.tokens, row.namespace, most_tokens=row.num_shareable)

    def check_integrity(self) -> None:
        """Recount the pool against all rows."""
        self.blocks.check_integrity([row.table for row in (*self.running, *self.waiting)])

    def _admit(self) -> None:
        most = self.max_rows + (-(-self.max_rows // ROWS_PER_PREFILL_AHEAD) if self.prefills_ahead else 0)
        while self.waiting and (len(self.running) < most or self.judging is not None):
            if len(self.running) >= self.max_rows and self._give_way():
                continue
            row = self.waiting[0]
            situation = (row, self.blocks.num_available, len(self.running))
            if situation == self._refused and not self._give_way():
                return  # nothing has changed since it did not fit
            if row.namespace is not None:
                row.table = self.blocks.match_prefix(row.tokens(0, row.num_shareable), row.namespace)
            # One block is left for each row that runs: admitting this one must not preempt another at once.
            reserve = len(self.running) * (1 if len(self.running) < self.max_rows else SPARE_BLOCKS_PER_ROW)
            if not self.blocks.can_allocate(row.table, row.num_tokens, reserve=reserve):
                self.blocks.free(row.table)
                if self._give_way():
                    continue
                self._refused = situation
                return
            self.blocks.allocate(row.table, row.num_tokens)
            if not row.num_preemptions:
                row.cached_tokens = row.table.length
            self.running.insert(self.num_running, self.waiting.popleft())

    def _shares(self, missing: dict[Row, int], budget: int) -> dict[Row, int]:
        """How many tokens each row runs, with blocks for them, in arrival order."""
        shares: dict[Row, int] = {}
        by_need = [row for row, num in missing.items() if num <= 1]
        if len(by_need) < len(missing):
            by_need += [row for row, num in missing.items() if num > 1]
        num_preemptions, judging, has_capacity = self.num_preemptions, self.judging, self.blocks.has_capacity
        for row in by_need:
            preempted = self.num_preemptions != num_preemptions or self.judging is not judging
            if preempted and row not in self.running:
                continue  # preempted for the sake of an earlier row of this loop
            share = min(missing[row], budget, _judged_at_once(row) if row is self.judging else budget)
            num_tokens = row.table.length + share
            if share and (has_capacity(row.table, num_tokens) or self._free_blocks_for(row, num_tokens)):
                shares[row] = share
                budget -= share
        return {row: shares[row] for row in self.running if row in shares}

    def _free_blocks_for(self, row: Row, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens of the row, at the expense of younger rows; False if it gave way itself."""
        if not self.blocks.can_allocate(row.table, num_tokens):
            for other in self.running:  # blocks that were meant for drafts and are not needed
                self.blocks.trim(other.table, other.num_tokens)
        while not self.blocks.can_allocate(row.table, num_tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is row:
                return False
        self.blocks.allocate(row.table, num_tokens)
        return True

    def _drafting(self, missing: dict[Row, int]) -> dict[Row, tuple[int, int]]:
        """The rows that may draft: the fewest drafts of each, which it makes whatever is planned where the token budget
        allows, and the most it can use."""
        drafting: dict[Row, tuple[int, int]] = {}
        for row, num in missing.items():
            if row.policy.may_exit and num == 1:
                most = row.request.params.max_tokens - len(row.output_ids) - 1  # the deep pass gives it one token more
                least = 0
                if row.policy.skips_layers:
                    least = most = min(most, self.max_drafts)
                if most > 0:
                    drafting[row] = least, most
        return drafting

    def _plan(
        self, drafting: dict[Row, tuple[int, int]], missing: dict[Row, int]
    ) -> tuple[dict[Row, int], dict[Row, Sequence[int]]]:
        """The number of drafts of each row, within the token budget; and the suffix drafts of rows that have some."""
        if self.plan_drafts is None:
            return {}, {}
        num_decoding = sum([num == 1 for num in missing.values()])
        budget = self.max_batch_tokens - num_decoding
        if num_decoding < len(missing):
            budget -= int(self.max_batch_tokens * PROMPT_SHARE)
        factors = [row.acceptance.factor for row in drafting] if len(drafting) <= ROWS_APART else ()
        planned = self.plan_drafts(len(drafting), num_decoding, factors) if drafting else 0
        suffix_drafts: dict[Row, Sequence[int]] = {}
        if self.suffixes is not None:
            planned, suffix_drafts = self.suffixes.plan(missing, len(drafting), num_decoding, planned)
        most_each = max([planned, *(least for least, _ in drafting.values())])
        while True:
            wanted = {row: min(least or min(planned, most), most_each) for row, (least, most) in drafting.items()}
            wanted |= {row: len(token_ids) for row, token_ids in suffix_drafts.items()}
            if sum(wanted.values()) <= budget:
                return wanted, suffix_drafts
            if suffix_drafts:
                longest = max(map(len, suffix_drafts.values())) // 2
                suffix_drafts = (
                    {row: token_ids[:longest] for row, token_ids in suffix_drafts.items()} if longest else {}
                )
            elif most_each <= 0:
                return {}, {}
            else:
                most_each -= 1

    def _allocate_drafts(self, wanted: dict[Row, int], shares: dict[Row, int]) -> dict[Row, int]:
        """Allocate blocks for the drafts of each row that runs; with too few free blocks, fewer drafts."""
        drafts: dict[Row, int] = {}
        for row, useful in wanted.items():
            if row not in shares:
                continue
            if not self.blocks.has_capacity(row.table, row.num_tokens + useful):
                while useful > 0 and not self.blocks.can_allocate(row.table, row.num_tokens + useful):
                    useful -= not self._give_way()
                self.blocks.allocate(row.table, row.num_tokens + useful)
            if useful > 0:
                drafts[row] = useful
        return drafts

    def _allocate_lookahead(
        self, lookahead: int, shares: dict[Row, int], missing: dict[Row, int], drafts: dict[Row, int]
    ) -> None:
        """Allocate blocks for the cycles after this one to decoding rows. One free block stays reserved for every
        running row. All rows get blocks for the same number of cycles, the largest that fits; if not even one fits for
        all, as many rows as possible get blocks for one."""
        blocks, reserve = self.blocks, len(self.running)
        is_short = self._refused is not None and bool(self.waiting) and self._refused[0] is self.waiting[0]
        decoding = [row for row in shares if missing[row] == 1]
        for ahead in range(1 if is_short else lookahead, 0, -1):
            needs = [(row, row.num_tokens + drafts.get(row, 0) + ahead * (drafts.get(row, 0) + 1)) for row in decoding]
            growing = [(row, num_tokens) for row, num_tokens in needs if not blocks.has_capacity(row.table, num_tokens)]
            lacking = sum([blocks.blocks_for(num_tokens) - len(row.table.block_ids) for row, num_tokens in growing])
            if ahead == 1 or lacking + reserve <= blocks.num_available:
                break
        for row, num_tokens in growing:
            if not blocks.can_allocate(row.table, num_tokens, reserve=reserve):
                return
            blocks.allocate(row.table, num_tokens)

    def _give_way(self) -> bool:
        """End the row that judges, for a request; False if there is none."""
        row, self.judging = self.judging, None
        if row is None:
            return False
        self.running.remove(row)
        self.blocks.free(row.table)
        return True

    def _preempt(self, row: Row) -> None:
        if row is self.judging:
            self._give_way()
            return
        self.running.remove(row)
        self.blocks.free(row.table)
        row.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(row)


def _usable(row: Row, token_ids: Sequence[int]) -> Sequence[int]:
    """The suffix drafts that a row can emit: no more than `max_tokens` and its grammar allow."""
    request, output_ids = row.request, row.output_ids
    most = request.params.max_tokens - len(output_ids) - 1  # the deep pass gives it one token more
    if request.mask is not None and most > 0:
        try:
            most = min(most, request.mask.num_allowed(output_ids, token_ids))
        except EngineError:  # of its grammar: the step ends the row with it, here it would end all rows
            return ()
    return token_ids[: max(most, 0)]


def _step(row: Row, share: int, num_missing: int, num_drafts: int, suffix_drafts: Sequence[int]) -> RowStep:
    start = row.table.length
    output_ids = row.output_ids
    return RowStep(
        row.request,
        row.table,
        output_ids[-1:] if num_missing == 1 and output_ids else row.tokens(start, start + share),
        output_ids,
        share == num_missing,
        row.policy,
        num_drafts,
        suffix_drafts[:num_drafts],
        row.num_differing,
    )


def _judged_at_once(row: Row) -> int:
    """Most tokens of a row that judges in one step: the answer's in so small pieces that they have the bits that
    decoding gives them."""
    prompt_len, start = row.request.scores_from or 0, row.table.length
    return FEW_QUERIES if start >= prompt_len else min(JUDGE_CHUNK, prompt_len - start)

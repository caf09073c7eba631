"""Who runs next, and with how many tokens. Plain Python values only.

There are no phases here, only tokens catching up: a row has tokens (prompt, then what it generated) and a valid length,
and a step runs some of the tokens in between. A row whose last token is in the step samples the next one. A prompt
longer than the budget is run in chunks; a row that was preempted has lost its blocks and simply catches up again.

Rows are served in arrival order. Within the token budget, rows that need one token come first, so that a long prompt
never stalls those already talking; the rest goes to prompts, oldest first. When the pool is full the youngest row
gives up its blocks, so the oldest always moves forward and every row ends.

Where prompts run beside the rows that talk, a few more rows than may talk are let in on standby: their prompts are run,
and each goes on as soon as one before it ends. They are the youngest, so whatever is scarce is not theirs.

A row that may exit drafts some tokens before its step ends; how many is asked of the plan, once per step, and cut to
what the row can use, the pool has left, and a part of the budget that leaves prompts theirs. Drafts preempt nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tide_core.batch import RowStep, ScheduledBatch
from tide_core.kv.block_manager import BlockManager
from tide_core.quick import quick
from tide_core.request import Request
from tide_core.row import Row

PROMPT_SHARE = 0.25
"""Of the token budget, kept from drafts as long as a prompt is there to run."""
ROWS_OF_STANDBY, BLOCKS_BEFORE_STANDBY = 8, 4
"""Rows that may talk for each one on standby; and blocks that are left for each row that runs before one is let in, so
that it need not give up at once what was run for it."""

make_step = quick(RowStep)


class Scheduler:
    """Two queues in arrival order, a token budget and the block pool."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_rows: int,
        max_batch_tokens: int,
        plan_drafts: Callable[[int, int], int] | None = None,
        max_drafts: int = 0,
        runs_ahead: bool = False,
        cycles_ahead: Callable[[], int] = lambda: 1,
        keeps_standby: bool = False,
    ) -> None:
        """`plan_drafts(num_drafting, num_rows)`: drafts of each row that may make some, in a step of so many rows.

        Rows that skip layers save work with every draft, whatever the load: they make up to `max_drafts`. With
        `runs_ahead` rows are given blocks for `cycles_ahead()` cycles more than one where the pool has them, so that
        those can be begun before it is known what the first one gives. With `keeps_standby` prompts of rows beyond
        `max_rows` are run."""
        self.blocks = blocks
        self.max_rows = max_rows
        self.keeps_standby = keeps_standby
        self.max_batch_tokens = max_batch_tokens
        self.plan_drafts = plan_drafts
        self.max_drafts = max_drafts
        self.runs_ahead, self.cycles_ahead = runs_ahead, cycles_ahead
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.num_preemptions = 0
        self._refused: tuple[Row, int, int] | None = None
        self._planned: tuple[tuple[int, int], int] | None = None

    def add(self, request: Request, namespace: bytes | None) -> Row:
        """Put a request at the end of the queue. It must fit the pool alone: the caller has checked."""
        row = Row(request, namespace, self.blocks.new_table(), request.policy)
        self.waiting.append(row)
        return row

    def remove(self, row: Row) -> None:
        """Take a row out, whatever its phase, and give its blocks back."""
        if row in self.running:
            self.running.remove(row)
        else:
            self.waiting.remove(row)
        self.blocks.free(row.table)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> tuple[list[Row], ScheduledBatch]:
        """Choose the next step: rows and their share of it, in arrival order. Empty only when there is no row."""
        self._admit()
        self._planned = None
        return self._schedule_talk() or self._schedule_all()

    def _schedule_talk(self) -> tuple[list[Row], ScheduledBatch] | None:
        """The step in which all rows talk but those on standby, and the pool has blocks for all: what `_schedule_all`
        comes to then, in two looks at each row. None where there is something to decide."""
        rows, blocks, max_tokens = self.running[: self.max_rows], self.blocks, self.max_batch_tokens
        if not rows:
            return None
        prompts = [(row, num) for row in self.running[self.max_rows :] if (num := row.num_missing) > 1]
        if prompts:
            max_tokens -= sum([num for _, num in prompts])
            if not all([blocks.has_room(row.table, row.table.num_valid + num) for row, num in prompts]):
                return None
            max_tokens = min(max_tokens, self.max_batch_tokens - int(self.max_batch_tokens * PROMPT_SHARE))
        if len(rows) > max_tokens:
            return None
        useful: list[int] = []
        for row in rows:
            output_ids = row.output_ids
            if not output_ids or len(row.request.prompt_ids) + len(output_ids) - row.table.lengths[-1] != 1:
                return None
            policy, most = row.policy, 0
            if policy.may_exit:
                if policy.skips_layers:
                    return None
                most = row.request.params.max_tokens - len(output_ids) - 1
            useful.append(most)
        planned = self._ask(len(useful) - useful.count(0), len(rows))
        drafts = [planned if planned < most else most for most in useful] if planned > 0 else [0] * len(rows)
        if len(rows) + sum(drafts) > max_tokens:
            return None
        ahead, size = self._num_ahead() if self.runs_ahead else 0, blocks.block_size
        growing: list[tuple[Row, int]] = []
        steps: list[RowStep] = []
        lacking = len(self.running)  # one for each is kept
        for row, num_drafts in zip(rows, drafts, strict=True):
            request, table, output_ids = row.request, row.table, row.output_ids
            room = len(request.prompt_ids) + len(output_ids) + num_drafts + ahead * (num_drafts + 1)
            if room > len(table.block_ids) * size:
                growing.append((row, room))
                lacking += -(-room // size) - len(table.block_ids)
            steps.append(make_step(request, table, output_ids[-1:], output_ids, True, row.policy, num_drafts))
        if growing and lacking > blocks.num_available:
            return None
        for row, room in growing:
            blocks.allocate(row.table, room)
        for row, num in prompts:
            rows.append(row)
            steps.append(_step(row, num, num, 0))
        return rows, ScheduledBatch(tuple(steps), self.runs_ahead)

    def _schedule_all(self) -> tuple[list[Row], ScheduledBatch]:
        """The step by all the rules there are."""
        missing = {row: row.num_missing for row in self.running[: self.max_rows]}
        missing |= {row: num for row in self.running[self.max_rows :] if (num := row.num_missing) > 1}
        drafting = self._drafting(missing)
        planned, reserved = self._plan(drafting, missing)
        shares = self._shares(missing, self.max_batch_tokens - reserved)
        drafts = self._allocate_drafts(drafting, planned, shares)
        if self.runs_ahead:
            self._look_ahead(shares, missing, drafts)
        steps = [_step(row, share, missing[row], drafts.get(row, 0)) for row, share in shares.items()]
        return list(shares), ScheduledBatch(tuple(steps), self.runs_ahead)

    def advance(self, row: Row, num_valid: int, token_ids: Sequence[int]) -> None:
        """Record by how much a row's valid length has grown, and the tokens it has gained."""
        row.output_ids += token_ids
        row.table.advance_all(num_valid)
        if row.namespace is not None:
            self.blocks.seal(row.table, row.tokens, row.namespace)

    def check_integrity(self) -> None:
        """Recount the pool against all rows."""
        self.blocks.check_integrity([row.table for row in (*self.running, *self.waiting)])

    def _admit(self) -> None:
        most = self.max_rows + (-(-self.max_rows // ROWS_OF_STANDBY) if self.keeps_standby else 0)
        while self.waiting and len(self.running) < most:
            row = self.waiting[0]
            situation = (row, self.blocks.num_available, len(self.running))
            if situation == self._refused:
                return  # nothing has changed since it did not fit; looking up its prefix again would tell nothing new
            if row.namespace is not None:
                row.table = self.blocks.match_prefix(row.tokens(0, row.num_tokens), row.namespace)
            # One block is left for each row that runs: admitting this one must not preempt another at once.
            reserve = len(self.running) * (1 if len(self.running) < self.max_rows else BLOCKS_BEFORE_STANDBY)
            if not self.blocks.can_allocate(row.table, row.num_tokens, reserve=reserve):
                self.blocks.free(row.table)
                self._refused = situation
                return
            self.blocks.allocate(row.table, row.num_tokens)
            if not row.num_preemptions:
                row.cached_tokens = row.table.num_valid
            self.running.append(self.waiting.popleft())

    def _shares(self, missing: dict[Row, int], budget: int) -> dict[Row, int]:
        """How many tokens each row runs, with blocks for them, in arrival order."""
        shares: dict[Row, int] = {}
        by_need = [row for row, num in missing.items() if num <= 1]
        if len(by_need) < len(missing):
            by_need += [row for row, num in missing.items() if num > 1]
        num_preemptions, has_room = self.num_preemptions, self.blocks.has_room
        for row in by_need:
            if self.num_preemptions != num_preemptions and row not in self.running:
                continue  # preempted for the sake of an earlier row of this loop
            share = min(missing[row], budget)
            num_tokens = row.table.num_valid + share
            if share and (has_room(row.table, num_tokens) or self._make_room(row, num_tokens)):
                shares[row] = share
                budget -= share
        return {row: shares[row] for row in self.running if row in shares}

    def _make_room(self, row: Row, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens of the row, at the expense of younger rows; False if it gave way itself."""
        if not self.blocks.can_allocate(row.table, num_tokens):
            for other in self.running:  # what drafts were given and did not need
                self.blocks.trim(other.table, other.num_tokens)
        while not self.blocks.can_allocate(row.table, num_tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is row:
                return False
        self.blocks.allocate(row.table, num_tokens)
        return True

    def _drafting(self, missing: dict[Row, int]) -> dict[Row, tuple[int, int]]:
        """The rows that may draft: the fewest drafts of each, whatever is planned, and the most it can use."""
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

    def _plan(self, drafting: dict[Row, tuple[int, int]], missing: dict[Row, int]) -> tuple[int, int]:
        """Drafts of each row that may make some, -1 for none at all, and the part of the token budget they take."""
        if not drafting or self.plan_drafts is None:
            return 0, 0
        num_talking = sum([num == 1 for num in missing.values()])
        budget = self.max_batch_tokens - num_talking
        if num_talking < len(missing):
            budget -= int(self.max_batch_tokens * PROMPT_SHARE)
        planned = self._ask(len(drafting), num_talking)
        while True:
            reserved = sum([_num_drafts(planned, *limits) for limits in drafting.values()])
            if reserved <= budget:
                return planned, reserved
            if planned <= 0:
                return -1, 0
            planned -= 1

    def _ask(self, num_drafting: int, num_talking: int) -> int:
        """The plan for so many rows; asked once in a step."""
        if not num_drafting or self.plan_drafts is None:
            return 0
        if self._planned is None or self._planned[0] != (num_drafting, num_talking):
            self._planned = (num_drafting, num_talking), self.plan_drafts(num_drafting, num_talking)
        return self._planned[1]

    def _allocate_drafts(
        self, drafting: dict[Row, tuple[int, int]], planned: int, shares: dict[Row, int]
    ) -> dict[Row, int]:
        """Blocks for the drafts of each row that runs, as far as the pool has them."""
        drafts: dict[Row, int] = {}
        for row, limits in drafting.items() if planned >= 0 else ():
            if row not in shares:
                continue
            useful = _num_drafts(planned, *limits)
            if not self.blocks.has_room(row.table, row.num_tokens + useful):
                while useful > 0 and not self.blocks.can_allocate(row.table, row.num_tokens + useful):
                    useful -= 1
                self.blocks.allocate(row.table, row.num_tokens + useful)
            if useful > 0:
                drafts[row] = useful
        return drafts

    def _look_ahead(self, shares: dict[Row, int], missing: dict[Row, int], drafts: dict[Row, int]) -> None:
        """Blocks for the cycles behind this one, for rows that talk, as long as every row that runs can have one more:
        for as many as all can have, or else for one, of as many rows as can have it."""
        blocks, reserve = self.blocks, len(self.running)
        talking = [row for row in shares if missing[row] == 1]
        for ahead in range(self._num_ahead(), 0, -1):
            rooms = [(row, row.num_tokens + drafts.get(row, 0) + ahead * (drafts.get(row, 0) + 1)) for row in talking]
            growing = [(row, room) for row, room in rooms if not blocks.has_room(row.table, room)]
            lacking = sum([blocks.blocks_for(room) - len(row.table.block_ids) for row, room in growing])
            if ahead == 1 or lacking + reserve <= blocks.num_available:
                break
        for row, room in growing:
            if not blocks.can_allocate(row.table, room, reserve=reserve):
                return
            blocks.allocate(row.table, room)

    def _num_ahead(self) -> int:
        """Cycles to give blocks for beforehand; one while somebody waits because there are too few."""
        is_short = self._refused is not None and bool(self.waiting) and self._refused[0] is self.waiting[0]
        return 1 if is_short else max(1, self.cycles_ahead())

    def _preempt(self, row: Row) -> None:
        self.running.remove(row)
        self.blocks.free(row.table)
        row.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(row)


def _num_drafts(planned: int, least: int, most: int) -> int:
    return least or min(planned, most)


def _step(row: Row, share: int, num_missing: int, num_drafts: int) -> RowStep:
    start = row.table.num_valid
    output_ids = row.output_ids
    return make_step(
        row.request,
        row.table,
        output_ids[-1:] if num_missing == 1 and output_ids else row.tokens(start, start + share),
        output_ids,
        share == num_missing,
        row.policy,
        num_drafts,
    )

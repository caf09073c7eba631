"""Who runs next, and with how many tokens. Plain Python values only.

There are no phases here, only tokens catching up: a row has tokens (prompt, then what it generated) and a valid length,
and a step runs some of the tokens in between. A row whose last token is in the step samples the next one. A prompt
longer than the budget is run in chunks; a row that was preempted has lost its blocks and simply catches up again.

Rows are served in arrival order. Within the token budget, rows that need one token come first, so that a long prompt
never stalls those already talking; the rest goes to prompts, oldest first. When the pool is full the youngest row
gives up its blocks, so the oldest always moves forward and every row ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tide_core.batch import RowStep, ScheduledBatch
from tide_core.kv.block_manager import BlockManager, BlockTable
from tide_core.request import Request


@dataclass(slots=True, eq=False)
class Row:
    """One request on its way: what it has generated and which blocks it owns."""

    request: Request
    namespace: bytes
    """First parent of its prefix keys: model, policy and salt."""
    table: BlockTable
    output_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        prompt = self.request.prompt_ids
        return [*prompt[start:stop], *self.output_ids[max(0, start - len(prompt)) : max(0, stop - len(prompt))]]


class Scheduler:
    """Two queues in arrival order, a token budget and the block pool."""

    def __init__(self, blocks: BlockManager, *, max_rows: int, max_batch_tokens: int) -> None:
        self.blocks = blocks
        self.max_rows = max_rows
        self.max_batch_tokens = max_batch_tokens
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.num_preemptions = 0
        self._refused: tuple[Row, int, int] | None = None

    def add(self, request: Request, namespace: bytes) -> Row:
        """Put a request at the end of the queue. It must fit the pool alone: the caller has checked."""
        row = Row(request, namespace, self.blocks.new_table())
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
        budget = self.max_batch_tokens
        shares: dict[int, int] = {}
        by_need = sorted(self.running, key=lambda row: self._missing(row) > 1)  # stable: arrival order within both
        for row in by_need:
            if row not in self.running:
                continue  # preempted for the sake of an earlier row of this loop
            share = min(self._missing(row), budget)
            if share and self._make_room(row, row.table.num_valid + share):
                shares[id(row)] = share
                budget -= share
        rows = [row for row in self.running if id(row) in shares]
        return rows, ScheduledBatch(tuple(self._step(row, shares[id(row)]) for row in rows))

    def advance(self, row: Row, num_tokens: int, token_id: int | None) -> None:
        """Record that a row's tokens ran at full depth, and the token it sampled, if it did."""
        for segment in range(self.blocks.num_segments):
            row.table.advance(segment, num_tokens)
        self.blocks.seal(row.table, row.tokens, row.namespace)
        if token_id is not None:
            row.output_ids.append(token_id)

    def check_integrity(self) -> None:
        """Recount the pool against all rows."""
        self.blocks.check_integrity([row.table for row in (*self.running, *self.waiting)])

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_rows:
            row = self.waiting[0]
            situation = (row, self.blocks.num_available, len(self.running))
            if situation == self._refused:
                return  # nothing has changed since it did not fit; looking up its prefix again would tell nothing new
            row.table = self.blocks.match_prefix(row.tokens(0, row.num_tokens), row.namespace)
            # One block is left for each row that runs: admitting this one must not preempt another at once.
            if not self.blocks.can_allocate(row.table, row.num_tokens, reserve=len(self.running)):
                self.blocks.free(row.table)
                self._refused = situation
                return
            self.blocks.allocate(row.table, row.num_tokens)
            if not row.num_preemptions:
                row.cached_tokens = row.table.num_valid
            self.running.append(self.waiting.popleft())

    def _make_room(self, row: Row, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens of the row, at the expense of younger rows; False if it gave way itself."""
        while not self.blocks.can_allocate(row.table, num_tokens):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is row:
                return False
        self.blocks.allocate(row.table, num_tokens)
        return True

    def _preempt(self, row: Row) -> None:
        self.running.remove(row)
        self.blocks.free(row.table)
        row.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(row)

    def _missing(self, row: Row) -> int:
        return row.num_tokens - row.table.num_valid

    def _step(self, row: Row, share: int) -> RowStep:
        start = row.table.num_valid
        return RowStep(
            request=row.request,
            table=row.table,
            token_ids=row.tokens(start, start + share),
            output_ids=row.output_ids,
            samples=start + share == row.num_tokens,
        )

"""A request while it is scheduled: what it has generated, and which blocks it owns. Plain Python values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tide_core.request import ExitPolicy, Request

if TYPE_CHECKING:
    from tide_core.exits.cost import RowAcceptance
    from tide_core.kv.block_manager import BlockTable


@dataclass(slots=True, eq=False)
class Row:
    """One request, waiting or running."""

    request: Request
    namespace: bytes | None
    """First parent of its prefix keys: model, policy and salt. None: it shares no blocks."""
    table: BlockTable
    acceptance: RowAcceptance
    """Of its drafts, in steps of few rows."""
    output_ids: list[int] = field(default_factory=list)
    num_differing: int = 0
    """Of the output, tokens that a budget kept."""
    cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def policy(self) -> ExitPolicy:
        return self.request.policy

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_shareable(self) -> int:
        """Leading tokens whose K and V depend on the tokens alone: of a row that skips layers, those of its prompt."""
        return len(self.request.prompt_ids) if self.request.policy.skips_layers else self.num_tokens

    @property
    def num_missing(self) -> int:
        """Tokens still to run: 1 for a row that decodes."""
        return len(self.request.prompt_ids) + len(self.output_ids) - self.table.length

    def tokens(self, start: int, stop: int) -> list[int]:
        prompt = self.request.prompt_ids
        return [*prompt[start:stop], *self.output_ids[max(0, start - len(prompt)) : max(0, stop - len(prompt))]]

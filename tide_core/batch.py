"""What passes between scheduler, model runner and layers, and nothing else does. No torch at run time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tide_core.request import Request

if TYPE_CHECKING:
    import torch

    from tide_core.kv.block_manager import BlockTable


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row's share of a step: the tokens to run, and whether the next token is wanted."""

    request: Request
    table: BlockTable
    """Read only here; its valid length is the position of the first token."""
    token_ids: Sequence[int]
    output_ids: Sequence[int]
    """Tokens generated so far."""
    samples: bool

    @property
    def start(self) -> int:
        return self.table.num_valid


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """Scheduler to runner: rows in arrival order."""

    rows: tuple[RowStep, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """Runner to scheduler, for one row: a token if one was asked for, or the reason there is none."""

    token_id: int | None = None
    exit_layer: int = 0
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per row of the batch, in its order."""

    rows: tuple[RowResult, ...]


class KVView(Protocol):
    """The KV cache as one step's layers see it: it takes the place of the library's cache and attention mask."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's K and V, [1, H, T, D] each; return what the attention of the layer is to be given."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """Attention of this step's queries, [1, H, T, D], over each row's own context; returns [1, T, H, Dv]."""
        ...

"""The ops by name: `Kernels` for any device, `CudaKernels` for a GPU. `reference/` defines each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from tide_core.kernels.panels import Panels
from tide_core.kernels.reference.branches import CopySlots
from tide_core.kernels.reference.ops import Top2


class LinearOp(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class QuantisedLinearOp(Protocol):
    def __call__(self, x: Tensor, panels: Panels, bias: Tensor | None = None) -> Tensor: ...


class PagedAttentionOp(Protocol):
    def __call__(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        scaling: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Kernels:
    """One version of the ops. Defined in `tide_core.kernels.reference.ops`."""

    name: str
    linear: LinearOp
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: PagedAttentionOp
    quantised_linear: QuantisedLinearOp | None
    """Of float32 and a block-quantised matrix; None on a GPU."""


@dataclass(frozen=True)
class CudaKernels(Kernels):
    """All indices are on the device, and nothing waits for it."""

    fused_linear: Callable[..., Tensor]
    """`linear`; by name an optional `residual`, `gated` and an optional `norm`."""
    rotary_write: Callable[..., Tensor]
    """Of a joined projection, tables, positions, slots and pools, with optional norms of queries and keys."""
    attend: Callable[..., Tensor]
    """`paged_attention`; by name `max_queries` and `max_context` of a row, `workspace` and `queries_are_new`."""
    attention_workspace: Callable[..., Tensor]
    """For `attend` and `attend_joined`: the most tokens, query heads, elements of a head and positions; where; and as
    `held` one that is handed back where it is large enough."""
    top2_logsumexp: Callable[..., Top2]
    """Of logits, with a scratch and an optional `out`."""
    router: Callable[..., Tensor]
    """Of features, top-2 and weights, with an optional `scratch` and `out`."""
    score_scratch: Callable[..., Any]
    """For `top2_logsumexp` and `router`: where, rows, and by name `vocabulary` and `bottleneck`."""
    exit_input: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    norm_into: Callable[..., Tensor]
    """`rms_norm` with an optional `out`."""
    embed: Callable[..., Tensor]
    """Of ids and rows, with an optional `out`."""
    scatter_rows: Callable[[Tensor, Tensor, Tensor], None]
    plan_cycle: Callable[..., None]
    pending_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    accept_drafts: Callable[..., None]
    top_logprobs: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """Defined in `tide_core.kernels.reference.cycle`."""
    nth_best: Callable[..., Tensor]
    slot_copier: Callable[[Sequence[Tensor], int], CopySlots]
    """Defined in `tide_core.kernels.reference.branches`."""
    draw: Callable[..., tuple[Tensor, Tensor]]
    """Of logits, settings, numbers and the vocabulary's size, with an optional `out`."""
    verify_drawn: Callable[..., tuple[Tensor, Tensor]]
    """Of logits and a `DrawnCycle`, with an optional `out`."""
    draw_numbers: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    """Defined in `tide_core.kernels.reference.draw`."""
    adjust_logits: Callable[..., None]
    count_outputs: Callable[..., None]
    """Defined in `tide_core.kernels.reference.adjust`."""
    supports: Callable[[Tensor, Tensor], bool]
    """Whether `attend` supports pools such as these."""
    attend_joined: Callable[..., Tensor]
    """`rotary_write`, then `attend`, for rows of few queries; by name `max_queries`, `max_context` and `workspace`."""
    supports_joined: Callable[[Tensor, Tensor], bool]
    """Whether `attend_joined` does; else use the two ops."""

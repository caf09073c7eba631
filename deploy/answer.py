"""One request in the service: what its caller asks for, how far its answer is, and why it ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deploy.failures import DeadlineError
from deploy.keys import Caller
from tide_core.errors import EngineDeadError, EngineError, RequestError
from tide_core.request import FinishReason, RequestOutput, SamplingParams
from tide_core.stats import tenant_label

if TYPE_CHECKING:
    from tide_core.engine.engine import Prompt

logger = logging.getLogger("ray.serve")

DEADLINE, CALLER = "deadline", "caller"
"""Who ended an answer early."""


@dataclass(frozen=True, slots=True)
class Call:
    """One generation request, as parsed by either API."""

    prompt: Prompt
    params: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingParams` that were given."""
    request_id: str | None = None
    """The caller's id for it."""
    model: str | None = None
    timeout_s: float | None = None
    fill_context: bool = False
    """Generate until the context is full: `max_tokens` was not given and has no default."""
    count_prompt: bool = False
    """Encode and count the prompt before the first output."""
    keep_last: int | None = None
    """Most tokens of the prompt, its last ones; -1: as many as leave place for the answer."""


@dataclass(slots=True)
class Answer:
    """A running request: its ids, its progress, and why it ended early, if it did."""

    request_id: str
    """The caller's id, or the engine's. The choices of one prompt share it."""
    engine_id: str
    """Unique id in the engine and in the logs."""
    caller: Caller
    params: SamplingParams
    prompt: Prompt
    timeout_s: float
    fill_context: bool = False
    count_prompt: bool = False
    keep_last: int | None = None
    num_prompt_tokens: int | None = None
    """Known from the start if the prompt is counted."""
    artefact: str | None = None
    started_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    last_at: float | None = None
    num_tokens: int = 0
    ended_by: str | None = None

    def record(self, output: RequestOutput) -> None:
        """Count the tokens of an output, and note when it came."""
        now = time.monotonic()
        if output.tokens and self.first_at is None:
            self.first_at = now
        self.last_at = now
        self.num_tokens += len(output.tokens)

    def raise_if_failed(self, output: RequestOutput) -> None:
        """Raise for an aborted answer, unless its caller aborted it."""
        if self.ended_by == DEADLINE:
            raise DeadlineError(f"the request took longer than {self.timeout_s:g} s")
        if output.error is not None:
            raise output.error
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError("the request failed")
        if output.finish_reason is FinishReason.ABORT and self.ended_by != CALLER:
            raise EngineDeadError("the engine was closed")

    def log_end(self, reason: str) -> None:
        """Log one line per request: ids, counts and times, never text. A JSON log also has them as fields."""
        first = None if self.first_at is None else round(self.first_at - self.started_at, 4)
        facts = {
            "tide_request_id": self.engine_id,
            "caller": self.caller.name,
            "tenant": tenant_label(self.caller.salt),
            "mode": self.params.mode,
            "finish": reason,
            "output_tokens": self.num_tokens,
            "first_token_s": first,
            "total_s": round(time.monotonic() - self.started_at, 4),
        }
        logger.info("request ended: %s", " ".join(f"{key}={value}" for key, value in facts.items()), extra=facts)


def checked_id(request_id: str) -> str:
    if not 1 <= len(request_id) <= 128 or not request_id.isprintable():
        raise RequestError("request_id", request_id, "1..128 printable characters")
    return request_id

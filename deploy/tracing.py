"""Spans of a request, where OpenTelemetry is switched on: queue, prefill, decode, each where its time was spent.

They are written when the request has ended, from the times the engine took; nothing is recorded while it runs.
"""

from __future__ import annotations

import time

from opentelemetry import trace

from deploy.service import Answer
from tide_core.request import Usage

NANO = 1_000_000_000


def record_spans(answer: Answer, usage: Usage) -> None:
    """Children of whatever span is current: Serve's, of the call."""
    tracer = trace.get_tracer("tide")
    end = time.time_ns()
    arrived = end - int(usage.total_s * NANO)
    started, first = arrived + int(usage.queue_s * NANO), arrived + int(usage.first_token_s * NANO)
    facts: dict[str, str | int | float] = {
        "tide.request_id": answer.engine_id,
        "tide.mode": answer.params.mode or "full",
        "tide.prompt_tokens": usage.prompt_tokens,
        "tide.cached_tokens": usage.cached_tokens,
        "tide.output_tokens": usage.output_tokens,
        "tide.layers_per_token": usage.layers_per_token,
        "tide.tokens_per_deep_pass": usage.tokens_per_deep_pass,
    }
    for name, begin, stop in (("queue", arrived, started), ("prefill", started, first), ("decode", first, end)):
        span = tracer.start_span(f"tide.{name}", start_time=begin, attributes=facts)
        if not span.is_recording():  # nobody listens, or this call was not drawn
            return
        span.end(end_time=max(begin, stop))

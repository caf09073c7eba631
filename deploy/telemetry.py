"""Spans of a request, where OpenTelemetry is switched on: queue, prefill, decode, each where its time was spent.

They are written when the request has ended, from the times the engine took; nothing is recorded while it runs.
"""

from __future__ import annotations

import logging
import time

from opentelemetry import trace

from deploy.failures import StatusSetError
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


def join_serve_logs() -> None:
    """The engine's own lines go where Serve's go, so that `serve run` shows what a replica is busy with. Traces of
    calls that were refused go nowhere: the request's own line says how it ended."""
    ours, serves = logging.getLogger("tide"), logging.getLogger("ray.serve")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for handler in serves.handlers:
        if handler not in ours.handlers:
            ours.addHandler(handler)
    if not any(isinstance(each, WithoutRefusals) for each in serves.filters):
        serves.addFilter(WithoutRefusals())


class WithoutRefusals(logging.Filter):
    """Drops the traces that Serve logs of a gRPC call which ended with a status of our own, or whose client went."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(getattr(error, "original_exception", error), (StatusSetError, GeneratorExit))

"""Spans and log lines of a replica.

With OpenTelemetry enabled, each request has spans for queue, prefill and decode. They are written when the request has
ended, from the times that the engine measured.
"""

from __future__ import annotations

import logging
import time

from opentelemetry import trace

from deploy.answer import Answer
from deploy.failures import StatusSetError
from tide_core.request import Usage

NANO = 1_000_000_000


def record_spans(answer: Answer, usage: Usage) -> None:
    """Write the spans of an ended request as children of the current span, which is Serve's span of the call."""
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
        if not span.is_recording():  # tracing is off, or this call was not sampled
            return
        span.end(end_time=max(begin, stop))


def join_serve_logs() -> None:
    """Send the engine's log lines to Serve's handlers, so that `serve run` shows them. Drop the traces of refused
    calls: the line of the request states how it ended."""
    tide, serve = logging.getLogger("tide"), logging.getLogger("ray.serve")
    tide.setLevel(logging.INFO)
    tide.propagate = False
    for handler in serve.handlers:
        if handler not in tide.handlers:
            tide.addHandler(handler)
    if not any(isinstance(each, RefusalFilter) for each in serve.filters):
        serve.addFilter(RefusalFilter())


class RefusalFilter(logging.Filter):
    """Drops the traces that Serve logs for a gRPC call that ended with a status of its own, or whose client left."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(getattr(error, "original_exception", error), (StatusSetError, GeneratorExit))

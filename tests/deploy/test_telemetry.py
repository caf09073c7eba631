"""Spans and log lines of a replica."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from deploy.failures import StatusSetError
from deploy.telemetry import RefusalFilter, join_serve_logs, record_spans
from tests.deploy.answers import make_answer
from tide_core.request import Usage

USAGE = Usage(
    prompt_tokens=9,
    output_tokens=12,
    cached_tokens=4,
    deep_passes=4,
    layers_run=120,
    queue_s=0.25,
    first_token_s=0.75,
    total_s=3.0,
)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_queue_prefill_and_decode_follow_each_other_with_the_engines_times(exported: InMemorySpanExporter) -> None:
    record_spans(make_answer(), USAGE)
    spans = exported.get_finished_spans()
    assert [span.name for span in spans] == ["tide.queue", "tide.prefill", "tide.decode"]
    assert [seconds(span) for span in spans] == pytest.approx([0.25, 0.5, 2.25], abs=1e-6)
    assert [one.end_time for one in spans[:-1]] == [two.start_time for two in spans[1:]]
    assert abs(time.time_ns() - (spans[-1].end_time or 0)) < 60e9


def test_a_span_has_counts_and_never_the_prompt(exported: InMemorySpanExporter) -> None:
    record_spans(make_answer(mode="bounded"), USAGE)
    for span in exported.get_finished_spans():
        assert span.attributes == {
            "tide.request_id": "ours",
            "tide.mode": "bounded",
            "tide.prompt_tokens": 9,
            "tide.cached_tokens": 4,
            "tide.output_tokens": 12,
            "tide.layers_per_token": 10.0,
            "tide.tokens_per_deep_pass": 3.0,
        }


def test_spans_hang_under_the_span_of_the_call(exported: InMemorySpanExporter) -> None:
    with trace.get_tracer("serve").start_as_current_span("call") as call:
        record_spans(make_answer(), USAGE)
    *ours, outer = exported.get_finished_spans()
    assert outer.name == "call"
    assert {span.parent.span_id for span in ours if span.parent} == {call.get_span_context().span_id}
    assert {span.context.trace_id for span in ours if span.context} == {call.get_span_context().trace_id}


@pytest.mark.parametrize("waited", [0.0, 1.5])
def test_a_request_that_was_ended_before_its_first_token_has_spent_its_time_where_it_was(
    exported: InMemorySpanExporter, waited: float
) -> None:
    record_spans(make_answer(), Usage(9, 0, queue_s=waited, first_token_s=1.5, total_s=1.5))
    spans = exported.get_finished_spans()
    assert [seconds(span) for span in spans] == pytest.approx([waited, 1.5 - waited, 0.0], abs=1e-6)


def test_a_call_that_was_not_drawn_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    record_spans(make_answer(), USAGE)
    assert exporter.get_finished_spans() == ()


def test_without_a_provider_one_span_is_asked_for_and_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(trace.get_tracer("tide").start_span("x"), trace.NonRecordingSpan), "no tracer is configured here"
    asked: list[str] = []

    class Listening(trace.NoOpTracer):
        def start_span(self, name: str, *args: Any, **more: Any) -> trace.Span:
            asked.append(name)
            return super().start_span(name, *args, **more)

    monkeypatch.setattr(trace, "get_tracer", lambda name: Listening())
    record_spans(make_answer(), USAGE)
    assert asked == ["tide.queue"]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[Lines]:
    serves, ours, handler = logging.getLogger("ray.serve"), logging.getLogger("tide"), Lines()
    before = (
        list(serves.handlers),
        list(serves.filters),
        list(ours.handlers),
        ours.level,
        ours.propagate,
        serves.level,
    )
    serves.addHandler(handler)
    serves.setLevel(logging.INFO)
    join_serve_logs()
    join_serve_logs()
    yield handler
    serves.handlers, serves.filters, ours.handlers = before[:3]
    ours.level, ours.propagate, serves.level = before[3:]


class WrappedError(Exception):
    """As Serve wraps what a method raised."""

    def __init__(self, original: Exception) -> None:
        self.original_exception = original


def log_trace(error: BaseException) -> None:
    try:
        raise error
    except BaseException:
        logging.getLogger("ray.serve").exception("request failed")


def test_the_engines_lines_go_where_serves_go_and_once(lines: Lines) -> None:
    logging.getLogger("tide").info("loading")
    assert lines.lines == ["loading"]


@pytest.mark.parametrize("error", [StatusSetError(), WrappedError(StatusSetError()), GeneratorExit()])
def test_a_refused_call_or_a_client_that_went_leaves_no_trace(lines: Lines, error: BaseException) -> None:
    log_trace(error)
    assert lines.lines == []


def test_any_other_failure_is_logged(lines: Lines) -> None:
    log_trace(OSError("disk"))
    log_trace(WrappedError(OSError("disk")))
    assert lines.lines == ["request failed"] * 2


def test_the_filter_is_there_once(lines: Lines) -> None:
    filters = logging.getLogger("ray.serve").filters
    assert sum(isinstance(each, RefusalFilter) for each in filters) == 1

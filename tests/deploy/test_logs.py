"""What a replica's log holds: the engine's lines too, and no trace of calls that were refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from deploy.failures import StatusSetError
from deploy.logs import WithoutRefusals, join_serve_logs


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
    assert sum(isinstance(each, WithoutRefusals) for each in filters) == 1

"""Where log lines of a replica go, and which do not."""

from __future__ import annotations

import logging

from deploy.failures import StatusSetError


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

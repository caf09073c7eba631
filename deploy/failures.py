"""Failures of a request as HTTP and gRPC report them: one table, by exception type."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from tide_core.errors import EngineBusyError, EngineDeadError, FieldError, RequestError, TideError

logger = logging.getLogger("ray.serve")

RETRY_AFTER_S = 1


class UnauthenticatedError(TideError):
    """A missing or unknown key."""


class ForbiddenError(FieldError):
    """A value that the caller's key or the server's policy does not allow."""


class NotServedError(FieldError):
    """A request for something that is not served, such as another model."""


class TooLargeError(FieldError):
    """A request above a size limit."""


class DeadlineError(TideError):
    """The request ran out of time."""


class QuotaError(TideError):
    """The caller's key has used up one of its limits."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, retry_after_s)


class StatusSetError(TideError):
    """A failed gRPC call whose context already holds the status."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure that the client receives."""

    status: int
    """HTTP status."""
    grpc_code: str
    """Name of the gRPC status."""
    kind: str
    """OpenAI's `type`."""
    code: str | None
    """OpenAI's `code`."""
    message: str
    field: str | None = None
    """OpenAI's `param`."""
    retry_after_s: int | None = None

    @property
    def is_server_error(self) -> bool:
        """Whether the server is at fault, so that the cause must be logged."""
        return self.status >= 500


def report(error: BaseException) -> Failure:
    """The failure for an error. The cause of a server error is logged under the id that the client receives."""
    error_id = uuid.uuid4().hex[:16]
    failure = failure_of(error, error_id)
    if failure.is_server_error:
        logger.error("error %s", error_id, exc_info=error)
    return failure


def failure_of(error: BaseException, error_id: str) -> Failure:
    """The failure for an error. A server error exposes only the id under which it was logged."""
    invalid, internal = "invalid_request_error", "server_error"
    match error:
        case RequestError():
            return Failure(400, "INVALID_ARGUMENT", invalid, "invalid_value", str(error), error.field)
        case UnauthenticatedError():
            return Failure(401, "UNAUTHENTICATED", invalid, "invalid_api_key", str(error))
        case ForbiddenError():
            return Failure(403, "PERMISSION_DENIED", invalid, "not_allowed", str(error), error.field)
        case NotServedError():
            return Failure(404, "NOT_FOUND", invalid, f"{error.field}_not_found", str(error), error.field)
        case TooLargeError():
            return Failure(413, "RESOURCE_EXHAUSTED", invalid, "too_large", str(error), error.field)
        case DeadlineError():
            return Failure(408, "DEADLINE_EXCEEDED", "timeout_error", "deadline_exceeded", str(error))
        case EngineBusyError():
            text = "too many requests are waiting"
            return Failure(429, "RESOURCE_EXHAUSTED", "rate_limit_error", "engine_busy", text, None, RETRY_AFTER_S)
        case QuotaError():
            text, wait = str(error), error.retry_after_s
            return Failure(429, "RESOURCE_EXHAUSTED", "rate_limit_error", "rate_limit_exceeded", text, None, wait)
        case EngineDeadError():
            text = f"the engine is not running (error {error_id})"
            return Failure(503, "UNAVAILABLE", internal, "engine_dead", text, None, RETRY_AFTER_S)
        case _:
            return Failure(500, "INTERNAL", internal, "internal_error", f"internal error {error_id}")

"""Counts over all answers of a command, for the line at its end."""

from __future__ import annotations

import time

from tide_core.cli.output import tokens_per_s
from tide_core.cli.runs import Put
from tide_core.errors import EngineError
from tide_core.request import RequestOutput


class Tally:
    """Counts every output on its way to `put`; the clock starts with it."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._started_at = time.monotonic()
        self._first_token_at: float | None = None
        self._num_tokens = 0
        self._num_answers = 0
        self._failures: list[tuple[int, Exception]] = []

    def put(self, request: int, output: RequestOutput) -> None:
        if output.tokens and self._first_token_at is None:
            self._first_token_at = time.monotonic()
        self._num_tokens += len(output.tokens)
        if output.finished:
            self._num_answers += 1
        if output.error is not None:
            self._failures.append((request, output.error))
        self._put(request, output)

    def summary(self) -> str:
        seconds = time.monotonic() - self._started_at
        first = "no token" if self._first_token_at is None else f"{self._first_token_at - self._started_at:.2f} s"
        answers = f"{self._num_answers} answers, " if self._num_answers != 1 else ""
        rate = tokens_per_s(self._num_tokens, seconds)
        return f"{answers}{self._num_tokens} tokens, {rate:.1f} tok/s, first token {first}"

    def raise_failures(self) -> None:
        """The first failed answer as the error of the whole command."""
        if self._failures:
            request, error = self._failures[0]
            more = f" ({len(self._failures)} of {self._num_answers} answers failed)" if self._num_answers > 1 else ""
            raise EngineError(f"answer {request + 1}: {error}{more}")

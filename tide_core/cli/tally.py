"""Counts over all answers of a command, for the lines at its end."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

from tide_core.cli.output import tokens_per_s
from tide_core.cli.runs import Put
from tide_core.errors import EngineError
from tide_core.request import Audit, RequestOutput, Usage


class Tally:
    """Counts every output on its way to `put`; the clock starts with it and stands at the last output."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._started_at = self._last_at = time.monotonic()
        self._first_token_at: float | None = None
        self._num_answers = 0
        self._failures: list[tuple[int, Exception]] = []
        self.token_ids: defaultdict[int, list[int]] = defaultdict(list)
        """By request."""
        self.exits: Counter[tuple[int, Audit]] = Counter()
        """Tokens by exit layer and what full depth says about them."""
        self.usages: list[Usage] = []

    def put(self, request: int, output: RequestOutput) -> None:
        self._last_at = time.monotonic()
        if output.tokens and self._first_token_at is None:
            self._first_token_at = self._last_at
        self.token_ids[request] += [token.token_id for token in output.tokens]
        self.exits.update((token.exit_layer, token.audit) for token in output.tokens)
        if output.finished:
            self._num_answers += 1
        if output.usage is not None:
            self.usages.append(output.usage)
        if output.error is not None:
            self._failures.append((request, output.error))
        self._put(request, output)

    @property
    def num_tokens(self) -> int:
        return self.exits.total()

    @property
    def rate(self) -> float:
        """Tokens per second from the first prompt handed over to the last token of all."""
        return tokens_per_s(self.num_tokens, self._last_at - self._started_at)

    def summary(self) -> str:
        first = "no token" if self._first_token_at is None else f"{self._first_token_at - self._started_at:.2f} s"
        answers = f"{self._num_answers} answers, " if self._num_answers != 1 else ""
        return f"{answers}{self.num_tokens} tokens, {self.rate:.1f} tok/s, first token {first}"

    def raise_failures(self) -> None:
        """The first failed answer as the error of the whole command."""
        if self._failures:
            request, error = self._failures[0]
            more = f" ({len(self._failures)} of {self._num_answers} answers failed)" if self._num_answers > 1 else ""
            raise EngineError(f"answer {request + 1}: {error}{more}")

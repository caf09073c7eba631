"""Callers of a service on several nodes, and what became of every request of theirs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from benchmarks.nodes_cluster import API_KEY
from benchmarks.nodes_door import Door, Entrance
from tide_client import TideClient, TideClientError
from tide_client.settings import DEFAULT_RETRIES, channel_options

ASK_AGAIN = 3
"""How often a caller asks again for an answer that broke off: what came of it is worth nothing to him."""
PAUSE_S = 0.5


@dataclass(slots=True)
class Attempt:
    """One stream."""

    started_at: float
    proxy: str = ""
    """Address of the node whose HAProxy it went through."""
    request_id: str = ""
    ids: list[int] = field(default_factory=list)
    first_at: float | None = None
    ended_at: float | None = None
    error: str | None = None

    def is_open_at(self, moment: float) -> bool:
        return self.started_at < moment and (self.ended_at is None or self.ended_at > moment)


@dataclass(slots=True)
class Asked:
    """One request of a caller: attempts until an answer was whole, or he gave up."""

    prompt: str
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.attempts[-1].error is None


class Caller(threading.Thread):
    """Asks for one answer after another until told to stop, each token of which is looked at. Has a connection of his
    own, as another process would have."""

    def __init__(
        self, door: Door, prompts: Iterable[str], *, insists: bool = True, pause_s: float = 0.0, **options: Any
    ) -> None:
        """`insists`: the client's own retries, before a first token, and asking again after one."""
        super().__init__(daemon=True)
        self.asked: list[Asked] = []
        self._entrance: Entrance = door.entrance()
        self._prompts, self._options, self._pause_s = prompts, options, pause_s
        self._ask_again = ASK_AGAIN if insists else 0
        self._stop_asking = threading.Event()
        own = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(self._entrance.address, options=own)
        self._client = TideClient(api_key=API_KEY, retries=DEFAULT_RETRIES if insists else 0, channel=channel)

    @property
    def attempts(self) -> list[Attempt]:
        return [attempt for asked in self.asked for attempt in asked.attempts]

    @property
    def has_a_token(self) -> bool:
        """Of the answer that is on its way."""
        attempts = self.attempts
        return bool(attempts and attempts[-1].ids)

    def run(self) -> None:
        with self._client:
            for prompt in self._prompts:
                self._ask(prompt)
                if self._stop_asking.wait(self._pause_s):
                    return

    def stop(self) -> None:
        """The answer on its way is the last."""
        self._stop_asking.set()

    def _ask(self, prompt: str) -> None:
        asked = Asked(prompt)
        for again in range(1 + self._ask_again):
            if again:
                time.sleep(PAUSE_S)
            attempt = Attempt(time.monotonic())
            asked.attempts.append(attempt)
            if not again:
                self.asked.append(asked)
            self._try(prompt, attempt)
            if attempt.error is None:
                return

    def _try(self, prompt: str, attempt: Attempt) -> None:
        try:
            with self._client.stream(prompt, ignore_eos=True, **self._options) as stream:
                for token in stream:
                    if not attempt.ids:
                        attempt.request_id, attempt.proxy = stream.request_id, self._entrance.node
                        attempt.first_at = time.monotonic()
                    attempt.ids.append(token.id)
        except TideClientError as error:
            attempt.error = str(error)
        attempt.proxy = attempt.proxy or self._entrance.node
        attempt.ended_at = time.monotonic()


def end(callers: Sequence[Caller]) -> None:
    """Of all of them, once the answers on their way have come."""
    for caller in callers:
        caller.stop()
    for caller in callers:
        caller.join()


def in_turn(prompts: Sequence[str], first: int) -> Iterable[str]:
    """All of them again and again, beginning somewhere."""
    return itertools.islice(itertools.cycle(prompts), first % len(prompts), None)


def num_wrong(attempts: Iterable[Attempt], expected: Sequence[int]) -> int:
    """Tokens, of whole answers and of broken ones, that are not those of full depth."""
    return sum(
        come != wanted for attempt in attempts for come, wanted in zip(attempt.ids, expected, strict=False)
    ) + sum(max(0, len(attempt.ids) - len(expected)) for attempt in attempts)

"""Sinks: where the outputs of requests go, by how their reader waits.

A reader that wakes up takes the interpreter's lock, which the engine's thread needs for its next step. So a reader is
woken only for what it waits for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Protocol

from tide_core.request import PromptToken, RequestOutput, TokenOutput


class Sink(Protocol):
    """Where the outputs of requests go. `event_loop` is None for a sink any thread may put to."""

    event_loop: asyncio.AbstractEventLoop | None

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        """Take outputs of one step, in their order."""
        ...


class ThreadSink:
    """Outputs for one thread that waits. Several requests may share one."""

    def __init__(self) -> None:
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self._steps: SimpleQueue[Sequence[RequestOutput]] = SimpleQueue()
        self._taken: deque[RequestOutput] = deque()

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        self._steps.put(outputs)

    def get(self) -> RequestOutput:
        while not self._taken:
            self._taken += self._steps.get()
        return self._taken.popleft()


class AsyncSink:
    """Outputs of one request, for a coroutine on `event_loop`."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.event_loop: asyncio.AbstractEventLoop | None = event_loop
        self._outputs: list[RequestOutput] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        self._outputs += outputs
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> RequestOutput:
        """The next output; if several wait, all of them as one, so that a slow reader gets larger pieces."""
        while not self._outputs:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        outputs, self._outputs = self._outputs, []
        if len(outputs) == 1:
            return outputs[0]
        tokens = tuple(token for each in outputs for token in each.tokens)
        return replace(outputs[-1], tokens=tokens, prompt_logprobs=outputs[0].prompt_logprobs)


class AnswerSink:
    """Whole answers, for one thread that waits: it sleeps until one has ended. Many requests may share one."""

    def __init__(self) -> None:
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self._tokens: dict[str, list[TokenOutput]] = {}
        self._prompts: dict[str, tuple[PromptToken, ...]] = {}
        self._ended: SimpleQueue[tuple[RequestOutput, tuple[TokenOutput, ...]]] = SimpleQueue()

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            tokens = self._tokens.setdefault(output.request_id, [])
            tokens += output.tokens
            if output.prompt_logprobs:
                self._prompts[output.request_id] = output.prompt_logprobs
            if output.finished:
                prompt = self._prompts.pop(output.request_id, ())
                last = replace(output, prompt_logprobs=prompt) if prompt else output
                self._ended.put((last, tuple(self._tokens.pop(output.request_id))))

    def get(self, timeout: float | None = None) -> tuple[RequestOutput, tuple[TokenOutput, ...]] | None:
        """The last output of a request that has ended, with the log-probabilities of its prompt, and all its tokens;
        None if none has by then."""
        try:
            return self._ended.get(timeout=timeout)
        except Empty:
            return None

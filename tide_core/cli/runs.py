"""Running prompts on an engine: one, or many at once. Every output goes to `put` with the number of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tide_core.cli.prompts import PromptItem
from tide_core.config import EngineConfig
from tide_core.errors import RequestError
from tide_core.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tide_core.engine.engine import Engine, Prompt

Put = Callable[[int, RequestOutput], None]


def open_engine(config: EngineConfig) -> Engine:
    from tide_core.engine.engine import Engine  # torch comes with it

    return Engine(**asdict(config))


def check_all(engine: Engine, items: Sequence[PromptItem], params: SamplingParams) -> None:
    """Refuse a bad prompt before any is run; one of a file names its line."""
    for item in items:
        try:
            engine.make_request(item.prompt, params)
        except RequestError as error:
            if not item.where:
                raise
            raise RequestError(f"{item.where}: {error.field}", error.value, error.expected) from error


def answer(engine: Engine, prompt: Prompt, params: SamplingParams, put: Put, *, request: int = 0) -> None:
    for output in engine.stream_blocking(prompt, params):
        put(request, output)


def answer_many(
    engine: Engine, items: Sequence[PromptItem], params: SamplingParams, put: Put, *, on_end: Callable[[], object]
) -> None:
    """Answer all prompts as one batch."""
    asyncio.run(_answer_many(engine, items, params, put, on_end))


async def _answer_many(
    engine: Engine, items: Sequence[PromptItem], params: SamplingParams, put: Put, on_end: Callable[[], object]
) -> None:
    queue = asyncio.Semaphore(engine.config.max_queued)  # a longer file waits here instead of being refused

    async def one(request: int, item: PromptItem) -> None:
        async with queue:
            async for output in engine.stream(item.prompt, params):
                put(request, output)
        on_end()

    await asyncio.gather(*(one(request, item) for request, item in enumerate(items)))

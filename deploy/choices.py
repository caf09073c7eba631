"""Several answers to one request: n choices for each of its prompts.

The choices of one prompt share its prefill: the first choice runs it; the others start when the first has its first
token, and find the prompt's blocks in the prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from deploy.keys import Caller
from deploy.service import Answer, Call, Service
from tide_core.errors import RequestError
from tide_core.request import RequestOutput

NUM_SEEDS = 2**64
"""Seeds are taken modulo this number."""

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Outputs, each with the index of its choice among all answers."""


def begin_choices(service: Service, calls: Sequence[Call], n: int, caller: Caller) -> list[Answer]:
    """Check the calls of all prompts and make `n` answers for each; the answers of one prompt are adjacent. Nothing
    runs yet."""
    most = service.limits.max_choices
    if not 1 <= n <= most:
        raise RequestError("n", n, f"an integer in 1..{most}")
    if len(calls) * n > most:
        raise RequestError("prompt", f"{len(calls)} prompts with n = {n}", f"at most {most} choices in all")
    return [answer for call in calls for answer in _begin(service, call, n, caller)]


async def outputs_of(service: Service, answers: Sequence[Answer], n: int) -> Outputs:
    """The outputs of all answers as they come. The first error ends all answers and is raised.

    Closing the generator aborts open answers."""
    if len(answers) == 1:
        async with contextlib.aclosing(service.outputs(answers[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    with contextlib.ExitStack() as held:
        for first in range(0, len(answers), n):
            held.enter_context(service.held(answers[first : first + n]))
        async with contextlib.aclosing(_mixed(service, answers, n)) as outputs:
            async for item in outputs:
                yield item


async def _mixed(service: Service, answers: Sequence[Answer], n: int) -> Outputs:
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(service.engine.config.max_rows)
    events: asyncio.Queue[tuple[int, RequestOutput] | asyncio.Task[None]] = asyncio.Queue()
    prompt_ran = [asyncio.Event() for _ in range(len(answers) // n)]

    async def run(index: int, answer: Answer) -> None:
        if index % n:
            await prompt_ran[index // n].wait()
        # At most as many as the engine runs at once, so that a long list does not fill its queue.
        async with slots, contextlib.aclosing(service.outputs(answer)) as outputs:
            async for output in outputs:
                prompt_ran[index // n].set()
                events.put_nowait((index, output))

    tasks = [loop.create_task(run(index, answer)) for index, answer in enumerate(answers)]
    for task in tasks:
        task.add_done_callback(events.put_nowait)
    num_open = len(tasks)
    try:
        while num_open:
            item = await events.get()
            if isinstance(item, asyncio.Task):
                item.result()
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def whole_answers(service: Service, answers: Sequence[Answer], n: int) -> list[list[RequestOutput]]:
    """All outputs of each answer."""
    found: list[list[RequestOutput]] = [[] for _ in answers]
    async with contextlib.aclosing(outputs_of(service, answers, n)) as outputs:
        async for index, output in outputs:
            found[index].append(output)
    return found


def _begin(service: Service, call: Call, n: int, caller: Caller) -> list[Answer]:
    """The choices of one prompt, which share its request id."""
    first = service.begin(call, caller)
    named = replace(call, request_id=first.request_id)
    return [first, *(service.begin(_seeded(named, number), caller) for number in range(1, n))]


def _seeded(call: Call, number: int) -> Call:
    """The call of choice `number`. If the call has a seed, the choice has `seed + number`."""
    seed = call.params.get("seed")
    if seed is None:
        return call
    following = seed + number
    return replace(call, params={**call.params, "seed": following - NUM_SEEDS * (following >= NUM_SEEDS)})

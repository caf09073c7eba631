"""Several answers to one request: n choices for each of its prompts.

The choices of one prompt share its prefill: the first choice runs it; the others start when the first has its first
token, and find the prompt's blocks in the prefix cache. The choices of a request take turns in the places that it got
when it came, so a long list neither fills the queue nor is refused halfway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from deploy.answer import Answer, Call
from deploy.failures import QuotaError
from deploy.keys import Caller
from deploy.service import Service
from tide_core.errors import EngineBusyError, RequestError
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


class Places:
    """The places of one request: how many of its answers may be open at once, in the engine and of the caller's key.

    It takes as many as are free, up to what the engine runs at once, and is refused if there is none. Where an answer
    ends, the next one takes its place, and the request tries to get one more."""

    def __init__(self, service: Service, answers: Sequence[Answer]) -> None:
        self._service, self._caller, self._num_left = service, answers[0].caller, len(answers)
        self._most = min(len(answers), service.engine.config.max_rows)
        try:
            self._num = service.enter(self._caller, self._most, len(answers))
        except (EngineBusyError, QuotaError) as error:
            service.refused(answers[0], error)
            raise
        self._free = asyncio.Semaphore(self._num)

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncGenerator[None, None]:
        """Wait for a place, and hold it."""
        async with self._free:
            yield
        self._num_left -= 1
        if self._num > self._num_left:
            self._num -= 1
            self._service.leave(self._caller, 1)
        elif self._num < min(self._most, self._num_left):
            with contextlib.suppress(EngineBusyError, QuotaError):
                self._num += self._service.enter(self._caller, 1, 0)
                self._free.release()

    def close(self) -> None:
        self._service.leave(self._caller, self._num)


async def _mixed(service: Service, answers: Sequence[Answer], n: int) -> Outputs:
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[int, RequestOutput] | asyncio.Task[None]] = asyncio.Queue()
    prompt_ran = [asyncio.Event() for _ in range(len(answers) // n)]

    async def run(index: int, answer: Answer) -> None:
        if index % n:
            await prompt_ran[index // n].wait()
        async with places.turn(), contextlib.aclosing(service.outputs(answer, in_place=True)) as outputs:
            async for output in outputs:
                prompt_ran[index // n].set()
                events.put_nowait((index, output))

    places = Places(service, answers)
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
        places.close()


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

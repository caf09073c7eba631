"""Run prompts on an engine: one, many at once, or a chat on the terminal.

Every output goes to `put` with the number of its request. In a chat the model reads the whole conversation each turn;
its KV comes from the prefix cache.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tide_core.cli.exit_codes import print_error
from tide_core.cli.prompts import PromptItem
from tide_core.config import AUTO, EngineConfig
from tide_core.errors import RequestError
from tide_core.models.quick_start import quick_start
from tide_core.models.resolver import ResolvedModel, find_here
from tide_core.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tide_core.engine.engine import Engine, Prompt


Put = Callable[[int, RequestOutput], None]


def open_engine(config: EngineConfig) -> Engine:
    """The model's files are looked for and checked while the libraries are imported: seconds, both."""
    guess = config.quantization == AUTO and config.device != "cuda"  # the device decides, and Torch knows it
    with ThreadPoolExecutor(1) as thread:
        guessed = thread.submit(find_here, config.model, quantised=guess)

        def find(model: str, *, quantised: bool) -> ResolvedModel | None:
            return guessed.result() if quantised is guess else find_here(model, quantised=quantised)

        with quick_start():
            from tide_core.engine.assemble import assemble
            from tide_core.engine.engine import Engine
            from tide_core.models.loader import find_model, import_libraries

            found = thread.submit(find_model, config, find)
            import_libraries()
            return Engine.from_parts(assemble(config, found.result()))


def check_all(engine: Engine, items: Sequence[PromptItem], params: SamplingParams) -> None:
    """Refuse a bad prompt before any runs; the error names the line of its file."""
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
    queue = asyncio.Semaphore(engine.config.max_queued)  # prompts beyond the queue limit wait here

    async def one(request: int, item: PromptItem) -> None:
        async with queue:
            async for output in engine.stream(item.prompt, params):
                put(request, output)
        on_end()

    await asyncio.gather(*(one(request, item) for request, item in enumerate(items)))


HELP = "/clear drops the conversation, /exit or Ctrl-D ends it"
PROMPT_SIGN = "> "


def chat(engine: Engine, params: SamplingParams, put: Put) -> None:
    """Read a message, stream the answer, append both to the history; until /exit or the end of input."""
    print(HELP, file=sys.stderr)
    history: list[dict[str, str]] = []
    turn = 0
    while (text := _read_message()) is not None:
        if text == "/clear":
            history.clear()
        elif text:
            reply = _reply(engine, [*history, {"role": "user", "content": text}], params, put, turn)
            if reply is not None:
                history += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
                turn += 1


def _reply(engine: Engine, messages: list[dict[str, str]], params: SamplingParams, put: Put, turn: int) -> str | None:
    """The answer, or None if there is none to append; a refused message does not end the chat."""
    texts: list[str] = []
    errors: list[Exception] = []

    def collect(request: int, output: RequestOutput) -> None:
        texts.extend(token.text for token in output.tokens)
        if output.error is not None:
            errors.append(output.error)
        put(request, output)

    try:
        answer(engine, messages, params, collect, request=turn)
    except RequestError as error:
        print_error(f"{error} ({HELP})")
        return None
    for failure in errors:
        print_error(str(failure))
    return None if errors else "".join(texts)


def _read_message() -> str | None:
    """One stripped line; None when the user ends the chat."""
    try:
        if sys.stdout.isatty():
            text = input(PROMPT_SIGN)
        else:  # standard output is a file or a pipe: it holds answers only
            print(PROMPT_SIGN, end="", file=sys.stderr, flush=True)
            text = input()
    except EOFError:
        print(file=sys.stderr)
        return None
    text = text.strip()
    return None if text == "/exit" else text

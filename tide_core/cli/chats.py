"""The chat on the terminal. The model sees the whole conversation each turn; its KV comes from the prefix cache."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tide_core.cli import runs
from tide_core.cli.exits import print_error
from tide_core.errors import RequestError
from tide_core.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tide_core.engine.engine import Engine

HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it"
MARK = "> "


def talk(engine: Engine, params: SamplingParams, put: runs.Put) -> None:
    """Read a message, stream the answer, keep both; until /exit or the end of input."""
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


def _reply(
    engine: Engine, messages: list[dict[str, str]], params: SamplingParams, put: runs.Put, turn: int
) -> str | None:
    """The answer, or None where there was none to remember; a refused message does not end the chat."""
    texts: list[str] = []
    errors: list[Exception] = []

    def keep(request: int, output: RequestOutput) -> None:
        texts.extend(token.text for token in output.tokens)
        if output.error is not None:
            errors.append(output.error)
        put(request, output)

    try:
        runs.answer(engine, messages, params, keep, request=turn)
    except RequestError as error:
        print_error(f"{error} ({HELP})")
        return None
    for failure in errors:
        print_error(str(failure))
    return None if errors else "".join(texts)


def _read_message() -> str | None:
    """One line without the space around it; None when the user is done."""
    try:
        if sys.stdout.isatty():
            text = input(MARK)
        else:  # answers go elsewhere, and the mark must not go with them
            print(MARK, end="", file=sys.stderr, flush=True)
            text = input()
    except EOFError:
        print(file=sys.stderr)
        return None
    text = text.strip()
    return None if text == "/exit" else text

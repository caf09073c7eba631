"""Exit codes of the commands, and how errors are printed.

    0 done · 1 the engine failed · 2 bad usage or values · 130 Ctrl-C · 141 the reader closed the output

The last two are 128 plus the number of the signal, as for a program that the signal ended.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import ParamSpec

import typer

from tide_core.errors import ArtefactError, ConfigError, ModelError, RequestError, TideError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141

CLIENT_ERRORS = (RequestError, ConfigError, ModelError, ArtefactError)

logger = logging.getLogger("tide.cli")
P = ParamSpec("P")


def with_exit_code(command: Callable[P, None]) -> Callable[P, None]:
    """Give a command these exit codes. It wraps the command inside typer, which handles Ctrl-C and closed pipes
    differently."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(exit_code_of(lambda: command(*args, **kwargs)))

    return run


def exit_code_of(body: Callable[[], object]) -> int:
    """Run `body`; an exception becomes an exit code and at most one line on stderr."""
    try:
        body()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_CLOSED_PIPE
    except CLIENT_ERRORS as error:
        print_error(str(error))
        return EXIT_USAGE
    except TideError as error:
        print_error(str(error))
        return EXIT_FAILURE
    except OSError as error:
        print_error(str(error))
        return EXIT_FAILURE
    except Exception as error:
        logger.info("unexpected error", exc_info=True)
        print_error(f"unexpected {type(error).__name__}: {error} (-v shows where)")
        return EXIT_FAILURE
    return 0


def print_error(message: str) -> None:
    """Print the message as one line. A closed stderr is ignored."""
    with contextlib.suppress(OSError):
        print("tide: error:", " ".join(message.split()), file=sys.stderr, flush=True)


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """The first Ctrl-C raises KeyboardInterrupt, so that resources are closed; a second one exits at once."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    seen = False

    def on_sigint(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            os._exit(EXIT_INTERRUPTED)
        seen = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if seen else before)


def _drop_stdout() -> None:
    """Discard what is still buffered, so that the interpreter prints no error when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)

"""`tide client`: ask a running server from a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tide_core.cli import console, prompts
from tide_core.cli.exits import EXIT_FAILURE, EXIT_USAGE, print_error, with_exit_code
from tide_core.errors import RequestError

if TYPE_CHECKING:
    from tide_client.http import HttpClient
    from tide_client.requests import Options, Prompt
    from tide_client.sync import TideClient

KEY_VARIABLE = "TIDE_API_KEY"
REFUSALS = {"INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"}
"""Statuses that say: ask differently."""
REFUSALS |= {f"HTTP {status}" for status in (400, 401, 403, 404, 413)}


@with_exit_code
def client(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="A question; - reads standard input.")],
    address: Annotated[str, typer.Option(help="gRPC address of the server.")] = "127.0.0.1:9000",
    http: Annotated[
        str | None, typer.Option(metavar="URL", help="Use the OpenAI API at this address instead of gRPC.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Text to continue, not a chat.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    mode: Annotated[
        str | None, typer.Option(help="The contract: full, verified, bounded or fast. If not given: the server's.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="With mode bounded: most disagreement with full depth, per token.")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Least router score at which a token leaves.")] = None,
    show_exits: Annotated[
        bool | None,
        typer.Option(
            "--show-exits/--hide-exits",
            help="After how many layers each piece of text was decided: by colour on a terminal, none for all layers; "
            "elsewhere by [LAYER] before it. If not given: on a terminal.",
        ),
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per token and one for the end.")] = False,
    bench: Annotated[
        int | None, typer.Option(metavar="N", help="Time N streams of the same prompt at once; no text.")
    ] = None,
    application: Annotated[str | None, typer.Option(help="Which application, where a cluster has several.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"File with the API key; else the variable {KEY_VARIABLE}.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for the whole answer.")] = 120.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more on standard error.")] = False,
) -> None:
    """Ask a running server; the text is coloured by the layer after which each token left."""
    console.prepare(verbose=verbose)
    if bench is not None and bench < 1:
        raise RequestError("--bench", bench, "at least 1 stream")
    if http is not None and application is not None:
        raise RequestError("--application", application, "none beside --http, whose address names the application")
    text = prompts.text_of(prompt)
    if not _is_unicode(text):
        raise RequestError("prompt", "bytes that are no UTF-8", "text")
    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "timeout_s": timeout_s}
    for name, value in (("seed", seed), ("mode", mode), ("epsilon", epsilon), ("threshold", threshold)):
        if value is not None:
            options[name] = value  # type: ignore[literal-required]
    key = _key(api_key_file)

    with _told_in_one_line(http or address), _open(http, address, application, key, timeout_s) as server:
        _ask(
            server,
            text if plain else prompts.user_message(text),
            options,
            bench=bench,
            json_lines=json_lines,
            shows_exits=sys.stdout.isatty() if show_exits is None else show_exits,
        )


def _open(
    http: str | None, address: str, application: str | None, key: str | None, timeout_s: float
) -> TideClient | HttpClient:
    if http is not None:
        from tide_client.http import HttpClient

        return HttpClient(http, api_key=key, timeout_s=timeout_s)
    from tide_client.sync import TideClient

    return TideClient(address, api_key=key, application=application, timeout_s=timeout_s)


def _ask(
    server: TideClient | HttpClient,
    prompt: Prompt,
    options: Options,
    *,
    bench: int | None,
    json_lines: bool,
    shows_exits: bool,
) -> None:
    from tide_client import show
    from tide_client.bench import Bench

    if bench is not None:
        _num_layers(server)  # whoever is not there is found out once, and the connection is made
        show.write_times(Bench(lambda: server.stream(prompt, **options), bench).run(), json_lines=json_lines)
        return
    with server.stream(prompt, **options) as stream:
        if json_lines:
            show.write_lines(stream)
        else:  # the answer is on its way while the layers are asked for
            show.write_text(stream, num_layers=_num_layers(server), shows_exits=shows_exits)


def _num_layers(server: TideClient | HttpClient) -> int:
    from tide_client.http import HttpClient

    return server.num_layers() if isinstance(server, HttpClient) else server.model_info().num_layers


@contextlib.contextmanager
def _told_in_one_line(where: str) -> Iterator[None]:
    """What goes wrong between here and the server, with the exit code that fits."""
    from tide_client.errors import BadValueError, StatusError, TideClientError

    try:
        yield
    except BadValueError as error:
        print_error(str(error))
        raise SystemExit(EXIT_USAGE) from None
    except TideClientError as error:
        print_error(f"{where}: {error}")
        refused = isinstance(error, StatusError) and error.code in REFUSALS
        raise SystemExit(EXIT_USAGE if refused else EXIT_FAILURE) from None


def _key(path: Path | None) -> str | None:
    """The key, from a place that no other user of the machine can list."""
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise RequestError("--api-key-file", str(path), f"a file that can be read: {why}") from None


def _is_unicode(text: str) -> bool:
    """An argument of other bytes has halves of characters in it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

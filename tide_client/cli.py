"""`tide client`: send a prompt to a running server from a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_core.cli import console, prompts
from tide_core.cli.exit_codes import EXIT_FAILURE, EXIT_USAGE, print_error, with_exit_code
from tide_core.errors import RequestError

if TYPE_CHECKING:
    from tide_client.http import HttpClient
    from tide_client.requests import Options, Prompt
    from tide_client.sync import TideClient

KEY_VARIABLE = "TIDE_API_KEY"
REFUSALS = {"INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND"}
"""Statuses that mean the request itself is wrong: exit code 2."""
REFUSALS |= {f"HTTP {status}" for status in (400, 401, 403, 404, 413)}


@with_exit_code
def client(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The user's message; - reads standard input.")],
    address: Annotated[str, typer.Option(help="gRPC address of the server.")] = "127.0.0.1:9000",
    http: Annotated[
        str | None, typer.Option(metavar="URL", help="Use the OpenAI API at this URL instead of gRPC.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Text to continue, not a chat.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Same seed, same tokens, unless the server plans drafts by load.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="The contract: full, verified, bounded or fast. Default: the server's.")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="With mode bounded: most tokens that full depth would not have chosen, as a share."),
    ] = None,
    margin: Annotated[
        float | None, typer.Option(help="With mode bounded: nats by which such a token may be less likely.")
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="Least router score at which a token exits.")] = None,
    show_exits: Annotated[
        bool | None,
        typer.Option(
            "--show-exits/--hide-exits",
            help="Mark the exit layer of each piece of text: by colour on a terminal, none for all layers; "
            "elsewhere by [LAYER] before the text. Default: on a terminal only.",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Choices: how many answers, shown one after another.")] = 1,
    tools: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON list of functions that the model may call, as OpenAI's API has them."),
    ] = None,
    tool_choice: Annotated[
        str | None, typer.Option(help="auto, none, required, or the name of the function to call. Default: auto.")
    ] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per token and one per answer.")] = False,
    bench: Annotated[
        int | None, typer.Option(metavar="N", help="Time N concurrent streams of the same prompt; no text.")
    ] = None,
    application: Annotated[
        str | None, typer.Option(help="Name of the application, if the cluster has several.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"File with the API key; default: the variable {KEY_VARIABLE}.")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt the gRPC connection; any of the next four does so, too.")
    ] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of the authorities to trust; default: the usual ones.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of the client's own certificate (mTLS).")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file of its private key.")] = None,
    tls_server_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name in the server's certificate, if not that of the address.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an answer that breaks off, if it is greedy or has a seed.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for the whole answer.")] = 120.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more to standard error.")] = False,
) -> None:
    """Send a prompt to a running server; the text is coloured by the exit layer of each token."""
    console.prepare(verbose=verbose)
    if bench is not None and bench < 1:
        raise RequestError("--bench", bench, "at least 1 stream")
    if http is not None and application is not None:
        raise RequestError("--application", application, "none with --http: the URL selects the application")
    given = {"ca_file": tls_ca, "cert_file": tls_cert, "key_file": tls_key, "server_name": tls_server_name}
    with_tls = tls or any(value is not None for value in given.values())
    if http is not None and with_tls:
        raise RequestError("--tls", "given", "none with --http: an https URL encrypts")
    if http is not None and resume:
        raise RequestError("--resume", "given", "none with --http, which never retries")
    if n < 1:
        raise RequestError("--n", n, "at least 1")
    _check_tools_and_choices(n, tools, tool_choice, http=http is not None, plain=plain)
    text = prompts.text_of(prompt)
    if not _is_unicode(text):
        raise RequestError("prompt", "bytes that are not UTF-8", "text")
    options: Options = {"max_tokens": max_tokens, "temperature": temperature, "timeout_s": timeout_s}
    of_exits = ("mode", mode), ("epsilon", epsilon), ("margin", margin), ("threshold", threshold)
    for name, value in (("seed", seed), *of_exits):
        if value is not None:
            options[name] = value  # type: ignore[literal-required]
    if n > 1:
        options["n"] = n
    if tools is not None:
        options["tools"] = _tools(tools)
    if tool_choice is not None:
        named = {"type": "function", "function": {"name": tool_choice}}
        options["tool_choice"] = tool_choice if tool_choice in ("auto", "none", "required") else named
    key = _key(api_key_file)

    with (
        _errors_in_one_line(http or address),
        _open(http, address, application, key, timeout_s, given if with_tls else None, resume=resume) as server,
    ):
        _ask(
            server,
            text if plain else prompts.user_message(text),
            options,
            bench=bench,
            json_lines=json_lines,
            shows_exits=sys.stdout.isatty() if show_exits is None else show_exits,
        )


def _open(
    http: str | None,
    address: str,
    application: str | None,
    key: str | None,
    timeout_s: float,
    tls: Mapping[str, Any] | None,
    *,
    resume: bool,
) -> TideClient | HttpClient:
    if http is not None:
        from tide_client.http import HttpClient

        return HttpClient(http, api_key=key, timeout_s=timeout_s)
    from tide_client.sync import TideClient
    from tide_client.tls import Tls

    return TideClient(
        address,
        api_key=key,
        application=application,
        timeout_s=timeout_s,
        resume=resume,
        tls=None if tls is None else Tls(**tls),
    )


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
        _num_layers(server)  # fail once if there is no server; open the connection before the clock starts
        show.write_times(Bench(lambda: server.stream(prompt, **options), bench).run(), json_lines=json_lines)
        return
    with server.stream(prompt, **options) as stream:
        if json_lines:
            show.write_lines(stream)
        elif "n" in options:
            show.write_choices(stream, num_layers=_num_layers(server), shows_exits=shows_exits)
        else:  # the server generates while this call reads the number of layers
            show.write_text(stream, num_layers=_num_layers(server), shows_exits=shows_exits)


def _num_layers(server: TideClient | HttpClient) -> int:
    from tide_client.http import HttpClient

    return server.num_layers() if isinstance(server, HttpClient) else server.model_info().num_layers


@contextlib.contextmanager
def _errors_in_one_line(where: str) -> Iterator[None]:
    """Print an error of a call as one line, and exit with its code."""
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
    """The key from a file or the environment, where no other user of the machine can list it."""
    if path is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise RequestError("--api-key-file", str(path), f"a file that can be read: {why}") from None


def _check_tools_and_choices(n: int, tools: Path | None, tool_choice: str | None, *, http: bool, plain: bool) -> None:
    of_chats = {"--tools": tools, "--tool-choice": tool_choice}
    given = [name for name, value in of_chats.items() if value is not None]
    if plain and given:
        raise RequestError(given[0], "given", "none with --plain: a chat has tools")
    if http and (n > 1 or given):
        raise RequestError("--n" if n > 1 else given[0], "given", "none with --http")


def _tools(path: Path) -> list[dict[str, Any]]:
    try:
        tools = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not JSON"
        raise RequestError("--tools", str(path), f"a file that can be read: {why}") from None
    if not isinstance(tools, list):
        raise RequestError("--tools", str(path), "a file with a JSON list")
    return tools


def _is_unicode(text: str) -> bool:
    """False for an argument with bytes that are not UTF-8, which Python decodes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

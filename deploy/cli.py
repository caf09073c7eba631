"""Commands of `tide` for the server, registered as entry points."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from tide_core.cli.exit_codes import with_exit_code
from tide_core.errors import ConfigError


@with_exit_code
def check_config(
    path: Annotated[Path, typer.Argument(help="A Serve config file.")] = Path("deploy/config.yaml"),
    strict: Annotated[bool, typer.Option("--strict", help="Fail on warnings too.")] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="Say what would be chosen on this device, which need not be here: cpu, h200 and the like, or a size "
            "as in cuda:80GiB. It is computed from config.json; no weights are loaded."
        ),
    ] = None,
) -> None:
    """Check a Serve config strictly: an unknown key or a bad value is an error with a suggestion."""
    from deploy.config.serve_config import check_file
    from deploy.config.sizes import sizes_in_file

    warnings = check_file(path)
    sizes = [] if device is None else sizes_in_file(path, device)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    count = f"{len(warnings)} warning{'s' * (len(warnings) > 1)}"
    if strict and warnings:
        raise ConfigError(str(path), count, "none with --strict")
    typer.echo(f"{path}: ok" + (f", {count}" if warnings else ""))
    for line in sizes:
        typer.echo(line)


@with_exit_code
def serve(
    path: Annotated[Path, typer.Argument(help="A Serve config file.")] = Path("deploy/config.yaml"),
) -> None:
    """Start a service on this machine: `serve run` with a strict config check, a clean start and a clean end."""
    from deploy.run import serve as run

    def say(line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be closed
            typer.echo(f"serve: {line}", err=True)

    raise SystemExit(run(path, say))


@with_exit_code
def status(
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT of Ray's GCS; RAY_ADDRESS, or the cluster of this machine.")
    ] = None,
) -> None:
    """What `serve status` prints, and every policy that a replica refuses: exit code 1 if there is one."""
    from deploy.status import as_yaml, read, refusals, use_token

    use_token()
    found = read(address)
    typer.echo(as_yaml(found), nl=False)
    lines = refusals(found)
    for line in lines:
        typer.echo(line, err=True)
    raise SystemExit(int(bool(lines)))


@with_exit_code
def new_key(
    name: Annotated[str, typer.Argument(help="Name of the key's owner: letters, digits, dot, dash, underscore.")],
    file: Annotated[Path, typer.Option("--file", help="Key file to add it to; created if missing.")],
    requests_per_minute: Annotated[int | None, typer.Option(help="Limit of the key at one replica.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="The same, of prompt and answer.")] = None,
    concurrent_requests: Annotated[int | None, typer.Option(help="The same, open at once.")] = None,
) -> None:
    """Create an API key. It is printed once; the file holds only its hash."""
    from deploy.keys import KeyLimits, add_key

    limits = KeyLimits(requests_per_minute, concurrent_requests, tokens_per_minute)
    typer.echo(add_key(file, name, limits))

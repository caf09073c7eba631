"""The commands of `tide`, by name."""

from __future__ import annotations

import contextlib
from importlib import metadata
from typing import Annotated

import typer

from tide_core.cli.calibrate import calibrate
from tide_core.cli.eval import evaluate
from tide_core.cli.generate import generate
from tide_core.cli.inspect import inspect
from tide_core.cli.verdict import verdict

app = typer.Typer(
    name="tide",
    help="Per-token early exit for stock Hugging Face causal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("generate")(generate)
app.command("calibrate")(calibrate)
app.command("inspect")(inspect)
app.command("eval")(evaluate)
app.command("verdict")(verdict)
for _found in sorted(metadata.entry_points(group="tide.commands"), key=lambda point: point.name):
    # Commands of the server and the client. One that cannot be imported does not disable the others.
    with contextlib.suppress(ImportError):
        app.command(_found.name)(_found.load())


def _print_version(asked: bool) -> None:
    if asked:
        try:
            version = metadata.version("tide-serve")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        typer.echo(f"tide {version}")
        raise typer.Exit


@app.callback()
def tide(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command group."""

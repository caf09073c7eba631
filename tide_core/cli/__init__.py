"""The `tide` command. One file per command; torch is imported only by the commands that need it."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tide` with `argv` (the process arguments by default) and return its exit code."""
    from tide_core.cli.app import app
    from tide_core.cli.exit_codes import exit_code_of, interrupts

    with interrupts():
        return exit_code_of(lambda: app(args=argv if argv is None else list(argv), prog_name="tide"))

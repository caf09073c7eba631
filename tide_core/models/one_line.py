"""Errors of other libraries, made fit for one of ours."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """The error's kind and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__

"""Write answers to standard output: as text, as texts in order, or as JSON lines.

A writer receives every output of every request through `put`, in any order, and writes what it can at once.

The exit layer of each token can be marked. On a terminal every checkpoint layer has a colour, text of full depth has
none, and a token that full depth would not have chosen is inverse. Elsewhere the layer precedes the text in brackets,
with `!` for an inverse token; programs read `--json` instead:

    [30]The capital of[2] France is[30] Paris[2!] or
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from tide_core.request import Audit, RequestOutput, TokenOutput, Usage


class Shown(Protocol):
    """The fields of a token that are marked; tokens of the engine and of the client have them."""

    @property
    def text(self) -> str: ...
    @property
    def exit_layer(self) -> int: ...
    @property
    def audit(self) -> str: ...


Paint = Callable[[int, TokenOutput], str]
"""Maps the number of a request and its next token to the text to write."""

COLOURS = ("32", "36", "33", "35", "34", "31")
RESET = "\033[0m"


class ExitPaint(Protocol):
    def __call__(self, request: int, token: Shown) -> str: ...

    def label(self, layer: int, text: str) -> str:
        """`text` as the legend shows it for a layer."""


def plain(request: int, token: TokenOutput) -> str:
    return token.text


def exit_paint(num_layers: int) -> ExitPaint:
    """Colours on a terminal, brackets elsewhere."""
    dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return Colours(num_layers) if sys.stdout.isatty() and not dumb else Brackets()


class Colours:
    """A colour per checkpoint layer, in order of first use."""

    def __init__(self, num_layers: int) -> None:
        self._codes: dict[int, str] = {num_layers: ""}

    def __call__(self, request: int, token: Shown) -> str:
        codes = [self._code(token.exit_layer), "7" if token.audit == Audit.DISAGREED else ""]
        return _sgr(token.text, codes)

    def label(self, layer: int, text: str) -> str:
        return _sgr(text, [self._code(layer)])

    def _code(self, layer: int) -> str:
        return self._codes.setdefault(layer, COLOURS[(len(self._codes) - 1) % len(COLOURS)])


class Brackets:
    """The layer in brackets wherever it changes."""

    def __init__(self) -> None:
        self._last: dict[int, str] = {}

    def __call__(self, request: int, token: Shown) -> str:
        if not token.text:  # part of a character, or the end token
            return ""
        mark = f"[{token.exit_layer}{'!' if token.audit == Audit.DISAGREED else ''}]"
        changed = self._last.get(request) != mark
        self._last[request] = mark
        return f"{mark}{token.text}" if changed else token.text

    def label(self, layer: int, text: str) -> str:
        return text


def _sgr(text: str, codes: list[str]) -> str:
    joined = ";".join(code for code in codes if code)
    return f"\033[{joined}m{text}{RESET}" if joined and text else text


class Writer(Protocol):
    def put(self, request: int, output: RequestOutput) -> None: ...


class TextWriter:
    """Streams the text of one request after another, marked by `paint`."""

    def __init__(self, paint: Paint = plain) -> None:
        self._paint = paint

    def put(self, request: int, output: RequestOutput) -> None:
        text = "".join(self._paint(request, token) for token in output.tokens)
        if text:
            write(text)
        if output.finished and sys.stdout.isatty():
            write("\n")


class OrderedTextWriter:
    """Answers of many requests in their order; each is written when it and all before it are done."""

    def __init__(self, paint: Paint = plain) -> None:
        self._paint = paint
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._done: set[int] = set()
        self._next = 0

    def put(self, request: int, output: RequestOutput) -> None:
        self._texts[request] += [self._paint(request, token) for token in output.tokens]
        if output.finished:
            self._done.add(request)
        while self._next in self._done:
            self._done.remove(self._next)
            text = "".join(self._texts.pop(self._next, []))
            write(f"=== {self._next + 1} ===\n{text}{'' if text.endswith(chr(10)) else chr(10)}")
            self._next += 1


class JsonWriter:
    """One object per token, and one at the end of each request."""

    def __init__(self, *, model: str, mode: str, kernels: str) -> None:
        self._about = {"model": model, "mode": mode, "kernels": kernels}
        self._texts: defaultdict[int, list[str]] = defaultdict(list)

    def put(self, request: int, output: RequestOutput) -> None:
        texts = self._texts[request]
        lines = []
        for token in output.tokens:
            lines.append({"type": "token", "request": request, "index": len(texts), **_token(token)})
            texts.append(token.text)
        if output.finish_reason is not None:
            lines.append({"type": "final", "request": request, **_final(output, "".join(texts)), **self._about})
            del self._texts[request]
        write_json(*lines)


def write_json(*values: dict[str, Any]) -> None:
    """One line each."""
    write("".join(json.dumps(value, allow_nan=False) + "\n" for value in values))


def write(text: str) -> None:
    """Write text to standard output and flush. A progress bar on the same terminal is redrawn after it."""
    tqdm = sys.modules.get("tqdm")
    with tqdm.tqdm.external_write_mode(file=sys.stdout) if tqdm else contextlib.nullcontext():
        sys.stdout.write(text)
        sys.stdout.flush()


def tokens_per_s(num_tokens: int, seconds: float) -> float:
    return num_tokens / seconds if seconds > 0 else 0.0


def _token(token: TokenOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": token.token_id,
        "text": token.text,
        "exit_layer": token.exit_layer,
        "score": None if token.score is None else _number(token.score),
        "audit": token.audit.value,
        "gap": token.gap,
        "mode": token.mode,
    }
    if token.logprob is not None:
        fields["logprob"] = _number(token.logprob)
    if token.top_logprobs:
        fields["top_logprobs"] = [{"id": token_id, "logprob": _number(value)} for token_id, value in token.top_logprobs]
    return fields


def _final(output: RequestOutput, text: str) -> dict[str, Any]:
    assert output.finish_reason is not None
    fields: dict[str, Any] = {"text": text, "finish_reason": output.finish_reason.value}
    if output.error is not None:
        fields["error"] = str(output.error)
    usage = output.usage
    fields["usage"] = None if usage is None else _counts(usage)
    fields["exits"] = None if usage is None else _exits(usage)
    fields["timings"] = None if usage is None else _timings(usage)
    return fields


def _counts(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def _exits(usage: Usage) -> dict[str, Any]:
    """Where tokens left and what ran for them."""
    return {
        "by_layer": {str(layer): usage.exits[layer] for layer in sorted(usage.exits)},
        "layers_run": usage.layers_run,
        "layers_per_token": round(usage.layers_per_token, 4),
        "deep_passes": usage.deep_passes,
        "tokens_per_deep_pass": round(usage.tokens_per_deep_pass, 4),
        "drafts": usage.num_drafts,
        "accepted": usage.num_accepted,
        "differing": usage.num_differing,
        "acceptance": None if usage.acceptance is None else round(usage.acceptance, 4),
    }


def _timings(usage: Usage) -> dict[str, float]:
    """Seconds since submission; the rate includes the time in the queue."""
    return {
        "queue_s": round(usage.queue_s, 6),
        "first_token_s": round(usage.first_token_s, 6),
        "total_s": round(usage.total_s, 6),
        "tokens_per_s": round(tokens_per_s(usage.output_tokens, usage.total_s), 3),
    }


def _number(value: float) -> float | None:
    """None for an infinity, which JSON cannot hold: a token with probability 0 has no log-probability."""
    return value if math.isfinite(value) else None

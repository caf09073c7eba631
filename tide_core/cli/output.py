"""How answers reach standard output: as text, as texts in order, or as JSON lines.

A writer gets every output of every request by `put`, in whatever order they come, and writes at once what it may.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import defaultdict
from typing import Any, Protocol

from tide_core.cli.paint import Paint, plain
from tide_core.request import RequestOutput, TokenOutput, Usage


class Writer(Protocol):
    def put(self, request: int, output: RequestOutput) -> None: ...


class TextWriter:
    """The text of one request after another, piece by piece, and nothing else but what `paint` puts round it."""

    def __init__(self, paint: Paint = plain) -> None:
        self._paint = paint

    def put(self, request: int, output: RequestOutput) -> None:
        text = "".join(self._paint(request, token) for token in output.tokens)
        if text:
            write(text)
        if output.finished and sys.stdout.isatty():
            write("\n")


class OrderedTextWriter:
    """Answers of many requests in their order; each is printed when it and all before it are done."""

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
    """One object per token as it comes, and one at the end of each request."""

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
    """Text to standard output, now. A progress bar on the same terminal steps aside for it."""
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
        "acceptance": None if usage.acceptance is None else round(usage.acceptance, 4),
    }


def _timings(usage: Usage) -> dict[str, float]:
    """Seconds since the request was handed over; the rate counts the wait too."""
    return {
        "queue_s": round(usage.queue_s, 6),
        "first_token_s": round(usage.first_token_s, 6),
        "total_s": round(usage.total_s, 6),
        "tokens_per_s": round(tokens_per_s(usage.output_tokens, usage.total_s), 3),
    }


def _number(value: float) -> float | None:
    """JSON has no infinities: a token that cannot be drawn has no log-probability."""
    return value if math.isfinite(value) else None

"""Output of `tide client`: text marked by exit layer, or JSON lines."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tide_client.results import Answer, Token
from tide_core.cli.output import ExitPaint, exit_paint, tokens_per_s, write, write_json

LOGPROB_FIELDS = ("logprob", "top_logprobs")


def write_text(stream: Any, *, num_layers: int, shows_exits: bool) -> None:
    """Stream the text to standard output; then one summary line to standard error."""
    paint = exit_paint(num_layers)
    for token in stream:
        write(paint(0, token) if shows_exits else token.text)
    if sys.stdout.isatty():
        write("\n")
    _write_summary(stream.answer, num_layers, paint)


def write_choices(stream: Any, *, num_layers: int, shows_exits: bool) -> None:
    """Read all choices, which arrive mixed; then write each after a line with its number, and its summary line."""
    for _ in stream:
        pass
    for index, choice in enumerate(stream.answer.choices):
        paint = exit_paint(num_layers)
        text = "".join(paint(0, token) if shows_exits else token.text for token in choice.tokens)
        write(f"--- choice {index}\n{text}\n")
        _write_summary(choice, num_layers, paint)


def _write_summary(answer: Answer, num_layers: int, paint: ExitPaint) -> None:
    if sys.stderr is not None:
        print(f"tide: {summary(answer, num_layers, paint)}", file=sys.stderr, flush=True)


def write_lines(stream: Any) -> None:
    """One object per token, and one for the end of each choice."""
    counts: Counter[int] = Counter()
    for token in stream:
        write_json({"type": "token", "index": counts[token.choice], **_fields(token)})
        counts[token.choice] += 1
    for index, choice in enumerate(stream.answer.choices):
        fields = {name: value for name, value in asdict(choice).items() if name not in ("tokens", "others")}
        write_json({"type": "final", "choice": index, **fields})


def write_times(times: Mapping[str, float], *, json_lines: bool) -> None:
    """Results of a bench."""
    if json_lines:
        write_json({"type": "bench", **times})
    else:
        write("".join(f"{name:24} {value:.4g}\n" for name, value in times.items()))


def summary(answer: Answer, num_layers: int, paint: ExitPaint) -> str:
    """Tokens per exit layer, which is also the legend of the colours, then cost and times."""
    usage, exits = answer.usage, answer.exits
    if not usage.completion_tokens:
        return f"no tokens ({answer.finish_reason})"
    layers = (
        (layer, f"all {layer} layers" if layer == num_layers else f"layer {layer}") for layer in exits.tokens_per_layer
    )
    shares = ", ".join(f"{exits.tokens_per_layer[layer]} after {paint.label(layer, name)}" for layer, name in layers)
    shares += f"; differing from full depth: {exits.differing}" if exits.differing else ""
    rate = tokens_per_s(usage.completion_tokens, usage.total_s)
    return (
        f"{usage.completion_tokens} tokens ({answer.finish_reason}): {shares}; "
        f"{exits.tokens_per_deep_pass:.2f} tokens per deep pass, {exits.layers_per_token:.1f} layers run per token; "
        f"first token after {usage.first_token_s:.2f} s, all after {usage.total_s:.2f} s ({rate:.1f} tok/s)"
    )


def _fields(token: Token) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(token).items() if name not in LOGPROB_FIELDS}
    if token.score is not None and not math.isfinite(token.score):  # JSON cannot hold it
        fields["score"] = None
    return fields

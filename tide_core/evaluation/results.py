"""The figures of each contract, and how they are written: a table, CSV, JSON. No torch here."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ContractResult:
    """What one contract gave over all prompts, greedy."""

    name: str
    mode: str
    epsilon: float | None
    threshold: float | None
    num_prompts: int
    num_tokens: int
    disagreement: float
    """Share of tokens that full depth would have chosen otherwise, given all before them as they were emitted."""
    exact_match: float
    """Share of prompts whose whole answer is that of full depth."""
    perplexity: float
    """Of its own output, by full depth."""
    perplexity_difference: float
    """To that of the output of full depth."""
    layers_per_token: float
    layers_share: float
    """Of all layers."""
    tokens_per_deep_pass: float
    acceptance: float | None
    """Share of drafts that became output; None without drafts."""
    exit_rate: float
    """Share of tokens that left early."""
    seconds: float
    tokens_per_s: float
    speedup: float
    """Tokens per second over those of full depth in the same run."""
    num_fallback_tokens: int
    """Tokens decided under another mode than was asked for, because a bound broke."""


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("disagreement", "disagree", "{:.4f}"),
    ("exact_match", "exact", "{:.3f}"),
    ("perplexity_difference", "ppl diff", "{:+.3f}"),
    ("layers_per_token", "layers/token", "{:.2f}"),
    ("tokens_per_deep_pass", "tokens/pass", "{:.2f}"),
    ("acceptance", "accepted", "{:.3f}"),
    ("tokens_per_s", "tokens/s", "{:.1f}"),
    ("speedup", "speed-up", "{:.2f}"),
)


def table(results: Sequence[ContractResult]) -> str:
    """One line per contract, in columns."""
    width = max(len("contract"), *(len(result.name) for result in results))
    lines = ["  ".join([f"{'contract':{width}}", *(title for _, title, _ in COLUMNS)])]
    for result in results:
        cells = [f"{_cell(getattr(result, name), form):>{len(title)}}" for name, title, form in COLUMNS]
        lines.append("  ".join([f"{result.name:{width}}", *cells]))
    for result in results:
        if result.num_fallback_tokens:
            share = f"{result.num_fallback_tokens} of {result.num_tokens} tokens"
            lines.append(f"{result.name}: its bound broke; {share} were verified")
    return "".join(line.rstrip() + "\n" for line in lines)


def as_csv(results: Sequence[ContractResult]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(ContractResult)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(result) for result in results)
    return out.getvalue()


def as_json(results: Sequence[ContractResult], conditions: Mapping[str, Any]) -> str:
    rows = [{key: _finite(value) for key, value in asdict(result).items()} for result in results]
    return json.dumps({"conditions": dict(conditions), "results": rows}, indent=2, allow_nan=False) + "\n"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _finite(value: Any) -> Any:
    """JSON has no infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

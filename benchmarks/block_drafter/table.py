"""The table of a report: tokens per deep pass by block length, chances by place, and predicted speed-ups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.block_drafter.cost import cost_key, interpolated
from benchmarks.block_drafter.variants import Variant

PLACES = 4
"""Places whose chances are shown."""


def render(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines for people to read."""
    yield ""
    yield f"{'variant':36} {'million':>8} {'steps':>6}  prompts  tokens per deep pass, by drafts; chance by place"
    for name, each in _done(report).items():
        front = f"{name:36} {each['parameters'] / 1e6:8.2f} {each['steps']:6}"
        for kind, found in each["held_out"].items():
            tokens = "  ".join(f"{k}: {value:.3f}" for k, value in found["tokens_per_pass"].items())
            chances = " ".join(f"{chance:.3f}" for chance in found["chance_by_place"][:PLACES])
            yield f"{front}  {kind:7}  {tokens};  {chances}"
            front = " " * len(front)
    if report["costs"] is None:
        return
    for scale, by_rows in report["costs"].items():
        yield ""
        yield f"{scale}: predicted speed-up (drafts that are best); cost of all drafts, in full passes"
        for kind in _kinds(report):
            yield f"  {kind + ' prompts':34}" + "".join(f"{rows + ' rows':>24}" for rows in by_rows)
            for name, each in _done(report).items():
                cells = [_cell(Variant.parse(name), each["held_out"][kind], costs) for costs in by_rows.values()]
                yield f"  {name:34}" + "".join(f"{cell:>24}" for cell in cells)


def _done(report: Mapping[str, Any]) -> dict[str, Any]:
    """Variants without an error."""
    return {name: each for name, each in report["variants"].items() if "error" not in each}


def _kinds(report: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(kind for each in _done(report).values() for kind in each["held_out"]))


def _cell(variant: Variant, found: Mapping[str, Any], costs: Mapping[str, Any]) -> str:
    best = best_length(found["tokens_per_pass"], costs, cost_key(variant))
    if best is None:
        return "-"
    k, gain = best
    cycle = interpolated(costs["cycle_ms"][cost_key(variant)], int(k))
    verify = interpolated(costs["verify_ms"], int(k))
    if cycle is None or verify is None:
        return f"{gain:.2f} ({k})"
    return f"{gain:.2f} ({k}); {(cycle - verify) / costs['full_ms']:.2f}"


def best_length(tokens: Mapping[str, float], costs: Mapping[str, Any], key: str) -> tuple[str, float] | None:
    """The number of drafts with the highest predicted speed-up over full depth, and that speed-up."""
    cycles = costs["cycle_ms"].get(key, {})
    seconds = {k: interpolated(cycles, int(k)) for k in tokens}
    gains = {k: tokens[k] * costs["full_ms"] / each for k, each in seconds.items() if each is not None}
    return max(gains.items(), key=lambda pair: pair[1]) if gains else None

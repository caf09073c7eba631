"""The prompts of the benchmarks. No artefact is calibrated on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROMPT_FILE = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True)
class Prompt:
    kind: str
    ids: tuple[int, ...]


def read_texts(path: Path = PROMPT_FILE) -> list[tuple[str, str]]:
    """(kind, text) of every prompt of a file."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [(line.get("kind", ""), line["prompt"]) for line in lines]


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts at even distances in the file, or all of them if there are fewer."""
    count = min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def different_kinds(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts: one of each kind, then a second of each kind, and so on."""
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_kind.setdefault(prompt.kind, []).append(prompt)
    chosen: list[Prompt] = []
    while len(chosen) < count and any(by_kind.values()):
        chosen += [of_kind.pop(0) for of_kind in by_kind.values() if of_kind]
    return chosen[:count]

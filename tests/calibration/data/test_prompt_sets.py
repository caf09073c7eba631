"""The prompts that ship: one set for calibration, one for benchmarks only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CALIBRATION = ROOT / "tide_core" / "calibration" / "data" / "prompts.jsonl"
OPENINGS = ROOT / "tide_core" / "calibration" / "data" / "openings.txt"
BENCHMARKS = ROOT / "benchmarks" / "common" / "prompts.jsonl"
LANGUAGES = {"french", "german", "spanish", "italian", "portuguese", "chinese", "japanese", "russian", "arabic"}


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain(prompt: str) -> str:
    return " ".join(prompt.lower().split()).strip(" .?!")


@pytest.mark.parametrize(("path", "least"), [(CALIBRATION, 320), (BENCHMARKS, 220)])
def test_every_line_is_a_prompt_with_its_kind_and_none_is_there_twice(path: Path, least: int) -> None:
    lines = read(path)

    assert len(lines) >= least
    assert all(line.keys() == {"prompt", "kind"} for line in lines)
    assert all(line["prompt"].strip() == line["prompt"] != "" for line in lines)
    assert len({plain(line["prompt"]) for line in lines}) == len(lines)


@pytest.mark.parametrize("path", [CALIBRATION, BENCHMARKS])
def test_prompts_are_varied_and_mostly_english(path: Path) -> None:
    kinds = [line["kind"] for line in read(path)]

    assert {"chat", "advice", "maths", "code", "prose", "summarise", "rewrite", "facts", "list"} <= set(kinds)
    assert {"dialogue", "reasoning"} | LANGUAGES <= set(kinds)
    assert max(kinds.count(kind) for kind in kinds) < len(kinds) / 5
    assert sum(kind in LANGUAGES for kind in kinds) < len(kinds) / 2


def test_no_prompt_of_the_benchmarks_is_calibrated_on() -> None:
    calibrated = {plain(line["prompt"]) for line in read(CALIBRATION)}

    assert not [line["prompt"] for line in read(BENCHMARKS) if plain(line["prompt"]) in calibrated]


def test_openings_are_short_and_none_is_a_whole_prompt() -> None:
    openings = OPENINGS.read_text(encoding="utf-8").splitlines()
    prompts = {plain(line["prompt"]) for path in (CALIBRATION, BENCHMARKS) for line in read(path)}

    assert len(openings) >= 300
    assert len({plain(opening) for opening in openings}) == len(openings)
    assert all(opening.strip() == opening != "" and len(opening.split()) <= 10 for opening in openings)
    assert prompts.isdisjoint(plain(opening) for opening in openings)

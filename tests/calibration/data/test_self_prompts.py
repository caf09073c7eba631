"""Prompts that the model writes: distinct, and enough of them."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.calibration.collect.generators import EOS, make_generator
from tests.calibration.tiny_runs import tiny_calibration
from tests.factories import tiny_tokenizer
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data import self_prompts
from tide_core.calibration.data.dataset import RecordPool, gather
from tide_core.calibration.data.records import Record
from tide_core.calibration.data.self_prompts import PromptBatch, WrittenPrompt, add_self_prompts, write_prompts
from tide_core.calibration.progress import SilentProgress


def self_prompted(model: Any, tokenizer: Any, **settings: Any) -> RecordPool:
    config = tiny_calibration(data="self", **settings)
    pool = gather(config)
    fill(pool, config, tokenizer, make_generator(model, 64))
    return pool


def fill(pool: RecordPool, config: CalibrationConfig, tokenizer: Any, generator: Any) -> None:
    def make(batches: Sequence[PromptBatch]) -> Iterator[list[WrittenPrompt]]:
        for batch in batches:
            yield write_prompts(batch, config, tokenizer, generator, EOS)

    add_self_prompts(pool, config, make, generator.batch, SilentProgress())


def test_the_model_fills_up_the_prompts_with_distinct_ones_of_its_own(model: Any) -> None:
    shipped = len(gather(tiny_calibration(data="self", num_samples=10000)))

    pool, again = (self_prompted(model, tiny_tokenizer(), num_samples=shipped + 40) for _ in range(2))

    assert len(pool) == shipped + 40
    assert pool.lines() == again.lines()
    assert {Record.of_line(line).kind for line in pool.lines()} == {"prompt"}


def test_a_model_without_a_template_begins_texts_of_its_own(model: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None

    assert len(self_prompted(model, tokenizer, num_samples=400)) == 400


def test_few_samples_need_no_prompts_of_the_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "generate", None)

    assert len(self_prompted(model, tiny_tokenizer(), num_samples=10)) == 10


class Parrot:
    """A generator that repeats a few texts."""

    batch = 16

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self.num_written = itertools.cycle(texts), 0

    def run(self, prompts: Sequence[list[int]], *args: Any, **options: Any) -> list[Any]:
        self.num_written += len(prompts)
        return [np.array([*tiny_tokenizer().encode(next(self._texts)), EOS[0]], np.int32) for _ in prompts]


def parroted(texts: Sequence[str], num_samples: int, monkeypatch: pytest.MonkeyPatch) -> tuple[RecordPool, Parrot]:
    for share in ("OPENED_SHARE", "BEGUN_SHARE"):
        monkeypatch.setattr(self_prompts, share, 0.0)
    config, parrot = tiny_calibration(data="self", num_samples=num_samples), Parrot(texts)
    pool = gather(config)
    fill(pool, config, tiny_tokenizer(), parrot)
    return pool, parrot


def test_most_prompts_of_the_model_begin_with_an_opening_some_with_a_shipped_one_and_some_with_nothing() -> None:
    tokenizer, asked = tiny_tokenizer(), list[list[int]]()

    class Listener(Parrot):
        def run(self, prompts: Sequence[list[int]], *args: Any, **options: Any) -> list[Any]:
            asked.extend(prompts)
            return super().run(prompts, *args, **options)

    write_prompts(PromptBatch(0, 400, 0, 400), tiny_calibration(data="self"), tokenizer, Listener(["so"]), EOS)

    shortest = min(asked, key=len)
    opened = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in self_prompts.read_openings()}
    starts = [tuple(ids[len(shortest) :]) for ids in asked]
    assert all(ids[: len(shortest)] == shortest for ids in asked)
    assert 0.5 < sum(start in opened for start in starts) / 400 < 0.75
    assert 0.08 < starts.count(()) / 400 < 0.25


def test_prompts_of_the_model_that_are_nearly_another_one_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = gather(tiny_calibration(data="self", num_samples=999)).lines()
    shipped = [str(Record.of_line(line).content) for line in lines]
    new = ["the cat sat on the mat and then went all the way home", "how do dogs log things"]
    near = ["The cat sat on the mat, and then went all the way home!", "How do DOGS log things??", shipped[0].upper()]

    pool, _ = parroted([*new, *near], len(shipped) + 4, monkeypatch)

    contents = {str(Record.of_line(line).content) for line in pool.lines()}
    assert contents == {*shipped, *new}
    assert pool.num_near > 0


def test_a_model_that_repeats_itself_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, parrot = parroted(["only this"], 1000, monkeypatch)

    assert len(pool) < 1000
    assert parrot.num_written < 3 * 1.25 * 1000 + 16
    assert pool.num_near == parrot.num_written - 1

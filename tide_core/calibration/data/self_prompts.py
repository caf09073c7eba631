"""Prompts that the model makes up: it is shown a chat up to the user's turn and writes what a user might.

Left alone, a model asks for advice most of the time. So most of the prompts are begun for it: some with the first few
tokens of a shipped one, more with one of the openings beside this file, which people begin their prompts with. It then
goes on with sums, code and other languages as well. A model without a chat template begins texts of its own instead,
from its beginning-of-text token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tide_core.calibration.collect.generation import Generator
from tide_core.calibration.collect.sampling import Sampling
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.dataset import OPENINGS, RecordPool, gather, hash_of
from tide_core.calibration.data.encode import chat_opening
from tide_core.calibration.data.near import DistinctTexts
from tide_core.calibration.data.records import Record, as_record
from tide_core.calibration.progress import Progress

SAMPLING = Sampling(temperature=1.0, top_p=0.95)
OPENED_SHARE = 0.6
"""Of all prompts, those that are begun with an opening."""
BEGUN_SHARE = 0.25
"""Those that are begun with the first tokens of a shipped prompt."""
MAX_BEGUN_TOKENS = 4
MAX_ROUNDS = 3
SPARE = 1.25
"""Prompts asked for over those that are wanted: some come twice, and whole ones are preferred."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Some of the prompts that the model is asked for in one round."""

    round: int
    in_round: int
    first: int
    size: int

    @property
    def name(self) -> str:
        """Of its file in the run."""
        return f"prompts/{self.round}-{self.first // self.size:05d}.jsonl"


class MadeUp(NamedTuple):
    text: str
    is_whole: bool
    """Whether the model ended it itself."""


Maker = Callable[[Sequence[PromptBatch]], Iterable[Sequence[MadeUp]]]


def add_self_prompts(pool: RecordPool, config: CalibrationConfig, make: Maker, batch: int, progress: Progress) -> None:
    """Fill the pool up to the number of samples with prompts that the model samples, `batch` of them at once; `make`
    gives those of every batch in the batches' order.

    Only such as are not near to one that is there are taken: a held-out prompt shall not be one of the train part in
    other words. The pool counts those that are dropped. After a few rounds it stays as full as it is."""
    if len(pool) >= config.num_samples:
        return
    known, before = DistinctTexts(), _texts(pool)
    with progress.stage("self-prompts", math.ceil((config.num_samples - len(pool)) * SPARE), "prompt") as stage:
        for number in range(MAX_ROUNDS):
            wanted = config.num_samples - len(pool)
            if wanted <= 0:
                return
            asked = math.ceil(wanted * SPARE)
            batches = [PromptBatch(number, asked, first, batch) for first in range(0, asked, batch)]
            made: list[MadeUp] = []
            for some in make(batches):
                made += some
                stage.update(len(some))
            prompts = _usable([each.text for each in sorted(made, key=lambda each: not each.is_whole)])
            kept = known.take([*before, *prompts])[len(before) :]
            before = []
            pool.num_near += kept.count(False)
            if _fill(pool, [text for text, is_new in zip(prompts, kept, strict=True) if is_new], wanted) < wanted / 20:
                return


def make_up(
    batch: PromptBatch, config: CalibrationConfig, tokenizer: Any, generator: Generator, eos_ids: tuple[int, ...]
) -> list[MadeUp]:
    """The prompts of one batch: the same ones wherever and whenever it is done. None from a model that cannot."""
    opening, stop_ids = _opening(tokenizer, eos_ids)
    if not opening:
        return []
    begun = [tokenizer.encode(text, add_special_tokens=False) for text in _texts(gather(config))]
    opened = [tokenizer.encode(text, add_special_tokens=False) for text in read_openings()]
    random = np.random.default_rng((config.seed, batch.round))
    starts = [_start(begun, opened, random) for _ in range(batch.in_round)][batch.first : batch.first + batch.size]
    seed = hash_of(config.seed, "self-prompt", f"{batch.round}:{batch.first}") >> 1
    openings, most = [opening + start for start in starts], config.self_prompt_tokens
    made = []
    answers = generator.run(openings, SAMPLING, max_new=most, stop_ids=stop_ids, seed=seed)
    for start, new in zip(starts, answers, strict=True):
        ended = int(new[-1]) in stop_ids
        ids = [*start, *(new[:-1] if ended else new).tolist()]
        made.append(MadeUp(tokenizer.decode(ids, skip_special_tokens=True), ended))
    return made


def _texts(pool: RecordPool) -> list[str]:
    return [str(Record.of_line(line).content) for line in pool.lines()]


def read_openings() -> list[str]:
    """How people begin their prompts, in a few words."""
    return OPENINGS.read_text(encoding="utf-8").splitlines()


def _start(begun: list[list[int]], opened: list[list[int]], random: np.random.Generator) -> list[int]:
    """The ids of an opening, the first few of some prompt, or none."""
    draw = random.random()
    if draw < OPENED_SHARE:
        return opened[random.integers(len(opened))]
    if draw >= OPENED_SHARE + BEGUN_SHARE or not begun:
        return []
    return begun[random.integers(len(begun))][: random.integers(1, MAX_BEGUN_TOKENS + 1)]


def _usable(texts: list[str]) -> list[str]:
    """Without halves of characters, and without texts of which then nothing is left."""
    plain = [text.replace("\ufffd", "").strip() for text in texts]
    return [text for text in plain if as_record({"prompt": text}) is not None]


def _fill(pool: RecordPool, prompts: list[str], wanted: int) -> int:
    """Add up to so many of the prompts, the first ones first; returns how many were new."""
    added = 0
    for prompt in prompts:
        if added < wanted and pool.add_line(Record("prompt", prompt).line):
            added += 1
    return added


def _opening(tokenizer: Any, eos_ids: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
    """The ids to start from and those that end a prompt; none to start from where the model has no such thing."""
    if tokenizer.chat_template:
        before, after = chat_opening(tokenizer)
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        ends = tuple(token_id for token_id in after[:1] if token_id in special)
        return before, tuple(dict.fromkeys((*eos_ids, *ends)))
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return ([] if start is None else [int(start)]), eos_ids

"""Prompts that the model writes itself: it continues a chat at the user's turn.

Without a beginning, most of a model's prompts ask for advice. So most prompts get a beginning: some the first tokens of
a shipped prompt, more one of the openings in `openings.txt`, with which people begin their prompts; the model then also
writes sums, code and other languages. A model without a chat template writes texts from its beginning-of-text token.

A near-duplicate of another prompt is dropped (`DistinctTexts`): with one of the two in the train part and the other in
a held-out part, exits would look better than they are.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tide_core.calibration.collect.decoder import Sampling
from tide_core.calibration.collect.generation import Generator
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data.dataset import OPENINGS, RecordPool, gather, hash_of
from tide_core.calibration.data.encode import chat_opening
from tide_core.calibration.data.records import Record, as_record
from tide_core.calibration.progress import Progress

SAMPLING = Sampling(temperature=1.0, top_p=0.95)
OPENED_SHARE = 0.6
"""Share of prompts that begin with an opening."""
BEGUN_SHARE = 0.25
"""Share of prompts that begin with the first tokens of a shipped prompt."""
MAX_BEGUN_TOKENS = 4
MAX_ROUNDS = 3
SPARE = 1.25
"""Prompts generated per prompt needed: some are duplicates, and complete ones are preferred."""
LEAST_SHARED = 0.7
"""Jaccard similarity from which two texts are near-duplicates."""


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """`size` prompts from number `first` on, of the `in_round` prompts of one round."""

    round: int
    in_round: int
    first: int
    size: int

    @property
    def name(self) -> str:
        """Name of its file in the run."""
        return f"prompts/{self.round}-{self.first // self.size:05d}.jsonl"


class WrittenPrompt(NamedTuple):
    text: str
    is_whole: bool
    """Whether the model itself ended it."""


WriteBatches = Callable[[Sequence[PromptBatch]], Iterable[Sequence[WrittenPrompt]]]


def add_self_prompts(
    pool: RecordPool, config: CalibrationConfig, write: WriteBatches, batch: int, progress: Progress
) -> None:
    """Fill the pool up to the number of samples with prompts that the model samples, `batch` of them at once; `write`
    returns the prompts of every batch in the order of the batches.

    Near-duplicates are dropped, and the pool counts them. After a few rounds the pool stays as it is, full or not."""
    if len(pool) >= config.num_samples:
        return
    known, before = DistinctTexts(), _texts(pool)
    with progress.stage("self-prompts", math.ceil((config.num_samples - len(pool)) * SPARE), "prompt") as stage:
        for number in range(MAX_ROUNDS):
            wanted = config.num_samples - len(pool)
            if wanted <= 0:
                return
            in_round = math.ceil(wanted * SPARE)
            batches = [PromptBatch(number, in_round, first, batch) for first in range(0, in_round, batch)]
            written: list[WrittenPrompt] = []
            for some in write(batches):
                written += some
                stage.update(len(some))
            prompts = _usable([each.text for each in sorted(written, key=lambda each: not each.is_whole)])
            kept = known.take([*before, *prompts])[len(before) :]
            before = []
            pool.num_near += kept.count(False)
            if _fill(pool, [text for text, is_new in zip(prompts, kept, strict=True) if is_new], wanted) < wanted / 20:
                return


def write_prompts(
    batch: PromptBatch, config: CalibrationConfig, tokenizer: Any, generator: Generator, eos_ids: tuple[int, ...]
) -> list[WrittenPrompt]:
    """The prompts of one batch: the same on every worker. Empty for a model with neither template nor special token."""
    opening, stop_ids = _opening(tokenizer, eos_ids)
    if not opening:
        return []
    begun = [tokenizer.encode(text, add_special_tokens=False) for text in _texts(gather(config))]
    opened = [tokenizer.encode(text, add_special_tokens=False) for text in read_openings()]
    random = np.random.default_rng((config.seed, batch.round))
    starts = [_start(begun, opened, random) for _ in range(batch.in_round)][batch.first : batch.first + batch.size]
    seed = hash_of(config.seed, "self-prompt", f"{batch.round}:{batch.first}") >> 1
    openings, most = [opening + start for start in starts], config.self_prompt_tokens
    written = []
    answers = generator.run(openings, SAMPLING, max_new=most, stop_ids=stop_ids, seed=seed)
    for start, new in zip(starts, answers, strict=True):
        ended = int(new[-1]) in stop_ids
        ids = [*start, *(new[:-1] if ended else new).tolist()]
        written.append(WrittenPrompt(tokenizer.decode(ids, skip_special_tokens=True), ended))
    return written


def _texts(pool: RecordPool) -> list[str]:
    return [str(Record.of_line(line).content) for line in pool.lines()]


def read_openings() -> list[str]:
    """The first words of prompts that people write."""
    return OPENINGS.read_text(encoding="utf-8").splitlines()


def _start(begun: list[list[int]], opened: list[list[int]], random: np.random.Generator) -> list[int]:
    """The ids of an opening, the first ids of a shipped prompt, or none."""
    draw = random.random()
    if draw < OPENED_SHARE:
        return opened[random.integers(len(opened))]
    if draw >= OPENED_SHARE + BEGUN_SHARE or not begun:
        return []
    return begun[random.integers(len(begun))][: random.integers(1, MAX_BEGUN_TOKENS + 1)]


def _usable(texts: list[str]) -> list[str]:
    """Without incomplete characters, and without texts that are then empty."""
    plain = [text.replace("\ufffd", "").strip() for text in texts]
    return [text for text in plain if as_record({"prompt": text}) is not None]


def _fill(pool: RecordPool, prompts: list[str], wanted: int) -> int:
    """Add the first `wanted` new prompts; returns how many were added."""
    added = 0
    for prompt in prompts:
        if added < wanted and pool.add_line(Record("prompt", prompt).line):
            added += 1
    return added


def _opening(tokenizer: Any, eos_ids: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
    """The ids to start from, and the ids that end a prompt; the first are empty if the model has no such ids."""
    if tokenizer.chat_template:
        before, after = chat_opening(tokenizer)
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        ends = tuple(token_id for token_id in after[:1] if token_id in special)
        return before, tuple(dict.fromkeys((*eos_ids, *ends)))
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return ([] if start is None else [int(start)]), eos_ids


_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
"""A word, or one character of Chinese or Japanese, which have no spaces."""


class DistinctTexts:
    """Texts without near-duplicates.

    A text is the set of its runs of three words, without case, width and punctuation; a text of fewer words is one run.
    Two texts are near-duplicates if they share at least 0.7 of their runs (Jaccard). Near-duplicates share one of their
    rarest runs, a third of each (the prefix filter of Bayardo, Ma and Srikant, 2007): only those are in the index, so
    beginnings that half of all texts share cost nothing."""

    def __init__(self) -> None:
        self._kept: list[set[str]] = []
        self._index: dict[str, list[int]] = {}
        self._counts: Counter[str] = Counter()

    def take(self, texts: Sequence[str]) -> list[bool]:
        """Whether each text is kept: it is no near-duplicate of a text kept before. Most texts should be in the first
        call, which counts how rare each run is."""
        sets = [_runs(text) for text in texts]
        if not self._counts:  # correct with any fixed order of the runs
            self._counts.update(chain.from_iterable(sets))
        return [self._take(runs) for runs in sets]

    def _take(self, runs: set[str]) -> bool:
        num_rarest = len(runs) - math.ceil(LEAST_SHARED * len(runs)) + 1
        rarest = sorted(sorted(runs), key=self._counts.__getitem__)[:num_rarest]
        if any(_near(runs, self._kept[other]) for other in {o for run in rarest for o in self._index.get(run, ())}):
            return False
        for run in rarest:
            self._index.setdefault(run, []).append(len(self._kept))
        self._kept.append(runs)
        return True


def _near(one: set[str], two: set[str]) -> bool:
    if min(len(one), len(two)) < LEAST_SHARED * max(len(one), len(two)):
        return False
    shared = len(one & two)
    return shared >= LEAST_SHARED * (len(one) + len(two) - shared)


def _runs(text: str) -> set[str]:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return set(map("{} {} {}".format, words, words[1:], words[2:])) or {" ".join(words)}

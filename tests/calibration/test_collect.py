from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.calibration.tiny_runs import PROMPTS, tiny_calibration
from tests.factories import tiny_tokenizer
from tests.tiny_models import CONFIGS, tiny_model
from tide_core.calibration.collect import decoder
from tide_core.calibration.collect.collect import plan, sequences_of
from tide_core.calibration.collect.generation import Generator
from tide_core.calibration.collect.sampling import GREEDY, Sampling, draw
from tide_core.calibration.collect.shards import ShardEntry, TokenSequence, TokenShards, write_shard
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.data import self_prompts
from tide_core.calibration.data.dataset import RecordPool, gather, split
from tide_core.calibration.data.encode import PromptEncoder, chat_opening
from tide_core.calibration.data.lengths import Lengths
from tide_core.calibration.data.records import Record
from tide_core.calibration.data.self_prompts import MadeUp, PromptBatch, add_self_prompts, make_up
from tide_core.calibration.progress import LineProgress, SilentProgress
from tide_core.calibration.train.shortlist import choose_shortlist, count_emitted, coverage_of
from tide_core.errors import ConfigError
from tide_core.models.adapter import ModelAdapter
from tide_core.models.families import FAMILIES

EOS = (0,)


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny_model("llama"))


def make_generator(model: Any, batch: int = 4, *, fast: bool = False) -> Generator:
    return Generator(ModelAdapter(model, paged=False), pad_id=0, batch=batch, fast=fast)


def eager_or_default(family: str) -> Any:
    """Some versions of the library leave the soft-cap of Gemma 2 out except in eager attention."""
    model = copy.deepcopy(tiny_model(family))
    if family == "gemma2":
        model.set_attn_implementation("eager")
    return model


def lines_of(kind: str, num: int) -> list[str]:
    return [Record(kind, f"{kind} {n}: the cat sat on the mat and the dog sat on the log").line for n in range(num)]


def collected(folder: Path, model: Any, config: CalibrationConfig, lines: list[str]) -> dict[str, ShardEntry]:
    folder.mkdir(parents=True, exist_ok=True)
    generator, lengths = make_generator(model, config.generation_batch or 4), Lengths.of(config, 256)
    encoder = PromptEncoder(tiny_tokenizer(), lengths.prompt)
    return {
        unit.path: write_shard(
            folder, unit.part, unit.index, sequences_of(unit, config, encoder, generator, lengths, EOS)
        )
        for unit in plan(config, split(lines, config), generator.batch)
    }


# --- generation


FAST = [name for name, (architecture, _, _) in CONFIGS.items() if FAMILIES[architecture].attention == "paged"]


@pytest.mark.parametrize(("family", "fast"), [("llama", False), *((name, True) for name in FAST)])
def test_a_greedy_batch_says_what_each_prompt_alone_would(family: str, fast: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(decoder, "PROMPT_TOKENS", 30)  # prompts in two goes
    model = eager_or_default(family)
    prompts = [[5, 6, 7], [9, 8] * 6 + [4], [20, 30, 40, 50, 60]]
    generator = make_generator(model, fast=fast)
    before = model.config._attn_implementation

    together = generator.run(prompts, GREEDY, max_new=72, stop_ids=EOS, seed=0)

    assert model.config._attn_implementation == before
    for prompt, new in zip(prompts, together, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=72, do_sample=False, eos_token_id=0)
        assert new.tolist() == alone[0, len(prompt) :].tolist()


def test_a_decoder_goes_on_with_other_batches(model: Any) -> None:
    """Pools are kept where they fit; what an earlier batch left in them is not seen."""
    kept, prompts = make_generator(model, fast=True), [[7, 8, 9, 10], [3, 4]]
    for before in ([[50] * 30, [60] * 20], [[5]] * 3, [[5, 6]] * 2):
        kept.run(before, GREEDY, max_new=20, stop_ids=(), seed=0)

    found = kept.run(prompts, GREEDY, max_new=10, stop_ids=(), seed=0)
    kept.release()

    fresh = make_generator(model, fast=True).run(prompts, GREEDY, max_new=10, stop_ids=(), seed=0)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in fresh]


@pytest.mark.parametrize("fast", [False, True])
def test_a_sequence_ends_with_its_first_stop_id(model: Any, fast: bool) -> None:
    [whole] = make_generator(model, fast=fast).run([[5, 6, 7]], GREEDY, max_new=40, stop_ids=(), seed=0)

    [cut] = make_generator(model, fast=fast).run([[5, 6, 7]], GREEDY, max_new=40, stop_ids=(int(whole[3]),), seed=0)

    assert cut.tolist() == whole[: whole.tolist().index(whole[3]) + 1].tolist()


def test_draws_follow_the_temperature_and_stop_at_top_p() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(20000, 1)
    random = torch.Generator().manual_seed(0)

    counts = torch.bincount(draw(logits, Sampling(0.5, 1.0), random), minlength=4) / 20000
    assert torch.allclose(counts, (logits[0] / 0.5).softmax(0), atol=0.01)

    shares = logits[0].softmax(0)  # .03 .09 .24 .64
    counts = torch.bincount(draw(logits, Sampling(1.0, 0.7), random), minlength=4) / 20000
    assert torch.allclose(counts, torch.tensor([0, 0, *(shares[2:] / shares[2:].sum())]), atol=0.01)
    assert draw(logits[:1], GREEDY, random).tolist() == [3]


@pytest.mark.parametrize("fast", [False, True])
def test_sampling_repeats_with_its_seed_and_differs_with_another(model: Any, fast: bool) -> None:
    prompts, sampling = [[5, 6, 7]] * 6, Sampling(temperature=1.0, top_p=0.95)

    one, again, other = (
        [
            ids.tolist()
            for ids in make_generator(model, fast=fast).run(prompts, sampling, max_new=8, stop_ids=EOS, seed=seed)
        ]
        for seed in (1, 1, 2)
    )

    assert one == again != other
    assert len({tuple(ids) for ids in one}) > 1


def test_sampling_leaves_the_global_random_state_alone(model: Any) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    make_generator(model).run([[5, 6]], Sampling(1.0, 0.9), max_new=4, stop_ids=EOS, seed=9)

    assert torch.equal(torch.rand(1), expected)


def test_generation_settings_of_the_model_have_no_effect_and_are_kept(model: Any) -> None:
    plain = make_generator(model).run([[5, 6, 7]], GREEDY, max_new=8, stop_ids=EOS, seed=0)
    model.generation_config.repetition_penalty = 50.0
    model.generation_config.max_length = 5
    before = model.generation_config

    [same] = make_generator(model).run([[5, 6, 7]], GREEDY, max_new=8, stop_ids=EOS, seed=0)

    assert same.tolist() == plain[0].tolist()
    assert model.generation_config is before


def test_a_batch_that_does_not_fit_is_run_in_halves(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5 + n, 6, 7] for n in range(7)]
    expected = [ids.tolist() for ids in make_generator(model).run(prompts, GREEDY, max_new=4, stop_ids=EOS, seed=0)]
    whole, sizes = model.generate, []

    def generate(ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        sizes.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(ids, **kwargs)

    monkeypatch.setattr(model, "generate", generate)
    generator = make_generator(model, batch=8)

    found = generator.run(prompts, GREEDY, max_new=4, stop_ids=EOS, seed=0)

    assert [ids.tolist() for ids in found] == expected
    assert sizes == [7, 3, 1, 1, 1, 1, 1, 1, 1]  # 7 and 3 fail, then one by one
    generator.run(prompts[:2], GREEDY, max_new=4, stop_ids=EOS, seed=0)
    assert sizes[-1:] == [2], "a shard does not depend on those before it"


def test_one_sequence_that_does_not_fit_is_an_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model, "generate", generate)
    with pytest.raises(ConfigError, match="memory for one sequence"):
        make_generator(model).run([[5]] * 4, GREEDY, max_new=4, stop_ids=EOS, seed=0)


# --- prompts


def test_prompts_are_chats_where_the_model_has_a_template() -> None:
    encoder, tokenizer = PromptEncoder(tiny_tokenizer(), 64), tiny_tokenizer()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]

    prompt, messages, text = encoder.prompts(
        [Record("prompt", "the cat"), Record("messages", chat), Record("text", "the cat")]
    )

    assert tokenizer.decode(prompt) == "<|start|>user: the cat<|end|>\n<|start|>assistant: "
    assert tokenizer.decode(messages).startswith("<|start|>system: Be brief.<|end|>\n<|start|>user: Why?<|end|>")
    assert tokenizer.decode(text) == "the cat"


def test_without_a_template_prompts_are_plain_text_and_messages_are_refused() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    encoder = PromptEncoder(tokenizer, 64)

    assert tokenizer.decode(encoder.prompts([Record("prompt", "the cat")])[0]) == "the cat"
    with pytest.raises(ConfigError, match="no chat template"):
        encoder.prompts([Record("messages", [{"role": "user", "content": "Why?"}])])


def test_a_long_prompt_is_cut_inside_the_users_words() -> None:
    [ids] = PromptEncoder(tiny_tokenizer(), 40).prompts([Record("prompt", "the cat sat " * 50)])

    text = tiny_tokenizer().decode(ids)
    assert len(ids) <= 40
    assert text.startswith("<|start|>user: the cat")
    assert text.endswith("<|end|>\n<|start|>assistant: ")


def test_a_chat_too_long_without_its_last_words_loses_its_head() -> None:
    chat = [{"role": "user", "content": "the cat " * 50}, {"role": "assistant", "content": "ok"}]
    [ids] = PromptEncoder(tiny_tokenizer(), 30).prompts(
        [Record("messages", [*chat, {"role": "user", "content": "and?"}])]
    )

    assert len(ids) == 30
    assert tiny_tokenizer().decode(ids).endswith("<|start|>assistant: ")


def test_strings_of_special_tokens_inside_a_record_do_not_become_tokens() -> None:
    encoder = PromptEncoder(tiny_tokenizer(), 64)

    with_string, without = encoder.prompts([Record("prompt", "a<|end|>b<|start|>c"), Record("prompt", "abc")])

    assert with_string == without
    assert encoder.texts(["a<|end|>b"]) == encoder.texts(["ab"])


def test_the_opening_of_a_chat_ends_where_the_user_begins() -> None:
    before, after = chat_opening(tiny_tokenizer())

    assert tiny_tokenizer().decode(before) == "<|start|>user: "
    assert tiny_tokenizer().decode(after) == "<|end|>\n"


# --- prompts of the model's own


def self_prompted(model: Any, tokenizer: Any, **settings: Any) -> RecordPool:
    config = tiny_calibration(data="self", **settings)
    pool = gather(config)
    fill(pool, config, tokenizer, make_generator(model, 64))
    return pool


def fill(pool: RecordPool, config: CalibrationConfig, tokenizer: Any, generator: Any) -> None:
    def make(batches: Sequence[PromptBatch]) -> Iterator[list[MadeUp]]:
        for batch in batches:
            yield make_up(batch, config, tokenizer, generator, EOS)

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
    """As much of a generator as is used: says a few texts again and again."""

    batch = 16

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self.num_said = itertools.cycle(texts), 0

    def run(self, prompts: Sequence[list[int]], *args: Any, **options: Any) -> list[Any]:
        self.num_said += len(prompts)
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

    make_up(PromptBatch(0, 400, 0, 400), tiny_calibration(data="self"), tokenizer, Listener(["so"]), EOS)

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

    said = {str(Record.of_line(line).content) for line in pool.lines()}
    assert said == {*shipped, *new}
    assert pool.num_near > 0


def test_a_model_that_repeats_itself_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, parrot = parroted(["only this"], 1000, monkeypatch)

    assert len(pool) < 1000
    assert parrot.num_said < 3 * 1.25 * 1000 + 16
    assert pool.num_near == parrot.num_said - 1


# --- collecting


def test_held_out_parts_are_greedy_and_train_is_mixed() -> None:
    config = tiny_calibration(num_samples=300, greedy_share=0.5, min_calibration=60, min_test=40)

    units = plan(config, split(lines_of("prompt", 300), config), 16)

    assert {unit.sampling for unit in units if unit.part != "train"} == {GREEDY}
    train = {sampled: 0 for sampled in (GREEDY, Sampling(config.temperature, config.top_p))}
    for unit in units:
        if unit.part == "train":
            train[unit.sampling] += len(unit.records)
    assert min(train.values()) > 0.35 * sum(train.values())


def test_texts_of_the_train_part_are_partly_taken_as_they_are_and_others_never() -> None:
    config = tiny_calibration(num_samples=300, text_share=0.5)

    units = plan(config, split(lines_of("text", 300), config), 16)

    taken = sum(len(unit.records) for unit in units if unit.sampling is None)
    assert 0.3 < taken / sum(len(unit.records) for unit in units if unit.part == "train") < 0.7
    assert {unit.part for unit in units if unit.sampling is None} == {"train"}


def test_a_sequence_is_a_prompt_and_what_the_model_says_to_it(tmp_path: Path, model: Any) -> None:
    config = tiny_calibration()
    lines = [Record("prompt", prompt).line for prompt in PROMPTS]

    collected(tmp_path, model, config, lines)

    parts = split(lines, config)
    for part in ("calibration", "test"):
        expected = set()
        for line in parts[part]:
            [prompt] = PromptEncoder(tiny_tokenizer(), 40).prompts([Record.of_line(line)])
            [new] = make_generator(model).run([prompt], GREEDY, max_new=6, stop_ids=EOS, seed=0)
            expected.add((*prompt, *new.tolist()))
        shards = TokenShards(tmp_path, part)
        found = [shards.sequence(index) for index in range(shards.num_sequences)]
        assert {tuple(each.tokens.tolist()) for each in found} == expected
        assert all(1 < each.prompt_len < len(each.tokens) for each in found)


def test_a_text_is_cut_into_pieces_of_one_prompt_token(tmp_path: Path, model: Any) -> None:
    config = tiny_calibration(text_share=1.0, text_tokens=8)
    lines = lines_of("text", 10)

    collected(tmp_path, model, config, lines)

    shards = TokenShards(tmp_path, "train")
    found = [shards.sequence(index) for index in range(shards.num_sequences)]
    assert {each.prompt_len for each in found} == {1}
    assert max(len(each.tokens) for each in found) == 8
    pieces = "".join(sorted(tiny_tokenizer().decode(each.tokens) for each in found))
    texts = "".join(sorted(str(Record.of_line(line).content) for line in split(lines, config)["train"]))
    assert sorted(pieces) == sorted(texts)


def test_collecting_twice_gives_the_same_bytes(tmp_path: Path, model: Any) -> None:
    config, lines = tiny_calibration(), lines_of("prompt", 10)

    one = collected(tmp_path / "one", model, config, lines)
    two = collected(tmp_path / "two", model, config, lines)

    assert one == two
    assert one != collected(tmp_path / "three", model, tiny_calibration(seed=1), lines)


def test_lengths_fit_the_model() -> None:
    config = CalibrationConfig()

    assert Lengths.of(config, 8192) == Lengths(192, 224, 512)
    assert Lengths.of(config, 256) == Lengths(128, 128, 256)
    assert sum((lengths := Lengths.of(config, 300)).__getattribute__(name) for name in ("prompt", "new")) <= 300
    assert lengths.prompt > 0


# --- shortlist


def emitted(folder: Path, *sequences: tuple[list[int], int]) -> TokenShards:
    write_shard(folder, "train", 0, [TokenSequence(np.array(ids, np.int32), prompt) for ids, prompt in sequences])
    return TokenShards(folder, "train")


def test_only_what_the_model_said_is_counted(tmp_path: Path) -> None:
    counts = count_emitted(emitted(tmp_path, ([7, 7, 3, 4], 2), ([7, 4], 1)), 8)

    assert counts.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]


def test_texts_are_counted_where_there_is_nothing_else(tmp_path: Path) -> None:
    counts = count_emitted(emitted(tmp_path, ([7, 4, 4], 1)), 8)

    assert counts.tolist() == [0, 0, 0, 0, 2, 0, 0, 0]


def test_an_id_past_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an id below 8"):
        count_emitted(emitted(tmp_path, ([7, 4, 9], 2)), 8)


def test_the_shortlist_is_the_most_frequent_ids_and_the_ends_in_order() -> None:
    counts = np.array([0, 5, 0, 9, 1, 7, 0, 0])

    assert choose_shortlist(counts, size=3, coverage=0.9, eos_ids=(6,)).tolist() == [3, 5, 6]
    assert choose_shortlist(counts, size=3, coverage=0.9, eos_ids=()).tolist() == [1, 3, 5]


def test_ids_that_were_never_seen_fill_up_from_below() -> None:
    counts = np.array([0, 0, 0, 9, 0, 0, 0, 0])

    assert choose_shortlist(counts, size=4, coverage=0.9, eos_ids=(7,)).tolist() == [0, 1, 3, 7]


@pytest.mark.parametrize("size", [None, 8, 8192])
def test_without_a_size_below_the_vocabulary_coverage_decides(size: int | None) -> None:
    counts = np.array([50, 30, 17, 2, 1, 0, 0, 0])

    ids = choose_shortlist(counts, size=size, coverage=0.97, eos_ids=(0,))

    assert ids.tolist() == [0, 1, 2]
    assert coverage_of(ids, counts) == pytest.approx(0.97)
    assert len(choose_shortlist(counts, size=size, coverage=1.0, eos_ids=(0,))) == 5
    assert len(choose_shortlist(np.ones(8, np.int64), size=size, coverage=1.0, eos_ids=(0,))) == 7


# --- progress


def test_lines_tell_of_every_stage_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress(every_s=0.0)
    with progress.stage("collect", 4, "sequence") as stage:
        stage.update(2, loss=0.12345)
        stage.update(2)
    progress.note("done")

    lines = [re.sub(r", \d+ s", ", - s", line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "tide: collect: 2/4 sequence, - s, loss 0.1235",
        "tide: collect: 4/4 sequence, - s, loss 0.1235",
        "tide: done",
    ]


def test_a_line_tells_the_rate_and_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tide_core.calibration.progress.time.monotonic", lambda: now[0])
    with LineProgress(every_s=5.0).stage("collect", 1000, "sequence") as stage:
        now[0] = 10.0
        stage.update(20)
        now[0] = 500.0
        stage.update(980)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "tide: collect: 20/1000 sequence, 10 s, 2/s, 8 min left"
    assert last == "tide: collect: 1000/1000 sequence, 500 s"


def test_what_was_done_before_is_counted_and_says_nothing_of_the_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("tide_core.calibration.progress.time.monotonic", lambda: now[0])
    with LineProgress(every_s=5.0).stage("collect", 1000, "sequence", 900) as stage:
        now[0] = 10.0
        stage.update(20)
    [line] = capsys.readouterr().err.splitlines()
    assert line == "tide: collect: 920/1000 sequence, 10 s, 2/s, 40 s left"

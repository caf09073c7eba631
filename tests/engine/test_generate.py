"""What a request gets, whatever else is in the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.engine.exit_engines import poisoned
from tests.engine.runners import RunnerOf
from tests.factories import make_engine, make_parts, make_request, random_prompts, tiny_tokenizer
from tide_core.batch import ScheduledBatch, StepResult
from tide_core.engine.engine import Completion, Engine
from tide_core.errors import RequestError
from tide_core.request import ExitPolicy, FinishReason, Request, SamplingParams

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.95, seed=7, ignore_eos=True)


def ids(answer: Completion) -> list[int]:
    return [token.token_id for token in answer.tokens]


def test_answers_come_in_the_order_of_the_prompts() -> None:
    prompts = random_prompts(12, 9)
    with make_engine(max_rows=3) as engine:
        together = engine.generate(prompts, GREEDY)
        alone = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [ids(answer) for answer in together] == [ids(answer) for answer in alone]


def test_each_prompt_may_have_parameters_of_its_own() -> None:
    prompts = random_prompts(3, 9)
    of_each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 7, 4)]
    with make_engine() as engine:
        answers = engine.generate(prompts, of_each)
        alone = [engine.generate(prompt, params)[0] for prompt, params in zip(prompts, of_each, strict=True)]
        with pytest.raises(RequestError, match=r"params.*2 of them.*each of the 3 prompts"):
            engine.generate(prompts, of_each[:2])
    assert [ids(answer) for answer in answers] == [ids(answer) for answer in alone]
    assert [len(answer.tokens) for answer in answers] == [2, 7, 4]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_row_equals_itself_alone_whatever_its_mates(params: SamplingParams) -> None:
    [needle, *mates] = random_prompts(6, 17)
    with make_engine(prefix_caching=False) as engine:
        [expected] = engine.generate([needle], params)
        for count in (1, 3, 5):
            got = engine.generate([*mates[:count], needle], params)[-1]
            assert ids(got) == ids(expected)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_does_not() -> None:
    [prompt] = random_prompts(1, 9)
    with make_engine() as engine:
        first, again = engine.generate([prompt, prompt], SAMPLED)
        [other] = engine.generate([prompt], SamplingParams(max_tokens=12, temperature=1.0, seed=8, ignore_eos=True))
    assert ids(first) == ids(again)
    assert ids(first) != ids(other)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_preempted_row_equals_the_uninterrupted_run(params: SamplingParams) -> None:
    prompts = random_prompts(6, 10)
    with make_engine() as engine:
        expected = engine.generate(prompts, params)
    parts = make_parts(block_size=4)
    parts.core.scheduler.blocks = small = type(parts.core.scheduler.blocks)(12, 4)
    with Engine.from_parts(parts) as engine:
        got = engine.generate(prompts, params)
        assert engine.stats().num_preemptions > 0
    assert [ids(answer) for answer in got] == [ids(answer) for answer in expected]
    assert max(answer.usage.num_preemptions for answer in got if answer.usage) <= 8
    assert small.num_owned == 0


def test_nothing_reads_a_freed_or_unwritten_slot() -> None:
    prompts = random_prompts(9, 13)
    with make_engine() as engine:
        expected = engine.generate(prompts, GREEDY)
    settings = {"block_size": 4, "max_rows": 2, "prefix_caching": False}
    with poisoned(make_parts(**settings), **settings) as engine:
        for _ in range(2):
            got = engine.generate(prompts, GREEDY)
            assert [ids(answer) for answer in got] == [ids(answer) for answer in expected]


def test_prefix_caching_changes_the_work_and_not_the_answer() -> None:
    [start] = random_prompts(1, 40)
    prompts = [[*start, *tail] for tail in random_prompts(4, 5, seed=9)]
    with make_engine(prefix_caching=False) as engine:
        expected = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert engine.stats().num_prompt_tokens == 4 * 45
    with make_engine(prefix_caching=True) as engine:
        got = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert engine.stats().num_prompt_tokens == 45 + 3 * (45 - 32)
    assert [ids(answer) for answer in got] == [ids(answer) for answer in expected]
    assert [answer.usage.cached_tokens for answer in got if answer.usage] == [0, 32, 32, 32]


def test_requests_of_different_salts_share_no_blocks() -> None:
    [prompt] = random_prompts(1, 40)

    async def cached(engine: Engine, salt: str) -> int:
        async for output in engine.stream(prompt, GREEDY, cache_salt=salt):
            if output.usage:
                return output.usage.cached_tokens
        raise AssertionError("no last output")

    with make_engine() as engine:
        assert [asyncio.run(cached(engine, salt)) for salt in ("a", "b", "a")] == [0, 0, 32]


@pytest.mark.parametrize("change", ["model", "policy", "nothing"])
def test_blocks_are_shared_only_within_one_model_and_policy(change: str) -> None:
    [prompt] = random_prompts(1, 40)
    parts = make_parts()
    core = parts.core
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    policy = ExitPolicy()

    def cached() -> int:
        core.add(Request("r", tuple(prompt), params, seed=0, policy=policy))
        [output] = core.step()
        assert output.usage is not None
        return output.usage.cached_tokens

    assert cached() == 0
    if change == "model":
        core._namespace = "other weights"
    elif change == "policy":
        policy = ExitPolicy("verified", draft_thresholds=(0.5,))
    assert cached() == (32 if change == "nothing" else 0)


def test_reference_and_native_kernels_give_the_same_tokens() -> None:
    prompts = random_prompts(5, 11)
    with make_engine(kernels="reference") as plain, make_engine(kernels="auto") as fast:
        assert list(map(ids, plain.generate(prompts, GREEDY))) == list(map(ids, fast.generate(prompts, GREEDY)))


def test_every_token_says_that_all_layers_ran() -> None:
    with make_engine() as engine:
        [answer] = engine.generate(["the cat"], GREEDY)
    assert {token.exit_layer for token in answer.tokens} == {4}


def test_the_text_of_all_tokens_is_the_text() -> None:
    with make_engine() as engine:
        [answer] = engine.generate(["the cat sat"], GREEDY)
    assert answer.text == tiny_tokenizer().decode(ids(answer), skip_special_tokens=True)


def with_eos(token_id: int) -> Engine:
    """An engine whose model ends its texts with `token_id`."""
    parts = make_parts()
    parts.runner.adapter.model.generation_config.eos_token_id = [token_id]
    return Engine.from_parts(parts)


def test_generation_ends_at_the_models_end_of_text_id_which_is_not_text() -> None:
    with make_engine() as engine:
        [free] = engine.generate(["the dog"], GREEDY)
    eos = ids(free)[4]
    with with_eos(eos) as engine:
        [answer] = engine.generate(["the dog"], SamplingParams(max_tokens=12))
        [ignoring] = engine.generate(["the dog"], GREEDY)
        [held_off] = engine.generate(["the dog"], SamplingParams(max_tokens=12, min_tokens=9))
    assert answer.finish_reason is FinishReason.STOP
    assert ids(answer) == ids(free)[: ids(free).index(eos) + 1]
    assert answer.text == tiny_tokenizer().decode(ids(answer)[:-1], skip_special_tokens=True)
    assert ids(ignoring) == ids(free)
    assert len(held_off.tokens) >= 9


def test_an_end_of_text_id_outside_the_vocabulary_is_none() -> None:
    with with_eos(5000) as engine:
        for _ in range(4):
            [answer] = engine.generate(["the dog"], SamplingParams(max_tokens=4, min_tokens=2))
            assert answer.finish_reason is FinishReason.LENGTH


def test_generation_ends_at_a_stop_id_which_is_not_text() -> None:
    with make_engine() as engine:
        [free] = engine.generate(["the dog"], GREEDY)
        stop_id = ids(free)[4]
        [answer] = engine.generate(["the dog"], SamplingParams(max_tokens=12, ignore_eos=True, stop_ids=(stop_id,)))
        including = SamplingParams(max_tokens=12, ignore_eos=True, stop_ids=(stop_id,), include_stop_str_in_output=True)
        [with_stop] = engine.generate(["the dog"], including)
    assert answer.finish_reason is FinishReason.STOP
    assert ids(answer) == ids(with_stop) == ids(free)[: ids(free).index(stop_id) + 1]
    assert answer.text == tiny_tokenizer().decode(ids(answer)[:-1], skip_special_tokens=True)
    assert with_stop.text == tiny_tokenizer().decode(ids(answer), skip_special_tokens=True)


def test_generation_ends_at_a_stop_string_which_is_not_part_of_the_text() -> None:
    with make_engine() as engine:
        [free] = engine.generate(["the dog"], SamplingParams(max_tokens=40, ignore_eos=True))
        stop = free.text[5:8]
        [answer] = engine.generate(["the dog"], SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,)))
    assert answer.finish_reason is FinishReason.STOP
    assert answer.text == free.text[: free.text.index(stop)]


def test_what_was_held_back_is_released_when_the_text_ends_at_its_length() -> None:
    with make_engine() as engine:
        [free] = engine.generate(["the dog"], SamplingParams(max_tokens=6, ignore_eos=True))
        held = (free.text[-2:] + "never to come",)  # a stop string whose beginning is the end of the text
        [answer] = engine.generate(["the dog"], SamplingParams(max_tokens=6, ignore_eos=True, stop=held))
    assert answer.text == free.text
    assert answer.finish_reason is FinishReason.LENGTH


def test_min_tokens_holds_off_the_end() -> None:
    with make_engine() as engine:
        [free] = engine.generate(["the dog"], GREEDY)
        params = SamplingParams(max_tokens=12, min_tokens=6, ignore_eos=True, stop_ids=(ids(free)[0],))
        [answer] = engine.generate(["the dog"], params)
    assert len(answer.tokens) >= 6


def test_log_probabilities_come_when_asked_for() -> None:
    with make_engine() as engine:
        [with_them] = engine.generate(["the"], SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True))
        [without] = engine.generate(["the"], SamplingParams(max_tokens=3, ignore_eos=True))
    for token in with_them.tokens:
        assert token.logprob is not None
        assert token.top_logprobs[0] == (token.token_id, token.logprob)  # greedy takes the likeliest
        assert len(token.top_logprobs) == 2
    assert all(token.logprob is None and not token.top_logprobs for token in without.tokens)


def test_a_chat_is_rendered_by_the_models_template() -> None:
    messages = [{"role": "user", "content": "the cat"}]
    rendered = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    rendered_ids = rendered["input_ids"] if hasattr(rendered, "keys") else rendered
    with make_engine() as engine:
        [chat], [plain] = engine.generate(messages, GREEDY), engine.generate([list(rendered_ids)], GREEDY)
    assert ids(chat) == ids(plain)


def test_usage_counts_what_came_and_went() -> None:
    with make_engine() as engine:
        [answer] = engine.generate(random_prompts(1, 9), GREEDY)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (9, 12)
    assert 0 <= answer.usage.queue_s <= answer.usage.first_token_s <= answer.usage.total_s


def test_time_in_the_queue_ends_when_the_first_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    parts = make_parts(max_rows=1)
    core = parts.core

    def slow(batch: ScheduledBatch) -> StepResult:
        nonlocal now
        now += 1.0
        return parts.runner.run(batch)

    core._runner = RunnerOf(slow)
    monkeypatch.setattr("tide_core.engine.core.time", SimpleNamespace(monotonic=lambda: now))
    for name in ("first", "second"):
        core.add(make_request(request_id=name, max_tokens=2, ignore_eos=True))
    usages = {}
    while core.has_work:
        usages |= {output.request_id: output.usage for output in core.step() if output.usage}
    times = {name: (usage.queue_s, usage.first_token_s, usage.total_s) for name, usage in usages.items()}
    assert times == {"first": (0.0, 1.0, 2.0), "second": (2.0, 3.0, 4.0)}


def test_kv_use_grows_with_tokens_not_with_the_model_length() -> None:
    with make_engine(block_size=4) as engine:
        engine.generate(random_prompts(1, 9), SamplingParams(max_tokens=8, ignore_eos=True))
        assert engine.stats().max_blocks_owned == 4  # 16 of 17 tokens: the last one is never run
        assert engine.max_model_len == 256


def test_a_thousand_requests_at_once_all_end_once_and_give_every_block_back() -> None:
    prompts = random_prompts(1000, 5)
    with make_engine(max_rows=64, max_batch_tokens=128) as engine:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        answers = list(engine.generate_as_completed(prompts, params))
        stats = engine.stats()
    assert sorted(index for index, _ in answers) == list(range(1000))
    assert all(len(answer.tokens) == 8 for _, answer in answers)
    assert stats.blocks_owned == 0
    assert stats.num_finished == 1000

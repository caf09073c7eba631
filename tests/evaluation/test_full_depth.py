"""The judge: what full depth says about a text that is already there."""

from __future__ import annotations

import pytest
import torch

from tests.engine.exit_engines import exit_parts, ids
from tests.factories import make_config, make_parts, random_prompts
from tests.tiny_models import tiny_model
from tide_core.engine.engine import Engine
from tide_core.errors import RequestError
from tide_core.evaluation.full_depth import FullDepth
from tide_core.request import SamplingParams


@pytest.mark.parametrize("chunk_tokens", [3, 16, 128])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_window", "falcon_alibi", "deepseek_v2"])
def test_the_judge_says_what_the_librarys_forward_says(family: str, chunk_tokens: int) -> None:
    parts = make_parts(family)
    [tokens] = random_prompts(1, 40)
    prompt, output = tokens[:17], tokens[17:]
    got = FullDepth(parts.runner.adapter, parts.kernels, chunk_tokens=chunk_tokens).judge(prompt, output)
    with torch.inference_mode():
        logits = tiny_model(family)(torch.tensor([tokens])).logits[0, 16:-1]
    assert list(got.choices) == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1)[range(len(output)), output].tolist()
    assert got.logprobs == pytest.approx(expected, abs=1e-4)


def test_greedy_text_of_full_depth_is_agreed_with_and_a_changed_token_is_not() -> None:
    parts = exit_parts()
    judge = FullDepth(parts.runner.adapter, parts.kernels)
    [prompt] = random_prompts(1, 9)
    with Engine.from_parts(make_config(drafts=4), parts) as engine:
        [answer] = engine.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True, mode="full"))
    output = ids(answer)
    assert judge.judge(prompt, output).agreed(output) == (True,) * 20
    output[7] = (output[7] + 1) % 384
    agreed = judge.judge(prompt, output).agreed(output)
    assert agreed[:8] == (True,) * 7 + (False,)


def test_a_judge_disturbs_neither_the_engines_pool_nor_its_texts() -> None:
    prompts = random_prompts(3, 9)
    params = SamplingParams(max_tokens=12, ignore_eos=True, mode="verified")
    with Engine.from_parts(make_config(drafts=4), exit_parts()) as engine:
        expected = [ids(answer) for answer in engine.generate(prompts, params)]
    parts = exit_parts()
    judge = FullDepth(parts.runner.adapter, parts.kernels)
    with Engine.from_parts(make_config(drafts=4), parts) as engine:
        for _ in range(2):
            assert [ids(answer) for answer in engine.generate(prompts, params)] == expected
            judge.judge(prompts[0], expected[0])
        assert engine.stats().blocks_owned == 0


def test_one_judge_takes_texts_of_any_length_one_after_another() -> None:
    parts = make_parts()
    judge = FullDepth(parts.runner.adapter, parts.kernels)
    [tokens] = random_prompts(1, 90)
    for length in (5, 90, 2, 33):
        fresh = FullDepth(parts.runner.adapter, parts.kernels)
        assert judge.judge(tokens[:1], tokens[1:length]) == fresh.judge(tokens[:1], tokens[1:length])


def test_a_text_without_a_prompt_is_refused_by_name() -> None:
    parts = make_parts()
    with pytest.raises(RequestError, match="prompt"):
        FullDepth(parts.runner.adapter, parts.kernels).judge([], [1])

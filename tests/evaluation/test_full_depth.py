"""Full depth scores a given text."""

from __future__ import annotations

import pytest
import torch

from tests.engine.exit_engines import exit_parts, ids
from tests.factories import make_parts, random_prompts
from tests.tiny_models import tiny_model
from tide_core.engine.engine import Engine
from tide_core.errors import RequestError
from tide_core.evaluation.full_depth import FullDepth
from tide_core.request import SamplingParams


@pytest.mark.parametrize("chunk_tokens", [3, 16, 128])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_window", "falcon_alibi", "deepseek_v2"])
def test_scores_are_those_of_the_librarys_forward(
    family: str, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tide_core.evaluation.full_depth.CHUNK_TOKENS", chunk_tokens)
    parts = make_parts(family)
    [tokens] = random_prompts(1, 40)
    prompt, output = tokens[:17], tokens[17:]
    got = FullDepth(parts.runner.adapter, parts.kernels).score(prompt, output)
    with torch.inference_mode():
        logits = tiny_model(family)(torch.tensor([tokens])).logits[0, 16:-1]
    assert list(got.choices) == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1)[range(len(output)), output].tolist()
    assert got.logprobs == pytest.approx(expected, abs=1e-4)


def test_texts_that_are_scored_together_have_the_scores_of_each_alone() -> None:
    parts = make_parts("llama")
    texts = [
        (tokens[:cut], tokens[cut:end])
        for cut, end, tokens in zip(
            (1, 9, 17, 30, 5, 5, 20, 39, 12), (2, 40, 40, 31, 5, 40, 37, 40, 29), random_prompts(9, 40), strict=True
        )
    ]
    full_depth = FullDepth(parts.runner.adapter, parts.kernels)
    together = full_depth.score_all(texts)
    for (prompt, output), found in zip(texts, together, strict=True):
        alone = FullDepth(parts.runner.adapter, parts.kernels).score(prompt, output)
        assert found.choices == alone.choices
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert len(found.choices) == len(output)


def test_greedy_text_of_full_depth_is_agreed_with_and_a_changed_token_is_not() -> None:
    parts = exit_parts()
    full_depth = FullDepth(parts.runner.adapter, parts.kernels)
    [prompt] = random_prompts(1, 9)
    with Engine.from_parts(parts) as engine:
        [answer] = engine.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True, mode="full"))
    output = ids(answer)
    assert full_depth.score(prompt, output).agreed(output) == (True,) * 20
    output[7] = (output[7] + 1) % 384
    agreed = full_depth.score(prompt, output).agreed(output)
    assert agreed[:8] == (True,) * 7 + (False,)


def test_scoring_changes_neither_the_engines_pool_nor_its_texts() -> None:
    prompts = random_prompts(3, 9)
    params = SamplingParams(max_tokens=12, ignore_eos=True, mode="verified")
    with Engine.from_parts(exit_parts()) as engine:
        expected = [ids(answer) for answer in engine.generate(prompts, params)]
    parts = exit_parts()
    full_depth = FullDepth(parts.runner.adapter, parts.kernels)
    with Engine.from_parts(parts) as engine:
        for _ in range(2):
            assert [ids(answer) for answer in engine.generate(prompts, params)] == expected
            full_depth.score(prompts[0], expected[0])
        assert engine.stats().blocks_owned == 0


def test_texts_of_any_length_can_be_scored_one_after_another() -> None:
    parts = make_parts()
    full_depth = FullDepth(parts.runner.adapter, parts.kernels)
    [tokens] = random_prompts(1, 90)
    for length in (5, 90, 2, 33):
        fresh = FullDepth(parts.runner.adapter, parts.kernels)
        assert full_depth.score(tokens[:1], tokens[1:length]) == fresh.score(tokens[:1], tokens[1:length])


def test_a_text_without_a_prompt_is_refused_by_name() -> None:
    parts = make_parts()
    with pytest.raises(RequestError, match="prompt"):
        FullDepth(parts.runner.adapter, parts.kernels).score([], [1])

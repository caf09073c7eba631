"""The same promises on a CUDA device: the engine there equals the library there."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.factories import make_engine, random_prompts
from tests.forward import Forward, library_logits
from tests.tiny_models import FAMILIES, tiny_model
from tide_core.request import SamplingParams

pytestmark = pytest.mark.gpu

LENGTH = 21
# Logits spread by about 0.7. Narrow types round differently whenever the work is cut differently.
MAX_DIFFERENCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 2e-1}
# Experts are picked by scores that may lie closer together than narrow types can tell; a flip changes the token.
ROUTED_BY_ROUNDING = {
    (family, dtype)
    for family in ("deepseek_v3", "qwen3_moe", "granite_moe", "gpt_oss")
    for dtype in ("float16", "bfloat16")
    if (family, dtype) != ("deepseek_v3", "float16")
}


@pytest.mark.parametrize("dtype", MAX_DIFFERENCE)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("checkpoint_layers", "chunk"), [((), LENGTH), ((1, 3), 5), ((2,), 1)])
def test_logits_equal_the_library(family: str, dtype: str, checkpoint_layers: tuple[int, ...], chunk: int) -> None:
    [row] = random_prompts(1, LENGTH, seed=3)
    [got] = Forward(family, checkpoint_layers, device="cuda", dtype=dtype)([row], chunk)
    differences = (got - library_logits(family, row, "cuda", dtype)).float().abs().amax(dim=-1)
    if (family, dtype) in ROUTED_BY_ROUNDING:
        assert differences.median() <= MAX_DIFFERENCE[dtype]
    else:
        assert differences.max() <= MAX_DIFFERENCE[dtype]


@pytest.mark.parametrize("block_size", [4, 8])  # without and with kernels that read pages where they lie
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str, block_size: int) -> None:
    prompts = [random_prompts(1, length, seed=length)[0] for length in (11, 4, 17)]
    with make_engine(family, device="cuda", max_batch_tokens=16, block_size=block_size) as engine:
        answers = engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    model = copy.deepcopy(tiny_model(family)).to("cuda")
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.generate(torch.tensor([prompt], device="cuda"), max_new_tokens=12, do_sample=False)
        assert [token.token_id for token in answer.tokens] == expected[0, len(prompt) :].tolist()


def test_sampling_is_the_same_on_both_devices_for_one_seed() -> None:
    prompts = random_prompts(3, 9)
    params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    with make_engine(device="cuda") as there, make_engine(device="cpu") as here:
        texts = [[answer.text for answer in engine.generate(prompts, params)] for engine in (there, here)]
    assert texts[0] == texts[1]

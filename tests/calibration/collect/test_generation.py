"""The model continues prompts in batches: with the library and with the decoder."""

import copy
from typing import Any

import pytest
import torch

from tests.calibration.collect.generators import EOS, make_generator
from tests.tiny_models import CONFIGS, tiny_model
from tide_core.calibration.collect import decoder
from tide_core.calibration.collect.decoder import GREEDY, Sampling, draw
from tide_core.errors import ConfigError
from tide_core.models.families import FAMILIES


def eager_or_default(family: str) -> Any:
    """Some versions of the library leave the soft-cap of Gemma 2 out except in eager attention."""
    model = copy.deepcopy(tiny_model(family))
    if family == "gemma2":
        model.set_attn_implementation("eager")
    return model


MAX_NEW = 24
"""More than the windows of the tiny models, and over two multiples of the slots that attention then reads."""
FAST = [name for name, (architecture, _, _) in CONFIGS.items() if FAMILIES[architecture].attention == "paged"]


@pytest.mark.parametrize(("family", "fast"), [("llama", False), *((name, True) for name in FAST)])
def test_a_greedy_batch_gives_what_each_prompt_gives_alone(family: str, fast: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(decoder, "PROMPT_TOKENS", 30)  # prompts in two goes
    monkeypatch.setattr(decoder, "SLOT_STEP", 16)
    model = eager_or_default(family)
    prompts = [[5, 6, 7], [9, 8] * 6 + [4], [20, 30, 40, 50, 60]]
    generator = make_generator(model, fast=fast)
    before = model.config._attn_implementation

    batched = generator.run(prompts, GREEDY, max_new=MAX_NEW, stop_ids=EOS, seed=0)

    assert model.config._attn_implementation == before
    for prompt, new in zip(prompts, batched, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=MAX_NEW, do_sample=False, eos_token_id=0)
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

"""Calibration on a CUDA device: the decoder gives the tokens of the library, and a run ends in an artefact."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.calibration.tiny_runs import tiny_calibration, write_prompts
from tests.calibration.train.heads import SHORTLIST, write_sequences
from tests.factories import random_prompts, tiny_tokenizer
from tests.tiny_models import CONFIGS, tiny_model
from tide_core.calibration.collect.decoder import GREEDY, Sampling, can_decode
from tide_core.calibration.collect.generation import Generator
from tide_core.calibration.config import CalibrationConfig
from tide_core.calibration.train import train
from tide_core.calibration.train.train import fit
from tide_core.models.adapter import ModelAdapter

pytestmark = pytest.mark.gpu

PROMPTS = [random_prompts(1, length, seed=length)[0] for length in (3, 40, 17, 9)]


@pytest.mark.parametrize("family", CONFIGS)
def test_steps_as_graphs_give_the_tokens_of_generate(family: str) -> None:
    model = copy.deepcopy(tiny_model(family)).to("cuda")
    if family == "gemma2":  # older versions leave its soft-cap out of other attention
        model.set_attn_implementation("eager")
    adapter = ModelAdapter(model, paged=False)
    if not can_decode(adapter):
        pytest.skip("its layers do not hand K and V to the attention registry as they are cached")
    generator = Generator(adapter, pad_id=0)

    for prompts in (PROMPTS, PROMPTS[::-1]):  # the second time over the same graphs
        found = generator.run(prompts, GREEDY, max_new=40, stop_ids=(0,), seed=0)
        for prompt, new in zip(prompts, found, strict=True):
            ids = torch.tensor([prompt], device="cuda")
            alone = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=0)
            assert new.tolist() == alone[0, len(prompt) :].tolist()


def test_sampled_batches_repeat_with_their_seed() -> None:
    adapter = ModelAdapter(copy.deepcopy(tiny_model("llama")).to("cuda", torch.bfloat16), paged=False)

    one, again, other = (
        [
            ids.tolist()
            for ids in Generator(adapter, pad_id=0).run(
                PROMPTS, Sampling(1.0, 0.95), max_new=40, stop_ids=(0,), seed=seed
            )
        ]
        for seed in (1, 1, 2)
    )

    assert one == again != other


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_training_from_kept_states_in_graphs_is_one_in_which_the_teacher_always_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(train, "KEPT_FROM", 4)
    monkeypatch.setattr(train, "tokens_that_fit", lambda kept, device, num_tokens: int(share * num_tokens))
    adapter = ModelAdapter(copy.deepcopy(tiny_model("llama")).to("cuda"), paged=False)
    shards, more = write_sequences(tmp_path, num=40), {"batch_tokens": 256, "max_drafts": 3, "router_bottleneck": 8}
    config = CalibrationConfig(candidates=("2:block:deep:hidden=0:ffn=24",), steps=40, warmup_steps=2, **more)

    plain, kept = (fit(config, adapter, shards, SHORTLIST, seconds=limit).candidates[0] for limit in (None, 1e9))

    for name, tensor in kept.head.state_dict().items():
        torch.testing.assert_close(tensor, plain.head.state_dict()[name], rtol=1e-2, atol=2e-3, msg=name)


def test_a_calibration_in_bfloat16_ends_in_an_artefact_that_loads(tmp_path: Path) -> None:
    pytest.importorskip("msgpack")
    from tide_core.calibration.pipeline import calibrate
    from tide_core.exits.artefact.artefact import load_artefact
    from tide_core.models.identity import identify

    model, tokenizer = copy.deepcopy(tiny_model("llama")).to("cuda", torch.bfloat16), tiny_tokenizer()
    identity = identify(model, tokenizer, None)
    config = tiny_calibration(data=str(write_prompts(tmp_path)), heads=("block",), deep_inputs=True)

    result = calibrate(config, model, tokenizer, identity, run_dir=tmp_path / "run", publish_to=tmp_path / "artefact")

    assert load_artefact(result.artefact, identity).digest == result.digest

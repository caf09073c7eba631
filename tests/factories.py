"""Small things to test with. A test names only what it cares about."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import tiny_model
from tide_core.config import EngineConfig
from tide_core.engine.assemble import Parts, assemble_loaded
from tide_core.engine.engine import Engine
from tide_core.engine.scheduler import Scheduler
from tide_core.exits.artefact.artefact import load_artefact
from tide_core.kv.block_manager import BlockManager
from tide_core.kv.cache import PagedKV
from tide_core.models.identity import identify
from tide_core.request import ExitPolicy, Request, SamplingParams

VOCAB_SIZE = 384


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string is encodable; ids 0 and 1 are special; a chat template of one line per message."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["the cat sat on the mat and the dog sat on the log, then they all went home"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
    )
    return tokenizer


def make_config(**settings: Any) -> EngineConfig:
    """Without suffix drafts: random models repeat themselves, and most tests count what exits do. Without audits: most
    tests count what their own requests did."""
    usual = {"device": "cpu", "dtype": "float32", "kv_memory_gib": 0.01, "max_rows": 8, "max_batch_tokens": 64}
    return EngineConfig(**{**usual, "suffix_drafts": False, "audit_share": 0.0, **settings})


def make_parts(family: str = "llama", **settings: Any) -> Parts:
    """A core over a tiny random model; equal weights every time. `artefact` may be a folder made for it."""
    config = make_config(**settings)
    model = copy.deepcopy(tiny_model(family)).to(config.device, getattr(torch, config.dtype))
    artefact = None
    if config.artefact not in ("auto", "none"):
        artefact = load_artefact(config.artefact, identify(model, tiny_tokenizer(), None))
    return assemble_loaded(config, model, tiny_tokenizer(), name=family, identity=family, artefact=artefact)


def make_engine(family: str = "llama", **settings: Any) -> Engine:
    return Engine.from_parts(make_parts(family, **settings))


def make_request(
    prompt_ids: Sequence[int] = (2, 3, 4),
    *,
    request_id: str = "r",
    seed: int = 0,
    policy: ExitPolicy | None = None,
    **params: Any,
) -> Request:
    return Request(
        request_id,
        tuple(prompt_ids),
        SamplingParams(**{"max_tokens": 8, **params}),
        seed,
        policy=policy or ExitPolicy(),
    )


def make_blocks(num_blocks: int = 16, block_size: int = 4, **settings: Any) -> BlockManager:
    return BlockManager(num_blocks, block_size, **settings)


def poison(cache: PagedKV, blocks: Sequence[int]) -> None:
    """Fill blocks with NaN, so that a read past a valid length cannot go unseen."""
    index = torch.tensor(blocks, device=cache.device)
    for pool in (*(pool for pools in cache.pools for pool in pools), *cache.deep_states):
        pool.view(cache.num_blocks, -1)[index] = math.nan


def watch_released(blocks: BlockManager, released: Callable[[list[int]], None]) -> None:
    """Call `released` with blocks whose content is no longer valid: freed ones, and cached ones that are given up."""

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            free, cached = set(blocks._free), set(blocks._cached)
            result = change(*args)
            gone = [*(set(blocks._free) - free), *(cached - set(blocks._cached))]
            if gone:
                released(gone)
            return result

        return run

    for name in ("free", "trim", "_take"):
        setattr(blocks, name, watched(getattr(blocks, name)))


def make_scheduler(
    num_blocks: int = 16, *, max_rows: int = 8, max_batch_tokens: int = 32, drafts: int = 0, **settings: Any
) -> Scheduler:
    blocks = make_blocks(num_blocks, **settings)
    return Scheduler(blocks, max_rows=max_rows, max_batch_tokens=max_batch_tokens, plan_drafts=lambda *rows: drafts)


def random_prompts(num: int, length: int, *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (num, length), generator=generator).tolist()

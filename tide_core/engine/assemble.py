"""From settings to a ready core: model, kernels, pool, scheduler, runner. Wiring only."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from tide_core.config import EngineConfig
from tide_core.engine.core import EngineCore
from tide_core.engine.depth_loop import plan_segments
from tide_core.engine.model_runner import ModelRunner
from tide_core.engine.scheduler import Scheduler
from tide_core.engine.tokenizer import Tokenizer
from tide_core.errors import ConfigError
from tide_core.kernels import Kernels, select_kernels, set_num_threads
from tide_core.kv.block_manager import BlockManager
from tide_core.kv.cache import KVLayout, PagedKV, block_bytes
from tide_core.models.adapter import ModelAdapter
from tide_core.models.kernel_modules import use_kernels
from tide_core.models.layout_probe import probe_layouts
from tide_core.models.loader import fingerprint, load_model, load_tokenizer
from tide_core.models.resolver import resolve

logger = logging.getLogger("tide")


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine is made of."""

    core: EngineCore
    runner: ModelRunner
    tokenizer: Tokenizer
    kernels: Kernels
    model_name: str
    max_model_len: int


def assemble(config: EngineConfig) -> Parts:
    """Resolve and load the model the settings name, and build the engine around it."""
    resolved = resolve(config.model)
    model = load_model(resolved, dtype=config.dtype, device=config.device)
    tokenizer = load_tokenizer(resolved)
    return assemble_loaded(config, model, tokenizer, name=resolved.name, identity=fingerprint(resolved))


def assemble_loaded(config: EngineConfig, model: Any, tokenizer: Any, *, name: str, identity: str) -> Parts:
    """Build the engine around a loaded model. `identity` tells its weights apart from any other's."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    set_num_threads(torch.get_num_threads())
    adapter = ModelAdapter(model)
    kernels = select_kernels(config.kernels, adapter.device)
    use_kernels(model, kernels)
    segments = plan_segments(adapter.num_layers, config.checkpoint_layers)
    max_model_len = _model_len(config, adapter)
    cache, blocks = build_pool(config, adapter, num_segments=len(segments), max_model_len=max_model_len)
    runner = ModelRunner(adapter, cache, kernels, segments)
    scheduler = Scheduler(blocks, max_rows=config.max_rows, max_batch_tokens=config.max_batch_tokens)
    text = Tokenizer(tokenizer, adapter.vocab_size)
    core = EngineCore(scheduler, runner.run, text, namespace=f"{identity}:{adapter.dtype}")
    logger.info(
        "model %s: %d layers in %d segments, %s on %s, %s kernels, KV pool of %d blocks of %d tokens",
        name,
        adapter.num_layers,
        len(segments),
        config.dtype,
        adapter.device,
        kernels.name,
        blocks.num_blocks,
        blocks.block_size,
    )
    return Parts(core, runner, text, kernels, name, max_model_len)


def build_pool(
    config: EngineConfig, adapter: ModelAdapter, *, num_segments: int, max_model_len: int
) -> tuple[PagedKV, BlockManager]:
    """As many blocks as the memory budget holds, and no more than all rows at full length could use."""
    layouts = [KVLayout(*shape) for shape in probe_layouts(adapter)]
    one_block = block_bytes(layouts, config.block_size, adapter.dtype)
    most_useful = config.max_rows * -(-max_model_len // config.block_size)
    num_blocks = min(config.kv_memory_bytes // one_block, most_useful)
    if num_blocks < 1:
        expected = f"room for one block of {config.block_size} tokens, which takes {one_block} bytes"
        raise ConfigError("kv_memory_gib", config.kv_memory_gib, expected)
    try:
        cache = PagedKV(layouts, num_blocks, config.block_size, adapter.dtype, adapter.device)
    except RuntimeError as error:  # both allocators raise it, or a kind of it
        expected = f"less than the memory that is free on {adapter.device} ({num_blocks} blocks of {one_block} bytes)"
        raise ConfigError("kv_memory_gib", config.kv_memory_gib, expected) from error
    blocks = BlockManager(
        num_blocks, config.block_size, num_segments=num_segments, prefix_caching=config.prefix_caching
    )
    return cache, blocks


def _model_len(config: EngineConfig, adapter: ModelAdapter) -> int:
    if config.max_model_len is None:
        return adapter.max_positions
    if config.max_model_len > adapter.max_positions:
        raise ConfigError("max_model_len", config.max_model_len, f"at most the model's own {adapter.max_positions}")
    return config.max_model_len

"""The KV pool of an engine: what a token keeps in it, how long a row may get, and the blocks that fit the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tide_core.config import EngineConfig, ResolvedConfig
from tide_core.errors import ConfigError
from tide_core.exits.artefact.heads import HeadSpec
from tide_core.kv.block_manager import BlockManager
from tide_core.kv.cache import KVLayout, PagedKV, block_bytes
from tide_core.kv.memory import device_memory
from tide_core.kv.sizing import DeviceMemory, ModelSize, fit
from tide_core.models.adapter import ModelAdapter
from tide_core.models.layout_probe import probe_layouts


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """What one token keeps in the pool: K and V of all layers and of exit heads, and deep states."""

    layouts: list[KVLayout]
    state_widths: list[int]

    @classmethod
    def of(cls, adapter: ModelAdapter, specs: Sequence[HeadSpec]) -> SlotLayout:
        """`specs` are those of the exit heads."""
        layouts = [KVLayout(*shape) for shape in probe_layouts(adapter)]
        layouts += [KVLayout(spec.num_kv_heads, spec.head_size, spec.head_size) for spec in specs if spec.attends]
        return cls(layouts, [spec.deep_width for spec in specs])

    def model_size(
        self,
        config: EngineConfig,
        dtype: torch.dtype,
        *,
        hidden: int,
        vocab: int,
        max_model_len: int,
        spare_blocks: int,
        weight_bytes: int,
    ) -> ModelSize:
        return ModelSize(
            hidden=hidden,
            vocab=vocab,
            itemsize=dtype.itemsize,
            block_bytes=block_bytes(self.layouts, config.block_size, dtype, state_widths=self.state_widths),
            max_model_len=max_model_len,
            spare_blocks=spare_blocks,
            weight_bytes=weight_bytes,
        )


def build_pool(
    config: ResolvedConfig, slots: SlotLayout, adapter: ModelAdapter, size: ModelSize
) -> tuple[PagedKV, BlockManager]:
    """The blocks that fit. Behind them lie the spare ones, which the manager does not know."""
    num_blocks, one_block = fit(config, size).num_blocks, size.block_bytes
    if num_blocks < 1:
        expected = f"memory for one block of {config.block_size} tokens, which takes {one_block} bytes"
        raise ConfigError("kv_memory_gib", config.kv_memory_gib, expected)
    try:
        cache = PagedKV(
            slots.layouts,
            num_blocks + size.spare_blocks,
            config.block_size,
            adapter.dtype,
            adapter.device,
            state_widths=slots.state_widths,
        )
    except RuntimeError as error:  # both allocators raise it, or a kind of it
        expected = f"less than the memory that is free on {adapter.device} ({num_blocks} blocks of {one_block} bytes)"
        raise ConfigError("kv_memory_gib", config.kv_memory_gib, expected) from error
    return cache, BlockManager(num_blocks, config.block_size, prefix_caching=config.prefix_caching)


def memory_of(config: EngineConfig, device: torch.device) -> DeviceMemory:
    """Of a GPU `auto` of any setting depends on it; of a CPU only that of the pool."""
    if device.type == "cuda" or config.kv_memory_bytes is None:
        return device_memory(device)
    return DeviceMemory(device.type)


def check_model_len(config: EngineConfig, max_positions: int) -> int:
    """The longest row: the model's own limit, or the lower one of the settings."""
    if config.max_model_len is None:
        return max_positions
    if config.max_model_len > max_positions:
        raise ConfigError("max_model_len", config.max_model_len, f"at most the model's own {max_positions}")
    return config.max_model_len

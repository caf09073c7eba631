"""The tensors of a pool: their shapes and places, and that their memory is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tide_core.kv.cache import KVLayout, PagedKV, block_bytes

CPU = torch.device("cpu")
LAYOUTS = [KVLayout(3, 7, 5), KVLayout(2, 8, 8), KVLayout(1, 4, 4)]
MIB = 2**20


def resident() -> int:
    """Bytes of main memory of this process."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def test_tensors_have_their_shapes_begin_at_even_places_and_share_nothing() -> None:
    cache = PagedKV(LAYOUTS, 3, 4, torch.float32, CPU, state_widths=[5, 0])
    assert [tuple(states.shape) for states in cache.deep_states] == [(12, 5), (12, 0)]
    assert [(tuple(keys.shape), tuple(values.shape)) for keys, values in cache.pools] == [
        ((3, layout.num_heads, 4, layout.key_size), (3, layout.num_heads, 4, layout.value_size)) for layout in LAYOUTS
    ]
    tensors = [*cache.deep_states, *(pool for pair in cache.pools for pool in pair)]
    for value, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))


def test_the_memory_of_a_pool_that_is_dropped_goes_back_to_the_system() -> None:
    """Also where the allocator has learned to keep freed pieces of the size of a layer, and another pool came after."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc to read the memory of the process from")
    freed = torch.zeros(31 * MIB // 4)
    del freed
    layouts = [KVLayout(4, 64, 64)] * 32
    num_blocks = 64 * MIB // block_bytes(layouts, 16, torch.float32)
    first = PagedKV(layouts, num_blocks, 16, torch.float32, CPU)
    first.blank(range(num_blocks))
    second = PagedKV(layouts, num_blocks, 16, torch.float32, CPU)
    second.blank(range(num_blocks))
    before = resident()
    del first
    assert before - resident() > 56 * MIB
    del second

"""Settings that size themselves: what `auto` means for the KV pool, rows and tokens of a step on a device. The
arithmetic is pure; `tide_core.kv.memory` measures. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from tide_core.config import (
    AUTO,
    CPU_BATCH_TOKENS,
    GIB,
    LEAST_AUTO_ROWS,
    MOST_AUTO_ROWS,
    EngineConfig,
    ResolvedConfig,
)
from tide_core.errors import ConfigError

GRAPHS_AND_CONTEXT = int(1.5 * GIB)
"""CUDA context, library workspaces and captured graphs, which are there after the pool."""
LOGIT_BUFFERS = 3
"""Tensors of logits in float32 that live at once where a step is not a graph: logits, weights, sorted weights."""
STATE_BUFFERS = 8
CPU_BYTES = GIB
CPU_SHARE = 0.9
"""Of the memory that is available: the most that `auto` takes on a CPU."""
AUTO_ROWS = (MOST_AUTO_ROWS, 128, LEAST_AUTO_ROWS)
"""On a GPU: the most for which the pool holds a typical context each. Few values, because the cost table depends on
them, and the memory that is free differs a little from start to start."""
TYPICAL_CONTEXT = 2048
LARGE_GPU = 70 * GIB
BATCH_TOKENS, LARGE_BATCH_TOKENS = 2048, 8192


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device when the model is loaded and the pool is not."""

    type: str
    """cpu or cuda."""
    total: int = 0
    """Of a GPU."""
    free: int | None = None
    """None if unknown."""
    own: int = 0
    """What this process has allocated on a GPU: weights."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the memory of steps and pool depends on."""

    hidden: int
    vocab: int
    itemsize: int
    block_bytes: int
    """Of one KV block over all layers, with what exits keep."""
    max_model_len: int
    """The model's own limit, or the lower one of the settings."""
    spare_blocks: int = 0
    """Blocks that the pool has besides those of rows."""
    weight_bytes: int = 0
    """As the loader keeps them."""

    def blocks_of_a_row(self, config: EngineConfig) -> int:
        return -(-self.max_model_len // config.block_size)


@dataclass(frozen=True, slots=True)
class Fit:
    """What a pool holds."""

    num_blocks: int
    rows: int
    """That may run at once."""
    context: int
    """Tokens of each of them."""
    whole_rows: int
    """Rows of full length."""
    max_model_len: int

    def __str__(self) -> str:
        shared = f"fits {self.rows} rows of {self.context} tokens"
        if self.rows == self.whole_rows:
            return shared
        return f"{shared}, or {self.whole_rows} of full length ({self.max_model_len})"


def resolve_config(config: EngineConfig, memory: DeviceMemory, size: ModelSize, *, dtype: str) -> ResolvedConfig:
    """The settings with a value for every `auto`; of settings in force the same again."""
    tokens = _batch_tokens(config, memory)
    for rows in _row_counts(config, memory, tokens):
        chosen = replace(config, max_rows=rows, max_batch_tokens=tokens)
        budget = pool_budget(chosen, memory, size)
        if budget // size.block_bytes * config.block_size >= rows * min(TYPICAL_CONTEXT, size.max_model_len):
            break
    if config.kv_memory_bytes is None:
        check_one_row(chosen, memory, size, budget)
    values = {field.name: getattr(chosen, field.name) for field in fields(EngineConfig)}
    in_force = {
        "dtype": dtype,
        "device": memory.type,
        "max_model_len": size.max_model_len,
        "kv_memory_gib": budget / GIB,
    }
    return ResolvedConfig(**{**values, **in_force})


def fit(config: ResolvedConfig, size: ModelSize) -> Fit:
    """As many blocks as the budget holds, and no more than all rows at full length could use."""
    whole = size.blocks_of_a_row(config)
    num_blocks = min(int(config.kv_memory_gib * GIB) // size.block_bytes, config.max_rows * whole)
    context = min(size.max_model_len, num_blocks // config.max_rows * config.block_size)
    return Fit(num_blocks, config.max_rows, context, min(config.max_rows, num_blocks // whole), size.max_model_len)


def described(given: EngineConfig, config: ResolvedConfig, size: ModelSize, device: str) -> str:
    """What was chosen for the settings that were given, and what fits, in one line."""
    fits = fit(config, size)

    def shown(name: str, value: str) -> str:
        return f"{value} (auto)" if getattr(given, name) == AUTO else value

    pool = shown("kv_memory_gib", gib(fits.num_blocks * size.block_bytes))
    return (
        f"weights {gib(size.weight_bytes)}, {shown('dtype', config.dtype)} on {shown('device', device)}, "
        f"KV pool {pool} in {fits.num_blocks} blocks, "
        f"max_rows {shown('max_rows', str(config.max_rows))}, "
        f"max_batch_tokens {shown('max_batch_tokens', str(config.max_batch_tokens))}: {fits}"
    )


def _batch_tokens(config: EngineConfig, memory: DeviceMemory) -> int:
    if isinstance(config.max_batch_tokens, int):
        return config.max_batch_tokens
    usual = CPU_BATCH_TOKENS
    if memory.type == "cuda":
        usual = LARGE_BATCH_TOKENS if memory.total >= LARGE_GPU else BATCH_TOKENS
    return usual if isinstance(config.max_rows, str) else max(usual, config.max_rows)


def _row_counts(config: EngineConfig, memory: DeviceMemory, tokens: int) -> list[int]:
    """To be tried in this order; the last one is taken if none fits."""
    if isinstance(config.max_rows, int):
        return [config.max_rows]
    counts = AUTO_ROWS if memory.type == "cuda" else (LEAST_AUTO_ROWS,)
    return [rows for rows in counts if rows <= tokens] or [tokens]


def reserve_bytes(config: EngineConfig, size: ModelSize) -> int:
    """Memory of a GPU that steps need outside the pool, for settings with rows and tokens."""
    rows, tokens = config.max_rows, config.max_batch_tokens
    assert isinstance(rows, int)
    assert isinstance(tokens, int)
    logits = rows * (1 + config.max_pending) * size.vocab * 4 * LOGIT_BUFFERS
    # Of a prompt's chunk: states, and the products of a gated MLP, which is about four times as wide.
    states = tokens * size.hidden * size.itemsize * (STATE_BUFFERS + 3 * 4)
    return GRAPHS_AND_CONTEXT + logits + states


def gpu_pool_bytes(memory: DeviceMemory, share: float, reserve: int, pools: int) -> int:
    """Size of one of `pools` equal pools; 0 if nothing is left. The share counts this process alone, so that replicas
    with a share each can be on one GPU; what others have taken already is taken."""
    left = int(share * memory.total) - memory.own
    if memory.free is not None:
        left = min(left, memory.free)
    return max(0, left - reserve) // pools


def cpu_pool_bytes(available: int | None) -> int:
    """The usual size, unless that is more than a share of the memory that is available."""
    return CPU_BYTES if available is None else min(CPU_BYTES, int(CPU_SHARE * available))


def pool_budget(config: EngineConfig, memory: DeviceMemory, size: ModelSize) -> int:
    """Bytes for the blocks of one pool, by settings with rows and tokens."""
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes
    if memory.type != "cuda":
        return cpu_pool_bytes(memory.free)
    pools, reserve = 1 + config.artefact_swap, reserve_bytes(config, size)
    # What was measured is all there is, so spare blocks come out of it.
    pool = gpu_pool_bytes(memory, config.gpu_memory_utilization, reserve, pools)
    return max(0, pool - size.spare_blocks * size.block_bytes)


def check_one_row(config: EngineConfig, memory: DeviceMemory, size: ModelSize, budget: int) -> None:
    """Refuse an `auto` pool that cannot hold one row at full length, with the sum that leads there."""
    needed = size.blocks_of_a_row(config) * size.block_bytes
    if budget >= needed:
        return
    expected = (
        f"memory for one row of max_model_len ({size.max_model_len} tokens), {gib(needed)}; "
        f"the pool gets {gib(budget)}, so {gib(needed - budget)} are missing"
    )
    if memory.type == "cuda":
        free = "" if memory.free is None else f" ({gib(memory.free)} of them free)"
        expected += (
            f": the GPU has {gib(memory.total)}{free}, of which gpu_memory_utilization "
            f"({config.gpu_memory_utilization:g}) allows {gib(int(config.gpu_memory_utilization * memory.total))}; "
            f"weights take {gib(memory.own)}, steps {gib(reserve_bytes(config, size))}"
        )
        if config.artefact_swap:
            expected += "; half of the rest is kept for a change of the artefact (artefact_swap)"
    elif memory.free is not None:
        expected += f": {gib(memory.free)} of memory are available"
    raise ConfigError("kv_memory_gib", AUTO, f"{expected}. Lower max_model_len, or use a device with more memory")


def gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"

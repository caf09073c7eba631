"""Generate the sizing table: what well-known shapes need on GPUs of 80 and 141 GB, with `kv_memory_gib: auto`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.strict import yaml_file
from tide_core.config import GIB, EngineConfig
from tide_core.kv.sizing import DeviceMemory, ModelSize, gpu_pool_bytes, reserve_bytes
from tools.reference.markdown import table

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- sizes: python tools/reference_docs.py -->", "<!-- end of the sizes -->"
GPUS = {"80 GB": 79 * GIB, "141 GB": 139 * GIB}
"""What the driver reports of an H100 and an H200, rounded down."""
CONTEXTS = (8192, 32768)
BYTES = 2
HOST_GIB = 16
"""Main memory of a worker besides the weights: libraries, CUDA, Ray and its shared memory."""
NONE = "does not fit"


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama kind with an output matrix of its own."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    qkv_bias: bool = False

    @property
    def num_weights(self) -> int:
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys + self.qkv_bias * (queries + 2 * keys)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + 2 * self.vocab * self.hidden + self.hidden

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES

    @property
    def pod_gib(self) -> int:
        """Rounded up to 8."""
        return -(-(self.weight_bytes + HOST_GIB * GIB) // (8 * GIB)) * 8


SHAPES = (
    Shape("Qwen2.5 7B", 28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True),
    Shape("Mistral 7B v0.3", 32, 4096, 14336, 32, 8, 128, 32768),
    Shape("Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128, 128256),
    Shape("Qwen2.5 32B", 64, 5120, 27648, 40, 8, 128, 152064, qkv_bias=True),
    Shape("Llama 3.1 70B", 80, 8192, 28672, 64, 8, 128, 128256),
)


def settings() -> EngineConfig:
    """Those of deploy/config.gpu.yaml."""
    config = yaml_file.read(ROOT / "deploy" / "config.gpu.yaml")
    return EngineConfig.from_mapping(config["applications"][0]["args"]["engine"])


def pool_of(shape: Shape, total: int, config: EngineConfig, pools: int) -> int:
    memory = DeviceMemory("cuda", total, max(0, total - shape.weight_bytes), shape.weight_bytes)
    block = shape.kv_bytes_per_token * config.block_size
    reserve = reserve_bytes(config, ModelSize(shape.hidden, shape.vocab, BYTES, block, max(CONTEXTS)))
    return gpu_pool_bytes(memory, config.gpu_memory_utilization, reserve, pools)


def rows_of(shape: Shape, pool: int, context: int, max_rows: int) -> int:
    return min(max_rows, pool // (context * shape.kv_bytes_per_token))


def sizes() -> str:
    config = settings()
    head = ["model", "weights", "KV per token", "worker's memory, at least"]
    for gpu in GPUS:
        head += [f"{gpu}: pool", *(f"rows of {context:,}" for context in CONTEXTS)]
    rows = []
    for shape in SHAPES:
        row = [
            shape.name,
            in_gib(shape.weight_bytes),
            f"{shape.kv_bytes_per_token / 1024:g} KiB",
            f"{shape.pod_gib} GiB",
        ]
        for total in GPUS.values():
            kept, whole = (pool_of(shape, total, config, pools) for pools in (2, 1))
            counts = [
                f"{rows_of(shape, kept, each, config.max_rows)} ({rows_of(shape, whole, each, config.max_rows)})"
                for each in CONTEXTS
            ]
            row += [f"{in_gib(kept)} ({in_gib(whole)})", *counts] if whole else [NONE, *["–"] * len(CONTEXTS)]
        rows.append(row)
    return table(head, rows)


def in_gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"

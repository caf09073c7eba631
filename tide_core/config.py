"""Settings of an engine: frozen, checked when constructed, unknown keys refused. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tide_core.errors import ConfigError, refuse_unknown

DTYPES = ("float32", "float16", "bfloat16")
AUTO = "auto"
DTYPE_CHOICES = (AUTO, *DTYPES)
QUANTIZATIONS = ("auto", "none", "fp8")
DEVICES = ("auto", "cpu", "cuda")
KERNELS = ("auto", "native", "reference")
GIB = 2**30
LEAST_AUTO_ROWS, MOST_AUTO_ROWS = 64, 256
"""What `auto` means for max_rows: the least on a CPU, one of both or between them on a GPU."""
CPU_BATCH_TOKENS = 512
REMOVED = {"checkpoint_layers": "no such key: it was removed, because the artefact decides the checkpoint layers"}
"""Settings of earlier versions, and why they are gone."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings that need a restart to change."""

    model: str = "demo"
    """`demo`, a folder, a .gguf file, or a Hugging Face id."""
    dtype: str = AUTO
    """Of weights, states and KV: float32, float16, bfloat16, or auto: on a GPU the checkpoint's own, but bfloat16 for
    one in float32; on a CPU float32."""
    quantization: str = AUTO
    """auto: weights stay in 8 bits or less where kernels of the device read them so: matrices of a GGUF file where the
    native module runs on a CPU with dtype float32, FP8 weights of a folder on a GPU with dtype bfloat16; elsewhere they
    are widened, and the log says why; none: all weights are widened to `dtype`; fp8: linears of the decoder layers are
    in FP8, rounded to it at load where the model is not."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None takes the model's own limit."""
    kv_memory_gib: float | str = 1.0
    """Memory budget of the KV block pool. auto: on a GPU what `gpu_memory_utilization` leaves for it, on a CPU 1 GiB,
    or less where memory is short. On a CPU a block is first touched when tokens fill it."""
    gpu_memory_utilization: float = 0.9
    """With `kv_memory_gib: auto` on a GPU: share of its memory for weights, KV pool, activations and graphs of this
    engine. On a CPU it means nothing."""
    artefact_swap: bool = True
    """With `kv_memory_gib: auto` on a GPU: leave memory for the second pool that a change of the artefact takes while
    both are in use: the pool is half as large. If false, such a change is refused where two pools do not fit."""
    block_size: int = 16
    """Tokens per KV block."""
    max_rows: int | str = AUTO
    """Most requests that run concurrently; the others wait. auto: 64; on a GPU 128 or 256 where the KV pool holds 2,048
    tokens for each."""
    max_batch_tokens: int | str = AUTO
    """Token budget of one step; longer prompts run in chunks. auto: 512; on a GPU 2,048, and 8,192 from 70 GiB."""
    artefact: str = "auto"
    """Folder of the calibrated exits; auto: the one shipped for the demo model, none for others; none: no exits."""
    drafts: int | None = None
    """Drafts per cycle of a row that may exit; None: the number that pays most by the measured cost table."""
    max_pending: int = 8
    """Most drafts per cycle; it bounds how long a token waits for its deep pass."""
    suffix_drafts: bool = True
    """Whether text that stands in the prompt, in the output or in earlier outputs of the same salt is drafted again, in
    modes verified and bounded. It needs a measured cost table: with a fixed number of `drafts` there are none."""
    prompt_exits: bool = False
    """Whether prompt tokens may exit early in mode fast."""
    audit_share: float = 0.02
    """Share of greedy answers of mode fast that full depth judges afterwards, while the engine has nothing else to
    run."""
    audit_delta: float = 0.05
    """Most probability of ever raising an alarm for a contract of mode fast that is kept, for each tenant. A deployment
    divides it by its number of replicas."""
    prefix_caching: bool = True
    """Share the KV of whole blocks between requests with equal prefix and salt."""
    kernels: str = "auto"
    """native, reference, or auto: native if its module is built."""
    num_threads: int | None = None
    """CPU threads of one step; None: torch's default."""
    max_queued: int = 4096
    """Most requests that may wait; further submissions are refused."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model", self.model, "a model name, folder, .gguf file or Hugging Face id")
        _one_of("dtype", self.dtype, DTYPE_CHOICES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("device", self.device, DEVICES)
        _one_of("kernels", self.kernels, KERNELS)
        if self.max_model_len is not None:
            _integer("max_model_len", self.max_model_len, 2, 2**24)
        if self.kv_memory_gib != AUTO and not _is_number(self.kv_memory_gib, 0, 4096):
            raise ConfigError("kv_memory_gib", self.kv_memory_gib, "auto, or a number above 0 up to 4096")
        if not _is_number(self.gpu_memory_utilization, 0, 1):
            raise ConfigError("gpu_memory_utilization", self.gpu_memory_utilization, "a number above 0 up to 1")
        if not isinstance(self.artefact_swap, bool):
            raise ConfigError("artefact_swap", self.artefact_swap, "true or false")
        _integer("block_size", self.block_size, 1, 1024)
        _integer_or_auto("max_rows", self.max_rows, 1, 65536)
        _integer_or_auto("max_batch_tokens", self.max_batch_tokens, 1, 2**20)
        rows, tokens = self.max_rows, self.max_batch_tokens
        if isinstance(rows, int) and isinstance(tokens, int) and tokens < rows:
            expected = f"at least max_rows ({self.max_rows}), so that every row can advance in every step"
            raise ConfigError("max_batch_tokens", self.max_batch_tokens, expected)
        _integer("max_queued", self.max_queued, 1, 2**24)
        if self.num_threads is not None:
            _integer("num_threads", self.num_threads, 1, 1024)
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError("prefix_caching", self.prefix_caching, "true or false")
        if not isinstance(self.artefact, str) or not self.artefact:
            raise ConfigError("artefact", self.artefact, "a folder, auto or none")
        _integer("max_pending", self.max_pending, 1, 64)
        if self.drafts is not None:
            _integer("drafts", self.drafts, 0, self.max_pending)
        if not isinstance(self.suffix_drafts, bool):
            raise ConfigError("suffix_drafts", self.suffix_drafts, "true or false")
        if not isinstance(self.prompt_exits, bool):
            raise ConfigError("prompt_exits", self.prompt_exits, "true or false")
        share = self.audit_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ConfigError("audit_share", share, "a number from 0 up to 1")
        delta = self.audit_delta
        if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
            raise ConfigError("audit_delta", delta, "a number above 0 and below 1")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from YAML or JSON values; an unknown key names itself and the nearest known one."""
        for name in REMOVED.keys() & values.keys():
            raise ConfigError(name, values[name], REMOVED[name])
        refuse_unknown("engine setting", values, [f.name for f in fields(cls)])
        return cls(**values)

    @property
    def kv_memory_bytes(self) -> int | None:
        """None for auto."""
        return None if isinstance(self.kv_memory_gib, str) else int(self.kv_memory_gib * GIB)


@dataclass(frozen=True, slots=True)
class ResolvedConfig(EngineConfig):
    """Settings in force, with a value for every `auto` that depends on model and device. What an engine is built from
    and what it reports; `tide_core.kv.sizing` makes it. `artefact` and `kernels` stay as given."""

    dtype: str = "float32"
    device: str = "cpu"
    max_model_len: int = 2
    kv_memory_gib: float = 1.0
    max_rows: int = LEAST_AUTO_ROWS
    max_batch_tokens: int = CPU_BATCH_TOKENS

    def __post_init__(self) -> None:
        for name in ("dtype", "device", "max_model_len", "kv_memory_gib", "max_rows", "max_batch_tokens"):
            if getattr(self, name) in (AUTO, None):
                raise ConfigError(name, getattr(self, name), "a value: settings in force have no auto")
        EngineConfig.__post_init__(self)


def _is_number(value: object, above: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and above < value <= most


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(name, value, f"one of {', '.join(allowed)}")


def _integer_or_auto(name: str, value: object, low: int, high: int) -> None:
    if value != AUTO and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
        raise ConfigError(name, value, f"auto, or an integer in {low}..{high}")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(name, value, f"an integer in {low}..{high}")

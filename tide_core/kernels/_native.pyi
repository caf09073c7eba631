from typing import Any

import numpy as np

def linear(
    dtype: int,
    weight_dtype: int,
    x: int,
    weight: int,
    bias: int,
    y: int,
    rows: int,
    in_features: int,
    out_features: int,
    /,
) -> None: ...
def block_bytes(kind: int, /) -> int: ...
def panels_bytes(kind: int, in_features: int, out_features: int, /) -> int: ...
def pack_panels(kind: int, blocks: int, order: int, in_features: int, out_features: int, panels: int, /) -> None: ...
def unpack_rows(
    kind: int, panels: int, in_features: int, out_features: int, ids: int, count: int, y: int, /
) -> None: ...
def quantised_linear(
    kind: int, x: int, panels: int, bias: int, y: int, rows: int, in_features: int, out_features: int, /
) -> None: ...
def rms_norm(dtype: int, x: int, weight: int, y: int, rows: int, width: int, eps: float, /) -> None: ...
def silu_mul(dtype: int, gate: int, up: int, y: int, count: int, /) -> None: ...
def rotary(
    dtype: int,
    x: int,
    cos: int,
    sin: int,
    y: int,
    num_tokens: int,
    num_heads: int,
    dim: int,
    token_stride: int,
    head_stride: int,
    /,
) -> None: ...
def write_kv(
    dtype: int,
    k: int,
    v: int,
    k_pool: int,
    v_pool: int,
    slots: int,
    num_tokens: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    k_token_stride: int,
    k_head_stride: int,
    v_token_stride: int,
    v_head_stride: int,
    num_blocks: int,
    block_size: int,
    /,
) -> None: ...
def paged_attention(
    dtype: int,
    q: int,
    k_pool: int,
    v_pool: int,
    block_tables: int,
    query_starts: int,
    context_lens: int,
    y: int,
    num_tokens: int,
    q_token_stride: int,
    q_head_stride: int,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    num_blocks: int,
    block_size: int,
    num_rows: int,
    max_blocks: int,
    scaling: float,
    window: int,
    softcap: float,
    /,
) -> None: ...
def best(x: int, rows: int, width: int, maxima: int, indices: int, /) -> None: ...

_Array = np.ndarray[Any, np.dtype[Any]]
_Columns = tuple[int, int, int]
_Sizes = tuple[int, int, int, int, int]

class Program:
    def add_buffer(self, width: int, chosen: bool, external: bool, /) -> int: ...
    def rms_norm(self, x: _Columns, weight: int, eps: float, y: _Columns, /) -> None: ...
    def linear(self, x: int, weight_dtype: int, weight: int, bias: int, y: int, /) -> None: ...
    def add(self, a: _Columns, b: _Columns, y: _Columns, /) -> None: ...
    def silu_mul(self, gate: _Columns, up: _Columns, y: _Columns, /) -> None: ...
    def silu(self, x: _Columns, y: _Columns, /) -> None: ...
    def sigmoid(self, x: _Columns, y: _Columns, /) -> None: ...
    def gather(self, table: int, num_rows: int, y: _Columns, /) -> None: ...
    def add_distance(self, table: int, num_rows: int, y: _Columns, /) -> None: ...
    def rotary(self, cos: int, sin: int, num_positions: int, dim: int, x: _Columns, /) -> None: ...
    def write_kv(self, k: _Columns, v: _Columns, k_pool: int, v_pool: int, sizes: _Sizes, /) -> None: ...
    def paged_attention(
        self, q: _Columns, k_pool: int, v_pool: int, sizes: _Sizes, scaling: float, y: _Columns, /
    ) -> None: ...
    def select(self, x: _Columns, y: _Columns, /) -> None: ...
    def confidence(self, logits: int, y: _Columns, /) -> None: ...
    def result(self, x: _Columns, /) -> None: ...
    def run(
        self,
        external: list[int],
        positions: _Array,
        slots: _Array,
        block_tables: _Array,
        query_starts: _Array,
        context_lens: _Array,
        origins: _Array | None,
        each: bool,
        /,
    ) -> tuple[list[float], list[int]]: ...

def set_num_threads(count: int, /) -> None: ...
def num_threads() -> int: ...
def instruction_set() -> str: ...
def instruction_sets() -> list[str]: ...
def set_instruction_set(name: str, /) -> None: ...

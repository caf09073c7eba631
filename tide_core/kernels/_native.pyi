def linear(
    dtype: int, x: int, weight: int, bias: int, y: int, rows: int, in_features: int, out_features: int, /
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
def set_num_threads(count: int, /) -> None: ...
def num_threads() -> int: ...
def instruction_set() -> str: ...

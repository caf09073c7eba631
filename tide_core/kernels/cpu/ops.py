"""The ops on the CPU, by the native module. For inference only: no gradient flows through them.

`tide_core.kernels.reference.ops` defines each op. `linear` and `paged_attention` are batch-invariant: a row's
result is bitwise the same alone and in any batch, and for any number of threads.

The wrappers run some hundred times per token, so each tests all its tensors in one cheap expression (a shape is
unpacked once: reading it builds a tuple) and asks `checks` for the culprit only when that fails.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tide_core.kernels import _native, checks
from tide_core.kernels.panels import Panels

_DTYPE_CODES = checks.DTYPE_CODES


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., K] times `weight` [N, K] transposed, plus `bias` [N]. A bfloat16 weight may meet a float32 `x`."""
    dtype = x.dtype
    code = weight_code = _DTYPE_CODES.get(dtype, -1)
    shape = x.shape
    weight_shape = weight.shape
    if weight.dtype is torch.bfloat16 and dtype is torch.float32:
        weight_code = _DTYPE_CODES[torch.bfloat16]
    elif weight.dtype is not dtype:
        code = -1
    if not (
        code >= 0
        and x.is_cpu
        and weight.is_cpu
        and len(weight_shape) == 2
        and len(shape) > 0
        and shape[-1] == weight_shape[1]
        and weight.is_contiguous()
        and (x.is_contiguous() or _has_unit_stride(x))
        and (bias is None or _is_vector(bias, weight_shape[0], x))
    ):
        raise checks.first_fault(checks.linear_faults(x, weight, bias))
    out_features, in_features = weight_shape
    x = x.contiguous()
    # Sizes as separate arguments: Torch takes 1 us longer to read them from a tuple.
    if len(shape) == 2:
        y = x.new_empty(shape[0], out_features)
    elif len(shape) == 3:
        y = x.new_empty(shape[0], shape[1], out_features)
    else:
        y = x.new_empty((*shape[:-1], out_features))
    _native.linear(
        code,
        weight_code,
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        y.numel() // out_features if out_features else 0,
        in_features,
        out_features,
    )
    return y


def quantised_linear(x: Tensor, panels: Panels, bias: Tensor | None = None) -> Tensor:
    """`x` [..., K] in float32 times a block-quantised matrix [N, K] transposed, plus `bias` [N]."""
    shape = x.shape
    if not (
        x.dtype is torch.float32
        and x.is_cpu
        and len(shape) > 0
        and shape[-1] == panels.in_features
        and (bias is None or _is_vector(bias, panels.out_features, x))
    ):
        raise checks.first_fault(checks.quantised_linear_faults(x, panels, bias))
    x = x.contiguous()
    y = x.new_empty((*shape[:-1], panels.out_features))
    _native.quantised_linear(
        panels.code,
        x.data_ptr(),
        panels.data.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        y.numel() // panels.out_features,
        panels.in_features,
        panels.out_features,
    )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hugging Face LlamaRMSNorm of `x` [..., D] with `weight` [D]."""
    code = _DTYPE_CODES.get(x.dtype, -1)
    shape = x.shape
    if not (
        code >= 0
        and x.is_cpu
        and len(shape) > 0
        and _is_vector(weight, shape[-1], x)
        and (x.is_contiguous() or _has_unit_stride(x))
    ):
        raise checks.first_fault(checks.rms_norm_faults(x, weight))
    x = x.contiguous()
    y = torch.empty_like(x)
    width = shape[-1]
    rows = x.numel() // width if width else 0
    _native.rms_norm(code, x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, width, eps)
    return y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu of `gate` times `up`, of one shape."""
    dtype = gate.dtype
    code = _DTYPE_CODES.get(dtype, -1)
    if not (
        code >= 0
        and up.dtype is dtype
        and gate.is_cpu
        and up.is_cpu
        and gate.shape == up.shape
        and gate.is_contiguous()
        and up.is_contiguous()
    ):
        raise checks.first_fault(checks.silu_mul_faults(gate, up))
    y = torch.empty_like(gate)
    _native.silu_mul(code, gate.data_ptr(), up.data_ptr(), y.data_ptr(), gate.numel())
    return y


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in halves of `x` [T, H, D] by `cos` and `sin` [T, D]."""
    dtype = x.dtype
    code = _DTYPE_CODES.get(dtype, -1)
    try:
        num_tokens, num_heads, dim = x.shape
        token_stride, head_stride, stride = x.stride()
    except ValueError:
        raise checks.first_fault(checks.rotary_faults(x, cos, sin)) from None
    expected = (num_tokens, dim)
    if not (
        code >= 0
        and cos.dtype is dtype
        and sin.dtype is dtype
        and x.is_cpu
        and cos.is_cpu
        and sin.is_cpu
        and cos.shape == expected
        and sin.shape == expected
        and cos.is_contiguous()
        and sin.is_contiguous()
        and (stride == 1 or _has_unit_stride(x))
        and dim % 2 == 0
    ):
        raise checks.first_fault(checks.rotary_faults(x, cos, sin))
    y = x.new_empty(num_tokens, num_heads, dim)
    _native.rotary(
        code,
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        y.data_ptr(),
        num_tokens,
        num_heads,
        dim,
        token_stride,
        head_stride,
    )
    return y


def write_kv(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Copies `k` [T, H, Dk] and `v` [T, H, Dv] into the pools at `slots` [T], in place; negative slots are skipped.

    A slot outside the pools raises IndexError before anything is written.
    """
    dtype = k.dtype
    code = _DTYPE_CODES.get(dtype, -1)
    try:
        num_tokens, num_heads, key_dim = k.shape
        num_blocks, pool_heads, block_size, pool_key_dim = k_pool.shape
        value_dim = v_pool.shape[3]
        k_token_stride, k_head_stride, k_stride = k.stride()
        v_token_stride, v_head_stride, v_stride = v.stride()
    except (ValueError, IndexError):
        raise checks.first_fault(checks.write_kv_faults(k, v, k_pool, v_pool, slots)) from None
    if not (
        code >= 0
        and v.dtype is dtype
        and k_pool.dtype is dtype
        and v_pool.dtype is dtype
        and k.is_cpu
        and v.is_cpu
        and k_pool.is_cpu
        and v_pool.is_cpu
        and num_heads == pool_heads
        and key_dim == pool_key_dim
        and v.shape == (num_tokens, num_heads, value_dim)
        and v_pool.shape == (num_blocks, num_heads, block_size, value_dim)
        and k_pool.is_contiguous()
        and v_pool.is_contiguous()
        and (k_stride == 1 or _has_unit_stride(k))
        and (v_stride == 1 or _has_unit_stride(v))
        and _is_integers(slots, torch.int64, (num_tokens,))
    ):
        raise checks.first_fault(checks.write_kv_faults(k, v, k_pool, v_pool, slots))
    _native.write_kv(
        code,
        k.data_ptr(),
        v.data_ptr(),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        slots.data_ptr(),
        num_tokens,
        num_heads,
        key_dim,
        value_dim,
        k_token_stride,
        k_head_stride,
        v_token_stride,
        v_head_stride,
        num_blocks,
        block_size,
    )


def paged_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of ragged queries over paged keys and values; returns [T, Hq, Dv].

    Queries that no row owns are left unset. A page outside the pools raises IndexError.
    """
    dtype = q.dtype
    code = _DTYPE_CODES.get(dtype, -1)
    try:
        num_tokens, num_heads, key_dim = q.shape
        num_blocks, num_kv_heads, block_size, value_dim = v_pool.shape
        q_token_stride, q_head_stride, q_stride = q.stride()
        (num_rows,) = context_lens.shape
        _, max_blocks = block_tables.shape
    except ValueError:
        faults = checks.paged_attention_faults(q, k_pool, v_pool, block_tables, query_starts, context_lens)
        raise checks.first_fault(faults) from None
    if not (
        code >= 0
        and k_pool.dtype is dtype
        and v_pool.dtype is dtype
        and q.is_cpu
        and k_pool.is_cpu
        and v_pool.is_cpu
        and num_kv_heads > 0
        and num_heads % num_kv_heads == 0
        and k_pool.shape == (num_blocks, num_kv_heads, block_size, key_dim)
        and k_pool.is_contiguous()
        and v_pool.is_contiguous()
        and (q_stride == 1 or _has_unit_stride(q))
        and _is_integers(block_tables, torch.int32, (num_rows, max_blocks))
        and _is_integers(query_starts, torch.int32, (num_rows + 1,))
        and _is_integers(context_lens, torch.int32, (num_rows,))
    ):
        faults = checks.paged_attention_faults(q, k_pool, v_pool, block_tables, query_starts, context_lens)
        raise checks.first_fault(faults)
    out = q.new_empty(num_tokens, num_heads, value_dim)
    _native.paged_attention(
        code,
        q.data_ptr(),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        block_tables.data_ptr(),
        query_starts.data_ptr(),
        context_lens.data_ptr(),
        out.data_ptr(),
        num_tokens,
        q_token_stride,
        q_head_stride,
        num_heads,
        num_kv_heads,
        key_dim,
        value_dim,
        num_blocks,
        block_size,
        num_rows,
        max_blocks,
        scaling,
        window,
        softcap,
    )
    return out


def _has_unit_stride(tensor: Tensor) -> bool:
    """Whether the last dimension lies without gaps."""
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1 or tensor.numel() == 0


def _is_vector(tensor: Tensor, size: int, like: Tensor) -> bool:
    """Whether `tensor` is a contiguous vector of `size` numbers on the CPU, of the same dtype as `like`."""
    return tensor.dtype is like.dtype and tensor.is_cpu and tensor.shape == (size,) and tensor.is_contiguous()


def _is_integers(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether `tensor` is a contiguous tensor of this integer dtype and shape on the CPU."""
    return tensor.dtype is dtype and tensor.is_cpu and tensor.shape == shape and tensor.is_contiguous()

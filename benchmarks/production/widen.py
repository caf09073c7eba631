"""A model with the shape and the cost of a large one that computes the function of a small one.

With a factor of K, a state of the wide model is K copies of the small model's state x, one after another. Every module
keeps this form:

    embedding   each row K times: the first state is K copies
    RMSNorm     the mean of squares over K copies is that over one; the weight K times, the same epsilon
    linear      K by K blocks, each W / K: every copy of the output is K times W x / K = W x; a bias K times
    attention   each copy of queries, keys and values is a separate set of heads: K times as many heads of the same
                size. The number of query heads per KV head does not change, and both are of one copy. Rotary positions
                and norms over a head do not change
    SwiGLU      elementwise, so copies stay copies
    LM head     (W / K, ..., W / K): the logits of the small model. Not tied, since the embedding is not divided

If K is a power of two, dividing is exact in floating point, and only the order of sums differs: greedy text is that of
the small model, up to rounding, and so is the acceptance of drafts. A layer has K * K times the weights and K times the
K and V. What it is not: a model whose text is as predictable as that of a large one, or whose states have as many
directions.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tide_core.errors import ConfigError, ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models made of the modules above and nothing else."""
WIDENED_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
MAX_FACTOR = 64


@torch.no_grad()
def widen(small: Any, factor: int, *, device: torch.device | str, dtype: torch.dtype) -> Any:
    """The model `factor` times as wide, in eval mode with frozen weights. They are written on the device, one after
    another; the host never holds the wide model."""
    architecture = type(small).__name__
    if architecture not in ARCHITECTURES:
        raise ModelError("model to widen", architecture, f"one of {', '.join(ARCHITECTURES)}")
    if not 1 <= factor <= MAX_FACTOR:
        raise ConfigError("factor", factor, f"an integer in 1..{MAX_FACTOR}")
    config = wide_config(small.config, factor)
    with torch.device("meta"):
        wide = type(small)(config)
    wide = wide.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    wide.model.rotary_emb = type(small.model.rotary_emb)(config).to(device)  # its tables are not weights
    wide.generation_config = copy.deepcopy(small.generation_config)
    for name, weight in wide.named_parameters():
        source = small.get_parameter(name).to(device)
        is_matrix = weight.dim() == 2 and isinstance(wide.get_submodule(name.rpartition(".")[0]), nn.Linear)
        write_copies(weight, source / factor if is_matrix else source)
    return wide


def wide_config(config: Any, factor: int) -> Any:
    """The configuration of the wide model; heads keep their size."""
    wide = copy.deepcopy(config)
    for name in WIDENED_SIZES:
        setattr(wide, name, getattr(config, name) * factor)
    wide.tie_word_embeddings = False
    return wide


def write_copies(target: Tensor, source: Tensor) -> None:
    """Fill `target` with copies of `source`; each dimension of `target` is a multiple of that of `source`."""
    blocks = [part for size, of in zip(target.shape, source.shape, strict=True) for part in (size // of, of)]
    target.view(blocks).copy_(source.reshape([part for of in source.shape for part in (1, of)]))

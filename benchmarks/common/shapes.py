"""Models of a given shape with random weights: their exits, their tokenizer, and the bytes that a step must read.

The exit head is a block head of the same form as that of the demo artefact: attention and SwiGLU of one layer of the
model, with the deep state of two taps as input, after two layers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tide_core.config import EngineConfig
from tide_core.engine.assemble import Parts, assemble_loaded
from tide_core.exits.artefact.artefact import Artefact, Checkpoint, DataSummary, Manifest
from tide_core.exits.artefact.heads import ExitHead, HeadSpec
from tide_core.exits.artefact.router import Router
from tide_core.kernels.fp8 import FP8, LARGEST, Fp8Weight
from tide_core.models.fp8.layers import quantise_layers
from tide_core.models.identity import identify
from tide_core.models.quantised import Fp8Linear
from tide_core.models.weights import weight_bytes

MAX_DRAFTS = 8
BOTTLENECK = 128
KV_GIB = 16.0
END = "<|end|>"
DEVIATIONS = 4.0
"""The largest number of a row of some thousand, in standard deviations."""


@dataclass(frozen=True)
class Shape:
    """A Llama, and the sizes at which it is measured."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    shortlist: int
    context: int
    """Positions of a row before a measured step."""
    exit_layer: int = 2

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


EIGHT_B = Shape("Llama 3.1 8B", 4096, 14336, 32, 32, 8, 128256, 16384, 512)
SEVENTY_B = Shape("Llama 3.1 70B", 8192, 28672, 80, 64, 8, 128256, 16384, 512)
DEMO = Shape("demo", 576, 1536, 30, 9, 3, 49152, 8192, 512)
SMALL = Shape("small", 64, 96, 9, 4, 2, 512, 64, 48)


class Subject:
    """A model of a shape and two engines on it, each made on first use."""

    def __init__(
        self, shape: Shape, device: str, *, kernels: str = "auto", max_rows: int = 32, fp8: bool = False
    ) -> None:
        """`fp8`: the linears of the layers have weights in 8 bits."""
        self.shape, self.device, self.kernels, self.max_rows = shape, torch.device(device), kernels, max_rows
        self.fp8 = fp8

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device.type == "cuda" else "float32"

    @functools.cached_property
    def model(self) -> Any:
        return make_model(self.shape, self.device, getattr(torch, self.dtype), fp8=self.fp8)

    @functools.cached_property
    def plain(self) -> Parts:
        """Without exits."""
        return self._assemble(None)

    @functools.cached_property
    def exits(self) -> Parts:
        """With one checkpoint layer; every row drafts as many tokens as it may."""
        return self._assemble(make_artefact(self.shape, self.model))

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Read by a step at full depth: all weights except the embedding, of which it reads single rows."""
        return weight_bytes(self.model) - bytes_of(self.model.get_input_embeddings())

    @property
    def kv_bytes(self) -> int:
        """K and V of one position in one layer."""
        return 2 * self.shape.kv_heads * self.shape.head_dim * self._itemsize

    @property
    def shallow_bytes(self) -> int:
        """Read by a shallow pass of one row: the first layers, head, shortlist and router, and K and V of layers and
        head."""
        exits = self.exits.runner.exits
        assert exits is not None
        [checkpoint] = exits.checkpoints
        layers = self.exits.runner.adapter.layers[: checkpoint.layer]
        head = bytes_of(checkpoint.head) - bytes_of(getattr(checkpoint.head, "fuse", None))
        narrow = self.shape.shortlist * self.shape.hidden * self._itemsize
        keys_values = (checkpoint.layer + 1) * self.shape.context * self.kv_bytes
        return sum(bytes_of(layer) for layer in layers) + head + narrow + bytes_of(checkpoint.router) + keys_values

    @property
    def _itemsize(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    def _assemble(self, artefact: Artefact | None) -> Parts:
        config = EngineConfig(
            model="random",
            device=self.device.type,
            dtype=self.dtype,
            kernels=self.kernels,
            max_rows=self.max_rows,
            max_model_len=2 * self.shape.context,
            max_batch_tokens=16384,
            kv_memory_gib=KV_GIB if self.device.type == "cuda" else 0.1,
            prefix_caching=False,
            suffix_drafts=False,  # what exits gain; past its end a text repeats itself
            artefact="none",
            drafts=None if artefact is None else MAX_DRAFTS,
        )
        return assemble_loaded(
            config, self.model, byte_tokenizer(), name=self.shape.name, identity=self.shape.name, artefact=artefact
        )


def make_model(shape: Shape, device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> Any:
    """Random weights, drawn on the device; with `fp8` those of the layers' linears in 8 bits, which are never wider."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    if fp8:
        quantise_layers(model, torch.device("meta"))
        for linear in (module for module in model.modules() if isinstance(module, Fp8Linear)):
            linear.fp8 = draw_fp8(linear.fp8, device)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    draw_weights(model)
    return model


def draw_fp8(like: Fp8Weight, device: torch.device) -> Fp8Weight:
    """Values as `quantised_by_row` makes them of normal numbers with the deviation of `draw_weights`."""
    values = torch.empty(like.shape, dtype=torch.bfloat16, device=device).normal_(0.0, LARGEST / DEVIATIONS)
    scales = torch.full(like.scales.shape, 0.02 * DEVIATIONS / LARGEST, device=device).bfloat16().float()
    return Fp8Weight(values.clamp_(-LARGEST, LARGEST).to(FP8), scales, *like.block)


def make_artefact(shape: Shape, model: Any) -> Artefact:
    """Exits with random weights, in memory. Router scores are near one half: all exceed 0, none reaches 1."""
    taps = shape.layers // 3, 2 * shape.layers // 3
    spec = HeadSpec(
        "block",
        shape.hidden,
        deep=True,
        max_distance=MAX_DRAFTS,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_dim,
        ffn=shape.intermediate,
        taps=taps,
    )
    with model.device:
        head, router = ExitHead(spec), Router(shape.hidden, BOTTLENECK)
    for module in (head, router):
        draw_weights(module.requires_grad_(False).eval())
    checkpoint = Checkpoint(shape.exit_layer, spec, BOTTLENECK, acceptance=(0.5,) * MAX_DRAFTS, draft_threshold=0.0)
    manifest = Manifest(
        model=identify(model, byte_tokenizer(), None),
        checkpoints=(checkpoint,),
        max_drafts=MAX_DRAFTS,
        shortlist_size=shape.shortlist,
        shortlist_coverage=1.0,
        data=DataSummary("random", "0" * 64, 0, 0, 0, 0),
    )
    shortlist = torch.arange(shape.shortlist) * shape.vocabulary // shape.shortlist
    return Artefact(manifest, [head], [router], shortlist, "random", Path("random"))


def draw_weights(module: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02)
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)


def bytes_of(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() * p.element_size() for p in module.parameters())


def byte_tokenizer() -> Any:
    """A tokenizer in which every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, **dict.fromkeys(("eos_token", "pad_token"), END))

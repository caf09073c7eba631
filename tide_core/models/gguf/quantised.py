"""Load a GGUF file with its matrices as they are: block-quantised, in the layout of the native kernels."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from tide_core.errors import ModelError
from tide_core.kernels.panels import KINDS, NotFiniteError, Panels
from tide_core.models.gguf.architectures import GGUFModel, Weight, describe, read_weight, stays_quantised
from tide_core.models.gguf.file import GGUFFile, TensorInfo
from tide_core.models.quantised import QuantisedEmbedding, QuantisedLinear
from tide_core.models.without_data import fill_computed, model_without_data, refuse_unfilled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("tide")


def load_quantised(folder: Path, source: Path) -> PreTrainedModel:
    """The model of `source`, whose configuration and tokenizer are in `folder`, on the CPU with float32 states.

    Matrices of other formats are float32."""
    file = GGUFFile.open(source)
    described = describe(file)
    model = model_without_data(folder, torch.float32)
    bar = tqdm(described.weights, desc=f"loading {source.name}", unit="tensor", disable=not sys.stderr.isatty())
    for weight in bar:
        _put(model, file, weight)
    _tie(model, described)
    fill_computed(model)
    refuse_unfilled(model, described.architecture.name)
    counts = {
        kind: sum(file.tensors[weight.source].kind.name == kind for weight in described.weights) for kind in KINDS
    }
    kept = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    log.info("%s: %d tensors, kept as they are: %s", source.name, len(described.weights), kept or "none")
    model.requires_grad_(False)
    loaded: PreTrainedModel = model.eval()
    return loaded


def outline_quantised(folder: Path, source: Path) -> PreTrainedModel:
    """The same model without data, for the sizes of its weights; it cannot be run."""
    file = GGUFFile.open(source)
    described = describe(file)
    model = model_without_data(folder, torch.float32)
    for weight in described.weights:
        _put(model, file, weight, read=False)
    _tie(model, described)
    return model


def _put(model: Any, file: GGUFFile, weight: Weight, *, read: bool = True) -> None:
    """Read one tensor into its module, or put a quantised module into its place."""
    path, _, name = weight.name.rpartition(".")
    module, info = model.get_submodule(path), file.tensors[weight.source]
    if not stays_quantised(info, weight):
        if read:
            values = torch.from_numpy(np.array(read_weight(file, weight)))
            setattr(module, name, nn.Parameter(values, requires_grad=False))
        return
    panels = _read_panels(file, info, weight) if read else _empty_panels(info)
    if isinstance(module, nn.Embedding):
        factor = getattr(module, "scalar_embed_scale", None)
        model.set_submodule(path, QuantisedEmbedding(panels, None if factor is None else torch.tensor(factor)))
    else:
        model.set_submodule(path, QuantisedLinear(panels))  # its bias is the next tensor, if it has one


def _read_panels(file: GGUFFile, info: TensorInfo, weight: Weight) -> Panels:
    rows, columns = info.shape
    try:
        blocks = np.memmap(file.path, np.uint8, "c", info.offset, (rows, info.num_bytes // rows))
    except OSError as error:
        raise ModelError("gguf file", file.path, f"a readable file: {error.strerror or error}") from error
    order = None
    if weight.num_heads is not None:
        order = torch.arange(rows).view(weight.num_heads, -1, 2).transpose(1, 2).reshape(-1)
    try:
        return Panels.pack(info.kind.name, torch.from_numpy(blocks), columns, order)
    except NotFiniteError as error:
        raise ModelError(f"{file.path}: {info.name}", "NaN or infinity", "finite weights") from error


def _empty_panels(info: TensorInfo) -> Panels:
    rows, columns = info.shape
    return Panels.empty(info.kind.name, rows, columns, device="meta")


def _tie(model: Any, described: GGUFModel) -> None:
    """The head that is the embedding shares its weight."""
    if described.config["tie_word_embeddings"]:
        embedding = model.get_input_embeddings()
        if isinstance(embedding, QuantisedEmbedding):
            model.lm_head = QuantisedLinear(embedding.panels)
        else:
            model.lm_head.weight = embedding.weight

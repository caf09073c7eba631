"""Models made without memory for their weights, to be filled by a loader of our own or to be counted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tide_core.errors import ModelError, one_line


def model_without_data(folder: Path, dtype: torch.dtype) -> Any:
    """By the config.json of a folder, as if nothing in it were quantised."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        unquantised(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # of many types, as when transformers loads a model
        raise ModelError(f"config.json in {folder}", one_line(error), "one that transformers can read") from error
    with contextlib.suppress(OSError):  # without the file its values are those of the config
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def unquantised(config: Any) -> None:
    """Take from a configuration of transformers what it says of quantised weights: our loader knows it."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def fill_computed(model: Any) -> None:
    """What no checkpoint holds: tables that the library computes."""
    for name, module in list(model.named_modules()):
        empty = {key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        if "embed_scale" in empty:
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=module.embed_scale.dtype)
        elif empty & module._non_persistent_buffers_set:
            model.set_submodule(name, type(module)(config=model.config))


def refuse_unfilled(model: nn.Module, what: str) -> None:
    missing = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if missing:
        raise ModelError(f"tensors of {what}", f"{missing[0]} is missing", "every weight")

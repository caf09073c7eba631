"""Convert a GGUF to a Hugging Face folder in float32, one tensor at a time."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from tqdm import tqdm

from tide_core.errors import ModelError, one_line
from tide_core.models.gguf.architectures import (
    GGUFModel,
    Weight,
    describe,
    read_weight,
    stays_quantised,
    total_bytes,
)
from tide_core.models.gguf.file import GGUFFile
from tide_core.models.gguf.tokenizer import TokenIds, build_tokenizer, token_ids

log = logging.getLogger("tide")
HEADER_ALIGNMENT = 8


def convert(source: Path, target: Path, *, weights: bool = True) -> int:
    """Fill the empty folder `target` with config, generation config, tokenizer and, if wanted, weights of `source`.
    Returns how many of its matrices the native kernels read as they are.

    All checks run before the first weight is written.
    """
    started = time.monotonic()
    file = GGUFFile.open(source)
    model = describe(file)
    ids = token_ids(file)
    num_tokens = len(file.strings("tokenizer.ggml.tokens"))
    if num_tokens > model.config["vocab_size"]:
        field = f"{source}: tokenizer.ggml.tokens"
        raise ModelError(field, f"{num_tokens} tokens", f"at most {model.config['vocab_size']}, one per embedding")
    tokenizer = build_tokenizer(file, ids, model.config["max_position_embeddings"])
    config, generation = _configs(source, model, ids)
    if weights:
        _check_space(target, total_bytes(model.weights))
        log.info("converting %s: %d tensors to float32", source.name, len(model.weights))
    config.save_pretrained(target)
    generation.save_pretrained(target)
    tokenizer.save_pretrained(target)
    num_kept = sum(stays_quantised(file.tensors[weight.source], weight) for weight in model.weights)
    if not weights:
        return num_kept
    bar = tqdm(model.weights, desc=f"converting {source.name}", unit="tensor", disable=not sys.stderr.isatty())
    write_safetensors(target / "model.safetensors", model.weights, (read_weight(file, weight) for weight in bar))
    log.info("converted %s in %.1f s", source.name, time.monotonic() - started)
    return num_kept


def write_safetensors(path: Path, weights: list[Weight], values: Iterable[npt.NDArray[np.float32]]) -> None:
    """Write weights one at a time: the header needs only names and shapes, so at most one tensor is in memory."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + 4 * math.prod(weight.shape)
        header[weight.name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for weight, array in zip(weights, values, strict=True):
            assert array.shape == weight.shape
            stream.write(np.ascontiguousarray(array, dtype="<f4").data)
        stream.flush()
        os.fsync(stream.fileno())


def _configs(source: Path, model: GGUFModel, ids: TokenIds) -> tuple[Any, Any]:
    tokens = {"bos_token_id": ids.bos, "eos_token_id": ids.eos, "pad_token_id": ids.pad}
    ends = ids.eos if len(ids.ends) == 1 else list(ids.ends)
    name, model_class = model.architecture.config_class, model.architecture.model_class
    try:
        config = getattr(transformers, name)(**model.config, **tokens, dtype="float32", architectures=[model_class])
        return config, transformers.GenerationConfig(**{**tokens, "eos_token_id": ends})
    except Exception as error:
        # The configuration classes raise errors of several types.
        raise ModelError(f"{source}: metadata", one_line(error), f"a configuration {name} accepts") from error


def _check_space(target: Path, needed: int) -> None:
    """Fail before writing if the disk is too full."""
    free = shutil.disk_usage(target).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")

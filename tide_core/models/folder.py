"""Check a Hugging Face folder: a configuration, weights in safetensors and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tide_core.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_NAMED_KEYS = 3
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def check_folder(folder: Path) -> None:
    """Raise a ModelError that names what the folder lacks."""
    config = folder / "config.json"
    if not config.is_file():
        inside = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; to use {inside[0]}, pass the path of the file" if inside else ""
        raise ModelError("model folder", folder, f"a config.json in it{hint}")
    json_object(config)
    weight_files(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError("model folder", folder, f"a tokenizer in it: one of {', '.join(TOKENIZER_FILES)}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads, in order of name."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickles:
            expected = (
                f"weights in safetensors; {pickles[0]} is a pickle, which can run code: convert it to safetensors"
            )
            raise ModelError("model folder", folder, expected)
        raise ModelError("model folder", folder, f"weights in it: {SINGLE_FILE}, or shards with {INDEX}")
    weight_map = json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(str(folder / INDEX), weight_map, "a weight_map from tensor to file")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(str(folder / INDEX), name, "names of safetensors files in the same folder")
        if not (folder / name).is_file():
            raise ModelError("model folder", folder, f"the file {name}, which {INDEX} names")
    return [folder / name for name in names]


def check_keys(name: str, found: Mapping[str, Iterable[object] | None]) -> None:
    """Refuse weights of the model `name` that are missing, unexpected or of another shape, by key."""
    for what, expected in (
        ("missing_keys", "every weight of the model in the checkpoint; missing"),
        ("unexpected_keys", "only weights of the model in the checkpoint; unexpected"),
        ("mismatched_keys", "weights of the shapes in config.json; other shapes in"),
        ("error_msgs", "a checkpoint without errors"),
    ):
        keys = sorted(str(key) for key in found.get(what) or ())
        if keys:
            more = f" and {len(keys) - MAX_NAMED_KEYS} more" if len(keys) > MAX_NAMED_KEYS else ""
            named = ", ".join(keys[:MAX_NAMED_KEYS]) + more
            raise ModelError(f"weights of {name}", f"{len(keys)} {what}", f"{expected}: {named}")


def json_object(path: Path) -> dict[str, object]:
    """The object in a JSON file; raises ModelError if it holds none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(str(path), error.strerror or str(error), "a readable file") from error
    except ValueError as error:
        raise ModelError(str(path), str(error), "valid JSON") from error
    if not isinstance(value, dict):
        raise ModelError(str(path), value, "a JSON object")
    return value

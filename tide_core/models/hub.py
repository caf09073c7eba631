"""Fetch models by Hugging Face id: from the local hub cache, else from the hub, which must answer within seconds."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

from tide_core.errors import ModelError, one_line
from tide_core.models.folder import check_folder

log = logging.getLogger("tide")

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
MAX_ID_CHARS = 96
ALLOWED_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Sub-folders hold other formats of the same weights, and so do consolidated files.
IGNORED_FILES = ["*/*", "consolidated*"]
REQUEST_LIMIT_S = 5.0
ANSWER_LIMIT_S = 8.0


def is_hub_id(model: str) -> bool:
    parts = model.split("/")
    named = len(parts) <= 2 and all(NAME.fullmatch(part) for part in parts)
    return named and len(model) <= MAX_ID_CHARS and ".." not in model and "--" not in model


def fetch(model: str) -> Path:
    """The folder of a hub snapshot. A complete snapshot in the local cache is used without a request to the hub."""
    import huggingface_hub

    try:
        folder = _snapshot(model)
        check_folder(folder)
        return folder
    except ModelError as error:
        cached = f"incomplete, it lacks {error.expected}"
    except Exception as error:
        log.debug("hub cache: %s", error)
        cached = "not there"
    reason = _reach(model)
    if reason is None:
        try:
            log.info("downloading %s from the Hugging Face hub", model)
            folder = Path(
                huggingface_hub.snapshot_download(model, allow_patterns=ALLOWED_FILES, ignore_patterns=IGNORED_FILES)
            )
        except Exception as error:
            reason = one_line(error)
        else:
            check_folder(folder)
            return folder
    expected = (
        "a model that can be found. Tried: a folder of this name (not there), a .gguf file (the name does not end in "
        f".gguf), the local hub cache ({cached}), the Hugging Face hub ({reason}). "
        "Without a network, give the path of a model folder or of a .gguf file, or use the word demo"
    )
    raise ModelError("model", model, expected)


def cached(model: str) -> Path | None:
    """The folder of a complete snapshot in the local cache; asks no hub."""
    try:
        folder = _snapshot(model)
        check_folder(folder)
    except Exception as error:
        log.debug("hub cache: %s", error)
        return None
    return folder


def _snapshot(model: str) -> Path:
    import huggingface_hub

    return Path(huggingface_hub.snapshot_download(model, local_files_only=True))


def _reach(model: str) -> str | None:
    """Why the hub cannot provide the model; None if it can.

    The request runs in its own thread, because name resolution can block for longer than the request's timeout.
    """
    import huggingface_hub

    outcome: list[str | None] = []

    def probe() -> None:
        try:
            huggingface_hub.HfApi().model_info(model, timeout=REQUEST_LIMIT_S)
            outcome.append(None)
        except Exception as error:
            outcome.append(one_line(error))

    thread = threading.Thread(target=probe, name="tide-hub-probe", daemon=True)
    thread.start()
    thread.join(ANSWER_LIMIT_S)
    return outcome[0] if outcome else f"no answer within {ANSWER_LIMIT_S:.0f} s"

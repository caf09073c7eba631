"""A tiny model whose exits are often right, and its artefact, in folders, for what is started by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.exit_engines import easy_model
from tests.exits.artefact.artefact_factory import make_artefact
from tests.factories import tiny_tokenizer

PROMPTS = ["the cat sat on the mat", "the dog", "then they all went home", "a log on a mat", "home and dog", "cats"]


def save_model(folder: Path) -> Path:
    easy_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_artefact_for_it(folder: Path, **settings: Any) -> Path:
    return make_artefact(folder, easy_model(), **{"kind": "identity", "shortlist_size": 380, **settings})

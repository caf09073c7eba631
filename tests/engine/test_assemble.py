"""From settings to parts: what is read on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.on_disk import save_artefact_for_it, save_model
from tests.factories import make_config
from tide_core.engine.assemble import assemble
from tide_core.models import model_cache


@pytest.mark.parametrize("exits", [True, False])
def test_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: bool) -> None:
    hashed: list[str] = []
    sha256 = model_cache.sha256

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256(path)

    artefact: Any = save_artefact_for_it(tmp_path / "artefact") if exits else "none"
    model = save_model(tmp_path / "model")
    monkeypatch.setattr(model_cache, "sha256", counted)

    assemble(make_config(model=str(model), artefact=str(artefact), drafts=2))

    assert hashed.count("model.safetensors") == 1

"""Fast exits on disk: what is saved is loaded, and what does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.exits.artefact.artefact_factory import make_artefact, make_fast
from tide_core.errors import ArtefactError
from tide_core.exits.artefact.artefact import MANIFEST_FILE, load_artefact, save_artefact
from tide_core.exits.artefact.contract import FastContract
from tide_core.exits.artefact.fast import FastExit, FastExits, SkipMap, fast_exit
from tide_core.exits.artefact.heads import HeadSpec

CONTRACT = FastContract(0.02, 0.05, (0.9, 0.8, 0.7), 0.01, 3.0, 100, 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_artefact(tmp_path / "artefact", kind="mlp", fast_layers=(2, 3), fast_contracts=(CONTRACT,))


def test_fast_exits_are_loaded_as_they_were_saved(folder: Path, tmp_path: Path) -> None:
    one = load_artefact(folder, None)
    assert one.fast is not None
    assert one.manifest.fast == make_fast(48, (2, 3), (CONTRACT,))
    save_artefact(tmp_path / "again", one.manifest, one.heads, one.routers, one.shortlist, fast=one.fast)
    other = load_artefact(tmp_path / "again", None)
    assert other.fast is not None
    assert other.digest == one.digest
    for mine, theirs in zip(one.fast.maps, other.fast.maps, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert [each.first_layer for each in one.fast.maps] == [1, 2, 3]


def test_an_artefact_without_fast_exits_says_nothing_of_them(tmp_path: Path) -> None:
    plain = make_artefact(tmp_path / "plain")
    assert "fast" not in json.loads((plain / MANIFEST_FILE).read_text())
    assert load_artefact(plain, None).fast is None


def test_modules_that_do_not_fit_the_manifest_are_refused_by_name(folder: Path) -> None:
    one = load_artefact(folder, None)
    with pytest.raises(ArtefactError) as caught:
        save_artefact(folder, one.manifest, one.heads, one.routers, one.shortlist)
    assert caught.value.field == "fast"
    values = json.loads((folder / MANIFEST_FILE).read_text())
    values["fast"]["rank"] = 5
    (folder / MANIFEST_FILE).write_text(json.dumps(values))
    with pytest.raises(ArtefactError, match=r"tensor fast\.1\.skip\.down\.weight"):
        load_artefact(folder, None)


def test_an_untrained_skip_map_carries_the_state_at_the_exit_upward() -> None:
    skip_map = SkipMap(48, 1, 4, 4)
    states, features = torch.randn(3, 48), torch.randn(3, 48)
    moves = skip_map.moves(skip_map.code(states, features))
    assert moves.shape == (3, 3, 48)
    for layer in (1, 2, 3):
        assert torch.equal(skip_map.state(layer, states, moves), states)


def test_several_checkpoints_and_fast_exits_exclude_each_other(tmp_path: Path) -> None:
    both = load_artefact(make_artefact(tmp_path / "two", kind="mlp", layers=(1, 2)), None)
    with pytest.raises(ArtefactError, match="one checkpoint"):
        replace(both.manifest, fast=make_fast(48, (3,)))


def test_fast_exits_that_fit_neither_head_nor_model_are_refused_by_name() -> None:
    good = fast_exit(2, 48, 16, 8, 1e-5)
    for make, what in (
        (lambda: FastExit(2, HeadSpec("mlp", 48, deep=True, max_distance=3, hidden=16), 8), "fast exit at layer 2"),
        (lambda: FastExits((good, good), 4), "fast.exits"),
        (lambda: FastExits((good,), 0), "fast.rank"),
        (lambda: FastExits((good,), 4, (CONTRACT,)), "fast.contracts, epsilon 0.02"),
        (lambda: FastExits((good,), 4).check(2, 4, 48), "fast.exits, layer"),
        (lambda: FastExits((good,), 4).check(1, 4, 64), "fast.exits, head.width"),
        (lambda: FastContract(1.5, 0.05, (0.5,), 0.1, 1.0, 1, 1), "fast.contracts, epsilon"),
        (lambda: FastContract(0.5, 0.05, (), 0.1, 1.0, 1, 1), "thresholds"),
    ):
        with pytest.raises(ArtefactError) as caught:
            make()
        assert caught.value.field == what

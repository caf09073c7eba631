"""`tide inspect`: what is printed of an artefact, and what each end means to the shell."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exits.artefact.artefact_factory import make_artefact
from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.exits.artefact.artefact import load_artefact
from tide_core.exits.artefact.contract import FastContract

Tide = Callable[..., tuple[int, str, str]]


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    return make_artefact(tmp_path / "a", layers=(1, 3), reports={"report.md": b"# Report\n"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2"):
        tiny_model(family).save_pretrained(root / family)
        tiny_tokenizer().save_pretrained(root / family)
    return root


def test_everything_an_artefact_holds_is_printed(tide: Tide, artefact: Path) -> None:
    code, out, err = tide("inspect", str(artefact))
    assert (code, err) == (0, "")
    loaded = load_artefact(artefact, None)
    for part in (
        loaded.digest,
        str(artefact),
        "LlamaForCausalLM",
        "4 layers of width 48",
        "96 of 384 tokens, 97.0%",
        "up to 6 in a cycle",
        "checkpoint after layer 1 of 4",
        "checkpoint after layer 3 of 4",
        f"block, {loaded.heads[0].num_parameters:,} parameters",
        "up to 6 tokens back",
        "4 query and 2 KV heads of size 12",
        "0.800 0.750",
        "3.10 layers a token",
        "report.md",
        loaded.manifest.files["heads.safetensors"].sha256,
        f"{loaded.manifest.files['heads.safetensors'].size:,}",
    ):
        assert part in out, part
    assert max(map(len, out.splitlines())) <= 120


def test_fast_exits_and_their_contracts_are_printed(tide: Tide, tmp_path: Path) -> None:
    contract = FastContract(0.05, 0.1, (0.9, 0.8, 0.7), 0.0312, 2.25, 256, 128)
    folder = make_artefact(tmp_path / "a", fast_layers=(2, 3), fast_contracts=(contract,))
    code, out, _ = tide("inspect", str(folder))
    assert code == 0
    for part in (
        "fast exit after layer 2 of 4",
        "skip maps   3 of rank 4",
        "epsilon 0.05: thresholds 0.9000 0.8000 0.7000",
        "0.0312 differ, 2.25 layers a token, certified on 256 answers of at most 128 tokens (delta 0.1)",
    ):
        assert part in out, part
    bare = make_artefact(tmp_path / "b", fast_layers=(2,))
    assert "no certified contract: a request names a threshold" in tide("inspect", str(bare))[1]


@pytest.mark.parametrize("kind", ["identity", "affine", "mlp"])
def test_every_kind_of_head_is_shown(kind: str, tide: Tide, tmp_path: Path) -> None:
    make_artefact(tmp_path / "a", kind=kind, fast=None)
    code, out, _ = tide("inspect", str(tmp_path / "a"))
    assert code == 0
    assert f"head      {kind}, " in out
    assert "bounded" not in out
    assert "fast" not in out


def test_json_is_one_object_with_the_manifest_and_the_digest(tide: Tide, artefact: Path) -> None:
    code, out, err = tide("inspect", str(artefact), "--json")
    assert (code, err) == (0, "")
    values, loaded = json.loads(out), load_artefact(artefact, None)
    assert values["digest"] == loaded.digest
    assert values["path"] == str(artefact)
    assert [checkpoint["layer"] for checkpoint in values["checkpoints"]] == [1, 3]
    assert values["checkpoints"][0]["num_head_parameters"] == loaded.heads[0].num_parameters
    assert values["checkpoints"][0]["fast"]["threshold"] == 0.7
    assert "matches" not in values


def test_the_model_it_was_made_for_matches(tide: Tide, artefact: Path, models: Path) -> None:
    code, out, err = tide("inspect", str(artefact), "--model", str(models / "llama"))
    assert (code, err) == (0, "")
    assert out.endswith(f"matches the model {models / 'llama'}\n")
    code, out, _ = tide("inspect", str(artefact), "--model", str(models / "llama"), "--json")
    assert (code, json.loads(out)["matches"]) == (0, True)


def test_another_model_is_2_with_both_sides_named(tide: Tide, artefact: Path, models: Path) -> None:
    code, out, err = tide("inspect", str(artefact), "--model", str(models / "qwen2"))
    assert code == 2
    assert "matches" not in out
    assert err.startswith("tide: error: artefact's model.architecture: ")
    assert "LlamaForCausalLM" in err
    assert "Qwen2ForCausalLM" in err
    code, out, err = tide("inspect", str(artefact), "--model", str(models / "qwen2"), "--json")
    assert (code, json.loads(out)["matches"]) == (2, False)


def test_a_broken_artefact_is_2_and_one_line(tide: Tide, artefact: Path) -> None:
    (artefact / "heads.safetensors").write_bytes(b"broken")
    code, out, err = tide("inspect", str(artefact))
    assert (code, out) == (2, "")
    assert err.startswith("tide: error: file heads.safetensors: got '6 bytes', expected ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["nothing", "router.pt"])
def test_what_is_no_artefact_is_2_and_says_what_is_wanted(name: str, tide: Tide, tmp_path: Path) -> None:
    (tmp_path / "router.pt").write_bytes(b"\x80")
    code, out, err = tide("inspect", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert "an artefact folder" in err


def test_a_model_that_is_not_there_is_2(tide: Tide, artefact: Path) -> None:
    code, _, err = tide("inspect", str(artefact), "--model", "./nothing")
    assert code == 2
    assert "./nothing" in err


def test_help_imports_no_torch() -> None:
    code = "import sys, tide_core.cli as c; c.main(['inspect', '--help']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: tide inspect" in run.stdout
    assert run.stdout.endswith("False\n")

"""The sizing table in docs/kubernetes.md: shapes are the published models', and the text says what the table says."""

from __future__ import annotations

import re

import pytest

from tests.docs.documents import ROOT
from tide_core.config import GIB
from tools.reference.sizing import (
    GPUS,
    MODELS,
    NONE,
    kv_bytes_per_token,
    pod_gib,
    pool_of,
    rows_of,
    settings,
    sizes,
    weight_bytes,
)

GUIDE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
LARGE = ROOT / "k8s" / "components" / "large-model"
LARGEST = "Llama 3.1 70B"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5 7B", 7.62),
        ("Mistral 7B v0.3", 7.25),
        ("Llama 3.1 8B", 8.03),
        ("Qwen2.5 32B", 32.76),
        ("Llama 3.1 70B", 70.55),
    ],
)
def test_a_shape_has_as_many_weights_as_the_published_model(name: str, billions: float) -> None:
    assert weight_bytes(name) / 2 / 1e9 == pytest.approx(billions, abs=0.005)


def test_kv_of_a_token_is_keys_and_values_of_all_layers() -> None:
    assert kv_bytes_per_token("Llama 3.1 8B") == 2 * 32 * 8 * 128 * 2 == 128 * 1024


def test_the_guide_and_the_component_say_that_70b_fits_neither_card() -> None:
    assert [pool_of(LARGEST, gpu, swap=False) for gpu in GPUS.values()] == [None, None]
    [row] = [line for line in sizes().splitlines() if LARGEST in line]
    assert row.count(NONE) == len(GPUS)
    assert "70B in 16 bit fits no card of 80 or 141 GB" in GUIDE
    comment = " ".join((LARGE / "kustomization.yaml").read_text(encoding="utf-8").replace("\n#", "").split())
    assert "70B in 16 bit (131 GiB) fits no card of 80 or 141 GB" in comment


def test_rows_are_no_more_than_the_settings_allow_and_at_least_one_everywhere_on_the_larger_card() -> None:
    for name in MODELS:
        if name != LARGEST:
            found = pool_of(name, "h200", swap=True)
            assert found is not None
            assert 1 <= rows_of(name, found, 32768) <= rows_of(name, found, 8192) <= rows_of(name, found, 1)
            assert rows_of(name, found, 1) == settings().max_rows


def test_the_components_memory_is_enough_for_the_weights_that_it_names() -> None:
    memory = re.search(r"limits/memory, value: (\d+)Gi", (LARGE / "service.patch.yaml").read_text(encoding="utf-8"))
    assert memory is not None
    assert pod_gib(110 * GIB) <= int(memory[1])
    assert pod_gib(weight_bytes("Qwen2.5 32B")) > 64

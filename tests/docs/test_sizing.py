"""The sizing table in docs/kubernetes.md: shapes are the published models', and the text says what the table says."""

from __future__ import annotations

import re

import pytest

from tests.docs.documents import ROOT
from tide_core.config import GIB
from tools.reference.sizing import GPUS, NONE, SHAPES, Shape, pool_of, rows_of, settings, sizes

pytestmark = pytest.mark.unit

GUIDE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
LARGE = ROOT / "k8s" / "components" / "large-model"
BY_NAME = {shape.name: shape for shape in SHAPES}


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
    assert BY_NAME[name].num_weights / 1e9 == pytest.approx(billions, abs=0.005)


def test_kv_of_a_token_is_keys_and_values_of_all_layers() -> None:
    assert BY_NAME["Llama 3.1 8B"].kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 128 * 1024


def test_the_guide_and_the_component_say_that_70b_fits_neither_card() -> None:
    shape, config = BY_NAME["Llama 3.1 70B"], settings()
    assert [pool_of(shape, total, config, 1) for total in GPUS.values()] == [0, 0]
    [row] = [line for line in sizes().splitlines() if shape.name in line]
    assert row.count(NONE) == len(GPUS)
    assert "70B in 16 bit fits no card of 80 or 141 GB" in GUIDE
    comment = " ".join((LARGE / "kustomization.yaml").read_text(encoding="utf-8").replace("\n#", "").split())
    assert "70B in 16 bit (131 GiB) fits no card of 80 or 141 GB" in comment


def test_rows_are_no_more_than_the_settings_allow() -> None:
    config = settings()
    assert rows_of(BY_NAME["Qwen2.5 7B"], 10**12, 8192, config.max_rows) == config.max_rows


def test_the_others_serve_at_least_one_row_at_every_context_of_the_table_on_the_larger_card() -> None:
    config = settings()
    for shape in SHAPES[:-1]:
        assert rows_of(shape, pool_of(shape, GPUS["141 GB"], config, 2), 32768, config.max_rows) >= 1


def test_the_components_memory_is_enough_for_the_weights_that_it_names() -> None:
    memory = re.search(r"limits/memory, value: (\d+)Gi", (LARGE / "service.patch.yaml").read_text(encoding="utf-8"))
    assert memory is not None
    assert Shape("of 110 GiB", 1, 1, 0, 0, 0, 0, 55 * GIB // 2).pod_gib <= int(memory[1])
    assert BY_NAME["Qwen2.5 32B"].pod_gib > 64

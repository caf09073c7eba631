"""Generate the table of model families, with the variants that tests compare with transformers."""

from __future__ import annotations

import ast
from pathlib import Path

from tide_core.models.families import FAMILIES
from tools.reference.markdown import code, table

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- families: python tools/reference_docs.py -->", "<!-- end of the families -->"


def families() -> str:
    """The supported architectures, and the tiny models of each that tests compare with transformers."""
    attention = {
        "paged": "paged",
        "sinks": "paged, in plain Torch",
        "latent": "gathered, from the cached latent",
        "inline": "gathered, with a mask tensor",
    }
    tested = compared_variants((ROOT / "tests" / "tiny_models.py").read_text(encoding="utf-8"))
    rows = [
        (
            family.name,
            code(architecture),
            attention[family.attention],
            ", ".join(map(code, tested.get(architecture, []))),
        )
        for architecture, family in FAMILIES.items()
    ]
    return table(("family", "architecture", "attention", "variants compared with transformers"), rows)


def compared_variants(source: str) -> dict[str, list[str]]:
    """Tiny models by architecture, from `CONFIGS` in tests/tiny_models.py."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) == "CONFIGS"
            and isinstance(node.value, ast.Dict)
        ):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant)
                assert isinstance(value, ast.Tuple)
                found.setdefault(ast.literal_eval(value.elts[0]), []).append(str(key.value))
    return found

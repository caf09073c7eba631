"""Generate the references in docs/ from the code: settings, schema, metrics, families, parameters of requests, sizes.

python tools/reference_docs.py            write them
python tools/reference_docs.py --check    list outdated ones, and fail if there are any
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
COMPATIBILITY = ROOT / "docs" / "compatibility.md"
OPENAI = ROOT / "docs" / "openai.md"
KUBERNETES = ROOT / "docs" / "kubernetes.md"
COMMAND = "python tools/reference_docs.py"


def pages() -> dict[Path, str]:
    """Every generated page, as it should be."""
    from tools.reference import families, openai_parameters, sizing
    from tools.reference.configuration import configuration
    from tools.reference.markdown import between
    from tools.reference.metrics import metrics
    from tools.reference.schema import grpc

    compatibility, openai = COMPATIBILITY.read_text(encoding="utf-8"), OPENAI.read_text(encoding="utf-8")
    return {
        REFERENCE / "configuration.md": configuration(),
        REFERENCE / "grpc.md": grpc(),
        REFERENCE / "metrics.md": metrics(),
        COMPATIBILITY: between(compatibility, families.BEGIN, families.END, families.families()),
        OPENAI: between(openai, openai_parameters.BEGIN, openai_parameters.END, openai_parameters.parameters()),
        KUBERNETES: between(KUBERNETES.read_text(encoding="utf-8"), sizing.BEGIN, sizing.END, sizing.sizes()),
    }


def stale(wanted: Mapping[Path, str]) -> list[Path]:
    return [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the references in docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if one is outdated")
    check = parser.parse_args(arguments).check
    sys.path.insert(0, str(ROOT))
    wanted = pages()
    for path in stale(wanted):
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'not current; run ' + COMMAND if check else 'written'}")
        if check:
            wanted[path] = ""
    return int(check and "" in wanted.values())


if __name__ == "__main__":
    sys.exit(main())

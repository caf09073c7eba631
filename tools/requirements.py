"""Print what `make setup` installs: the project's dependencies, its extras and the build tools."""

from __future__ import annotations

import tomllib
from pathlib import Path

BUILD_TOOLS = ["cmake>=3.25", "ninja>=1.11", "clang-format>=18"]


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    lines = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *extras["test"],
        *extras["bench"],
        *extras["docs"],
        *BUILD_TOOLS,
    ]
    print("\n".join(sorted(set(lines))))


if __name__ == "__main__":
    main()

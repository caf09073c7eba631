"""The package `tide-client`: built from the same files, it works where only grpcio and protobuf are installed."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.client.scripted import PATIENCE_S, TEXT, GrpcServer

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "packages" / "tide-client"
NEEDED = ("grpcio", "protobuf", "typing_extensions")
"""What `pip install grpcio protobuf` installs."""
ONLY_HERE = {"tide_client/cli.py", "tide_client/show.py"}
"""The command, which borrows from the core."""

SCRIPT = """
import asyncio, importlib, json, pathlib, sys
sys.path[:0] = sys.argv[1:3]
from tide_client import AsyncTideClient, TideClient
for file in pathlib.Path(sys.argv[1]).rglob("*.py"):
    importlib.import_module(".".join(file.relative_to(sys.argv[1]).with_suffix("").parts).removesuffix(".__init__"))
async def stream():
    async with AsyncTideClient(sys.argv[3]) as client, client.stream("Say") as stream:
        return "".join([token.text async for token in stream])
with TideClient(sys.argv[3]) as client:
    print(json.dumps([client.generate("Say").text, asyncio.run(stream())]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(out)]
    done = subprocess.run([*command, str(PACKAGE)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with what the package needs and nothing else of this environment."""
    for name in NEEDED:
        for file in importlib.metadata.files(name) or ():
            if file.suffix in (".py", ".so", ".pem", ".pyi"):
                link = tmp_path / "site" / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.locate())
    return tmp_path / "site"


def test_it_works_with_nothing_else_installed(wheel: Path, site: Path, tmp_path: Path, server: GrpcServer) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "client")
    command = [sys.executable, "-I", "-S", "-c", SCRIPT, str(tmp_path / "client"), str(site), server.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [TEXT, TEXT]


def test_it_holds_the_modules_of_this_repository_but_for_the_command(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {
        str(file.relative_to(ROOT))
        for folder in ("tide_client", "tide")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".pyi")
    }
    assert names == ours - ONLY_HERE


def test_its_version_and_its_needs_are_those_of_the_whole() -> None:
    ours = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ours["version"] == whole["version"]
    assert set(ours["dependencies"]) <= set(whole["dependencies"])
    assert [re.match(r"[a-z]+", need)[0] for need in ours["dependencies"]] == ["grpcio", "protobuf"]  # type: ignore[index]

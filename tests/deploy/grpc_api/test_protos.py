"""Committed stubs are those of the schema, and load on both protobuf lines."""

from __future__ import annotations

import importlib.resources
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from tide.v1 import tide_pb2, tide_pb2_grpc

ROOT = Path(__file__).parents[3]
PROTO = ROOT / "protos" / "tide" / "v1" / "tide.proto"
OLDER_PROTOBUF = "6.33.6"


def test_the_stubs_are_those_of_the_schema(tmp_path: Path) -> None:
    import grpc_tools
    from grpc_tools import protoc

    out = tmp_path / "set"
    well_known = str(importlib.resources.files(grpc_tools) / "_proto")
    code = protoc.main(["", f"-I{ROOT / 'protos'}", f"-I{well_known}", f"--descriptor_set_out={out}", str(PROTO)])
    assert code == 0
    [compiled] = FileDescriptorSet.FromString(out.read_bytes()).file
    committed = FileDescriptorProto.FromString(tide_pb2.DESCRIPTOR.serialized_pb)
    for message in _all_messages(compiled):
        message.ClearField("reserved_name")
    compiled.ClearField("source_code_info")
    assert _without_json_names(compiled) == _without_json_names(committed), "run make protos and commit tide/v1"


def _all_messages(file: FileDescriptorProto) -> list:  # type: ignore[type-arg]
    found, left = [], list(file.message_type)
    while left:
        one = left.pop()
        found.append(one)
        left += one.nested_type
    return found


def _without_json_names(file: FileDescriptorProto) -> FileDescriptorProto:
    for message in _all_messages(file):
        for field in message.field:
            field.ClearField("json_name")
    return file


def test_every_method_has_a_stub() -> None:
    methods = {method.name for method in tide_pb2.DESCRIPTOR.services_by_name["TideService"].methods}
    assert methods == {"Generate", "GenerateStream", "GetModelInfo", "GetExitStats", "Abort", "Tokenize", "Detokenize"}
    assert all(hasattr(tide_pb2_grpc.TideServiceServicer, name) for name in methods)


def test_every_field_and_message_of_the_schema_is_explained() -> None:
    """A field is explained by a comment above it, or by its message having one line that documents it."""
    lines = PROTO.read_text(encoding="utf-8").splitlines()
    bare = []
    for number, line in enumerate(lines):
        if re.match(r"  rpc |  [A-Z_]+ = \d+;", line) and "UNSPECIFIED" not in line and "//" not in lines[number - 1]:
            bare.append(line.strip())
    assert bare == []


def test_the_stubs_load_on_an_older_protobuf(tmp_path: Path) -> None:
    """As images of Ray have it."""
    folder = os.environ.get("TIDE_OLD_PROTOBUF", str(tmp_path / "protobuf"))
    if not Path(folder).exists():
        install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--disable-pip-version-check"]
        done = subprocess.run(
            [*install, "--target", folder, f"protobuf=={OLDER_PROTOBUF}"], capture_output=True, text=True, timeout=300
        )
        if done.returncode != 0:
            pytest.skip(f"protobuf {OLDER_PROTOBUF} cannot be installed here: {done.stderr.strip()[-200:]}")
    script = "import google.protobuf as p, tide.v1.tide_pb2 as m; print(p.__version__, m.Token(id=3, exit_layer=2).id)"
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [OLDER_PROTOBUF, "3"], done.stderr

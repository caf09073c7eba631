"""Artefacts: the calibrated exits of one model, as a folder on disk.

    manifest.json        what it is, for which model, thresholds, and the SHA-256 of every other file
    heads.safetensors    checkpoint.<layer>.head.<name> and checkpoint.<layer>.router.<name> in float16,
                         fast.<layer>.head.<name>, fast.<layer>.router.<name> and fast.<layer>.skip.<name> as well,
                         shortlist in int32
    report.md, *.png     for people; listed and checked like the rest, but no part of the digest

Loading reads each file once: the bytes that were hashed are the bytes that are used, and only after everything in
them was found to be as the manifest says. Nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from tide_core.errors import ArtefactError
from tide_core.exits.artefact import folder as files
from tide_core.exits.artefact import strict_json
from tide_core.exits.artefact.contract import FastContract
from tide_core.exits.artefact.fast import FastModules
from tide_core.exits.artefact.heads import ExitHead
from tide_core.exits.artefact.manifest import (
    FORMAT,
    FORMAT_VERSION,
    HEADS_FILE,
    MANIFEST_FILE,
    MAX_FILE_BYTES,
    MAX_MANIFEST_BYTES,
    Checkpoint,
    DataSummary,
    FastPoint,
    FileEntry,
    Manifest,
)
from tide_core.exits.artefact.match import check_identity
from tide_core.exits.artefact.router import Router
from tide_core.identity import ModelIdentity

logger = logging.getLogger("tide")

__all__ = [
    "HEADS_FILE",
    "MANIFEST_FILE",
    "Artefact",
    "Checkpoint",
    "DataSummary",
    "FastPoint",
    "FileEntry",
    "Manifest",
    "install_artefact",
    "load_artefact",
    "replace_reports",
    "save_artefact",
]

SHORTLIST = "shortlist"


@dataclass(frozen=True, slots=True)
class Artefact:
    """A checked artefact; heads and routers in the order of the manifest's checkpoints, in float32, frozen."""

    manifest: Manifest
    heads: list[ExitHead]
    routers: list[Router]
    shortlist: Tensor
    """Token ids, int64 [S], rising."""
    digest: str
    """SHA-256 over all that manifest.json says but of reports: it stands for everything that is served."""
    path: Path
    fast: FastModules | None = None
    """Of the manifest's fast exits."""


def load_artefact(folder: str | Path, identity: ModelIdentity | None) -> Artefact:
    """Read and check the artefact in `folder`; with the identity of a model, also that it was made for that model."""
    path = Path(folder)
    manifest, raw, digest = _read(path, identity)
    try:
        tensors = safetensors.torch.load(raw)
    except Exception as error:  # of several kinds, by what is wrong in the bytes
        raise ArtefactError(f"file {HEADS_FILE}", f"{type(error).__name__}: {error}", "safetensors") from error
    shortlist = _take_shortlist(tensors, manifest)
    modules, fast = _build(manifest, tensors)
    heads, routers = [pair[0] for pair in modules], [pair[1] for pair in modules]
    return Artefact(manifest, heads, routers, shortlist, digest, path.absolute(), fast)


def save_artefact(
    folder: str | Path,
    manifest: Manifest,
    heads: Sequence[ExitHead],
    routers: Sequence[Router],
    shortlist: Tensor,
    reports: Mapping[str, bytes] | None = None,
    fast: FastModules | None = None,
) -> str:
    """Write an artefact and return its digest. It appears under its name as a whole, in place of one that was there.

    The `files` of the manifest are filled in. What was written is loaded once before it gets its name."""
    path = Path(folder).absolute().resolve()
    _check_replaceable(path)
    tensors = _tensors(manifest, heads, routers, fast)
    tensors[SHORTLIST] = shortlist.detach().to("cpu", torch.int32).contiguous()
    return _write(path, manifest, safetensors.torch.save(tensors), reports or {})


def replace_reports(folder: str | Path, reports: Mapping[str, bytes], contracts: tuple[FastContract, ...] = ()) -> str:
    """Give the artefact in `folder` these reports in place of its own, as a whole or not at all.

    What is served stays, and so does the digest, which is returned; but contracts of mode fast, if there are any, are
    added, and change the digest."""
    path = Path(folder).absolute().resolve()
    manifest, heads, _ = _read(path, None)
    if contracts:
        if manifest.fast is None:
            raise ArtefactError("fast.contracts", contracts, "none: the artefact has no fast exits")
        manifest = dataclasses.replace(manifest, fast=dataclasses.replace(manifest.fast, contracts=contracts))
    return _write(path, manifest, heads, reports)


def install_artefact(source: str | Path, target: str | Path) -> None:
    """Copy a sound artefact; it appears under its new name as a whole, in place of one that was there."""
    path = Path(target).absolute().resolve()
    _check_replaceable(path)
    with files.opened(Path(source)) as descriptor:
        manifest = _read_manifest(files.read_bytes(descriptor, MANIFEST_FILE, max_bytes=MAX_MANIFEST_BYTES))
        with files.replacing(path) as temporary:
            for name in (*manifest.files, MANIFEST_FILE):
                files.write(temporary / name, files.read_bytes(descriptor, name, max_bytes=MAX_FILE_BYTES))
            load_artefact(temporary, None)


def _read(path: Path, identity: ModelIdentity | None) -> tuple[Manifest, bytes, str]:
    """The manifest, the bytes of the tensors and the digest; every file is as the manifest lists it."""
    with files.opened(path) as descriptor:
        if MANIFEST_FILE not in files.names(descriptor):
            raise ArtefactError("artefact", path, f"a folder with {MANIFEST_FILE} in it")
        raw = files.read_bytes(descriptor, MANIFEST_FILE, max_bytes=MAX_MANIFEST_BYTES)
        manifest = _read_manifest(raw)
        if identity is not None:
            check_identity(manifest.model, identity)
        return manifest, _read_files(descriptor, manifest), _digest(raw)


def _write(path: Path, manifest: Manifest, heads: bytes, reports: Mapping[str, bytes]) -> str:
    if set(reports) & {HEADS_FILE, MANIFEST_FILE}:
        raise ArtefactError("reports", sorted(reports), f"names other than {HEADS_FILE} and {MANIFEST_FILE}")
    contents = {HEADS_FILE: heads, **reports}
    entries = {name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in contents.items()}
    complete = dataclasses.replace(manifest, files=entries)
    try:
        text = json.dumps({"format": FORMAT, **strict_json.plain(complete)}, indent=2, allow_nan=False)
    except TypeError as error:
        raise ArtefactError("manifest", str(error), "plain numbers and texts") from error
    contents[MANIFEST_FILE] = text.encode() + b"\n"
    with files.replacing(path) as temporary:
        for name, data in contents.items():
            files.write(temporary / name, data)
        return load_artefact(temporary, None).digest


def _digest(raw: bytes) -> str:
    """Over a manifest that was found to be sound, numbers as they are spelt there, without its reports."""
    values = json.loads(raw, parse_float=str)
    values["files"] = {HEADS_FILE: values["files"][HEADS_FILE]}
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _read_manifest(raw: bytes) -> Manifest:
    values = strict_json.parse(raw, MANIFEST_FILE)
    if values.pop("format", None) != FORMAT:
        raise ArtefactError(MANIFEST_FILE, "another format", f"the key format with the value {FORMAT}")
    version = values.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, (bool, float)):
        expected = f"{FORMAT_VERSION}, the one this version of TIDE Serve reads"
        raise ArtefactError("manifest.format_version", version, expected)
    checkpoints = values.get("checkpoints")
    old = [each for each in checkpoints if isinstance(each, dict)] if isinstance(checkpoints, list) else []
    if any([each.pop("thresholds", None) for each in old]):
        logger.info("the artefact has thresholds of mode bounded, which needs none any more: they are ignored")
    return strict_json.read(Manifest, values, "manifest")


def _read_files(folder: int, manifest: Manifest) -> bytes:
    """Check every file against the manifest; the bytes of the one that holds the tensors."""
    if HEADS_FILE not in manifest.files:
        raise ArtefactError("manifest.files", sorted(manifest.files), f"{HEADS_FILE} among them")
    for name in files.names(folder):
        if name not in (MANIFEST_FILE, *manifest.files):
            raise ArtefactError(f"file {name}", "a file", f"only the files that {MANIFEST_FILE} lists")
    data = b""
    for name, entry in manifest.files.items():
        if name == HEADS_FILE:
            data = files.read_bytes(folder, name, max_bytes=MAX_FILE_BYTES)
            found = FileEntry(hashlib.sha256(data).hexdigest(), len(data))
        else:
            found = files.describe(folder, name)
        if found.size != entry.size:
            raise ArtefactError(f"file {name}", f"{found.size} bytes", f"{entry.size}, as {MANIFEST_FILE} lists it")
        if found.sha256 != entry.sha256:
            expected = f"{entry.sha256}, as {MANIFEST_FILE} lists it"
            raise ArtefactError(f"file {name}", f"SHA-256 {found.sha256}", expected)
    return data


def _take_shortlist(tensors: dict[str, Tensor], manifest: Manifest) -> Tensor:
    ids = tensors.pop(SHORTLIST, None)
    if ids is None:
        raise ArtefactError(f"tensor {SHORTLIST}", "nothing", f"a tensor of this name in {HEADS_FILE}")
    _check_tensor(SHORTLIST, ids, torch.int32, (manifest.shortlist_size,))
    if int(ids[0]) < 0 or int(ids[-1]) >= manifest.model.vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        expected = f"rising token ids, none twice, all below the vocabulary's {manifest.model.vocab_size}"
        raise ArtefactError(f"tensor {SHORTLIST}", f"{ids.numel()} ids that are not", expected)
    return ids.long()


def _build(
    manifest: Manifest, tensors: Mapping[str, Tensor]
) -> tuple[list[tuple[ExitHead, Router]], FastModules | None]:
    """Modules that hold the tensors, in float32. All are checked before the first is used."""
    with torch.device("meta"):
        pairs = [(ExitHead(c.head), Router(c.head.width, c.router_bottleneck)) for c in manifest.checkpoints]
        fast = _untrained_fast(manifest)
    named = _named(manifest, [pair[0] for pair in pairs], [pair[1] for pair in pairs], fast)
    wanted = {
        f"{prefix}.{name}": value.shape
        for prefix, module in named.items()
        for name, value in module.state_dict().items()
    }
    for name in sorted(set(wanted) ^ set(tensors)):
        came, expected = ("nothing", "a tensor of this name") if name in wanted else ("a tensor", "none of this name")
        raise ArtefactError(f"tensor {name}", came, f"{expected} in {HEADS_FILE}")
    for name, shape in wanted.items():
        _check_tensor(name, tensors[name], torch.float16, tuple(shape))
        if not bool(tensors[name].isfinite().all()):
            raise ArtefactError(f"tensor {name}", "NaN or infinity", "finite weights")
    for prefix, module in named.items():
        state = {name: tensors[f"{prefix}.{name}"].float() for name in module.state_dict()}
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False).eval()
    return pairs, fast


def _untrained_fast(manifest: Manifest) -> FastModules | None:
    if manifest.fast is None:
        return None
    model = manifest.model
    return FastModules.untrained(manifest.fast, manifest.checkpoints[0].layer, model.num_layers, model.width)


def _named(
    manifest: Manifest, heads: Sequence[ExitHead], routers: Sequence[Router], fast: FastModules | None
) -> dict[str, nn.Module]:
    """All modules by the first part of the names of their tensors."""
    named: dict[str, nn.Module] = {}
    for checkpoint, head, router in zip(manifest.checkpoints, heads, routers, strict=True):
        prefix = f"checkpoint.{checkpoint.layer}"
        named |= {f"{prefix}.head": head, f"{prefix}.router": router}
    if manifest.fast is not None and fast is not None:
        named |= fast.named(manifest.fast, manifest.checkpoints[0].layer)
    return named


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        came = f"{_dtype(tensor.dtype)} of shape {list(tensor.shape)}"
        raise ArtefactError(f"tensor {name}", came, f"{_dtype(dtype)} of shape {list(shape)}")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(
    manifest: Manifest, heads: Sequence[ExitHead], routers: Sequence[Router], fast: FastModules | None
) -> dict[str, Tensor]:
    """All weights as they are stored."""
    counts = len(heads), len(routers)
    if counts != (len(manifest.checkpoints),) * 2:
        raise ArtefactError("heads, routers", counts, f"{len(manifest.checkpoints)} of each, one per checkpoint")
    if (manifest.fast is None) != (fast is None):
        raise ArtefactError("fast", "modules" if fast else "no modules", "modules exactly where the manifest has exits")
    for checkpoint, head in zip(manifest.checkpoints, heads, strict=True):
        if head.spec != checkpoint.head:
            raise ArtefactError(f"head at layer {checkpoint.layer}", head.spec, f"the spec {checkpoint.head}")
    tensors = {}
    for prefix, module in _named(manifest, heads, routers, fast).items():
        for name, value in module.state_dict().items():
            stored = value.detach().to("cpu", torch.float16).contiguous()
            if not bool(stored.isfinite().all()):
                raise ArtefactError(f"tensor {prefix}.{name}", "others", "finite weights within the range of float16")
            tensors[f"{prefix}.{name}"] = stored
    return tensors


def _check_replaceable(path: Path) -> None:
    """Only nothing, an empty folder or an artefact is replaced: never a folder with something else in it."""
    expected = "a name that is free, an empty folder, or an artefact, which is then replaced"
    if not path.name or (path.exists() and not path.is_dir()):
        raise ArtefactError("artefact", path, expected)
    if not path.exists():
        return
    with files.opened(path) as descriptor:
        names = files.names(descriptor)
        try:
            values = strict_json.parse(files.read_bytes(descriptor, MANIFEST_FILE, max_bytes=MAX_MANIFEST_BYTES), "")
        except ArtefactError:
            values = {}
    listed = values.get("files") if values.get("format") == FORMAT else None
    others = set(names) - {MANIFEST_FILE, *listed} if isinstance(listed, dict) else set(names)
    if others:
        raise ArtefactError("artefact", path, f"{expected}; {min(others)} in it belongs to none")

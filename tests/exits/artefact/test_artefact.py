"""Artefacts on disk: what is saved comes back, and anything else is refused by name before a weight is used."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.exits.artefact.artefact_factory import (
    make_artefact,
    make_head,
    make_manifest,
    make_router,
    make_shortlist,
    make_spec,
)
from tests.factories import tiny_tokenizer
from tests.tiny_models import tiny_model
from tide_core.errors import ArtefactError
from tide_core.exits.artefact import folder as files
from tide_core.exits.artefact.artefact import (
    Checkpoint,
    FastPoint,
    FileEntry,
    load_artefact,
    replace_reports,
    save_artefact,
)
from tide_core.exits.artefact.strict_json import plain, read
from tide_core.identity import ModelIdentity
from tide_core.models.identity import identify

Values = dict[str, Any]
HEADS, MANIFEST = "heads.safetensors", "manifest.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of the simplest heads: small enough to break in many places."""
    folder = tmp_path_factory.mktemp("artefact") / "a"
    return make_artefact(folder, kind="affine", layers=(1, 3), reports={"report.md": b"# Report\n"})


@pytest.fixture
def artefact(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "a"))


def identity(family: str = "llama") -> ModelIdentity:
    return identify(tiny_model(family), tiny_tokenizer(), None)


def refused(folder: Path, *named: str, model: ModelIdentity | None = None) -> ArtefactError:
    with pytest.raises(ArtefactError) as caught:
        load_artefact(folder, model)
    message = str(caught.value)
    assert "\n" not in message
    for part in named:
        assert part in message, message
    return caught.value


def edit_manifest(folder: Path, change: Callable[[Values], object]) -> None:
    values = json.loads((folder / MANIFEST).read_text())
    change(values)
    (folder / MANIFEST).write_text(json.dumps(values))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other tensors, with a manifest that vouches for them."""
    tensors = safetensors.torch.load_file(folder / HEADS)
    change(tensors)
    vouch_for(folder, HEADS, safetensors.torch.save(tensors))


def vouch_for(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    edit_manifest(folder, lambda values: values["files"].update({name: entry}))


# --- what is saved comes back ---


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kind", ["identity", "affine", "mlp", "block"])
def test_heads_routers_shortlist_and_manifest_come_back_as_they_were_stored(
    kind: str, deep: bool, tmp_path: Path
) -> None:
    spec = make_spec(kind, deep=deep, inner=24 if kind == "block" and deep else 0)
    heads, routers = [make_head(spec, seed=1), make_head(spec, seed=2)], [make_router(seed=1), make_router(seed=2)]
    manifest = make_manifest(identity(), {1: spec, 2: spec})
    digest = save_artefact(tmp_path / "a", manifest, heads, routers, make_shortlist(), {"curve.png": b"\x89PNG"})
    loaded = load_artefact(tmp_path / "a", identity())
    assert loaded.digest == digest
    assert replace(loaded.manifest, files={}) == manifest
    assert set(loaded.manifest.files) == {HEADS, "curve.png"}
    assert torch.equal(loaded.shortlist, make_shortlist())
    assert loaded.shortlist.dtype == torch.int64
    for before, after in zip([*heads, *routers], [*loaded.heads, *loaded.routers], strict=True):
        assert list(before.state_dict()) == list(after.state_dict())
        for name, weight in before.state_dict().items():
            assert torch.equal(after.state_dict()[name], weight.half().float()), name
        assert not after.training
        assert not any(weight.requires_grad for weight in after.parameters())


def test_artefacts_from_before_narrow_heads_load_and_have_the_same_bytes_today(tmp_path: Path) -> None:
    folder = make_artefact(tmp_path / "a", kind="block", taps=(2,))
    keys = json.loads((folder / MANIFEST).read_text())["checkpoints"][0]["head"]
    assert "inner" not in keys, "as older versions wrote it, and as they can read it"
    assert load_artefact(folder, identity()).heads[0].spec.inner == 0
    narrow = make_artefact(tmp_path / "b", kind="block", taps=(2,), sizes=(("inner", 24),))
    assert json.loads((narrow / MANIFEST).read_text())["checkpoints"][0]["head"]["inner"] == 24
    sizes = [(each / HEADS).stat().st_size for each in (folder, narrow)]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (64, ("head.inner", "64", "at most the model's 48")),
        (-1, ("head.inner", "-1")),
        (True, ("checkpoints[0].head.inner", "an integer")),
        (12, ("tensor checkpoint.1.head", "[24", "[12")),  # others than the tensors have
        (0, ("tensor checkpoint.1.head",)),
    ],
    ids=str,
)
def test_an_inner_width_that_cannot_be_is_refused_by_its_place(
    value: object, named: tuple[str, ...], tmp_path: Path
) -> None:
    folder = make_artefact(tmp_path / "a", kind="block", sizes=(("inner", 24),))
    edit_manifest(folder, lambda values: values["checkpoints"][0]["head"].update({"inner": value}))
    refused(folder, *named)


def test_the_same_artefact_has_the_same_bytes_and_another_one_another_digest(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_artefact(tmp_path / name, seed=seed)
    digests = [load_artefact(tmp_path / name, None).digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_tensors_are_stored_in_half_precision_under_the_name_of_their_layer(original: Path) -> None:
    tensors = safetensors.torch.load_file(original / HEADS)
    assert tensors.pop("shortlist").dtype == torch.int32
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert {".".join(name.split(".")[:3]) for name in tensors} == {
        f"checkpoint.{layer}.{part}" for layer in (1, 3) for part in ("head", "router")
    }


def test_a_loaded_head_does_not_share_memory_with_the_file(artefact: Path) -> None:
    loaded = load_artefact(artefact, None)
    before = loaded.heads[0].mix.weight.clone()
    (artefact / HEADS).write_bytes(b"\xff" * (artefact / HEADS).stat().st_size)
    assert torch.equal(loaded.heads[0].mix.weight, before)


def test_an_artefact_is_found_through_a_link_to_its_folder(artefact: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(artefact)
    assert load_artefact(tmp_path / "current", None).digest == load_artefact(str(artefact), None).digest


# --- another model ---

OTHER_MODELS: dict[str, tuple[Values, str]] = {
    "architecture": ({"architecture": "GPT2LMHeadModel"}, "GPT2LMHeadModel"),
    "num_layers": ({"num_layers": 30}, "30"),
    "width": ({"width": 576}, "576"),
    "vocab_size": ({"vocab_size": 49152}, "49152"),
    "config_sha256": ({"config_sha256": "c" * 64}, "c" * 64),
    "tokenizer_sha256": ({"tokenizer_sha256": "e" * 64}, "e" * 64),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_an_artefact_of_another_model_is_refused_with_both_sides_named(name: str, original: Path) -> None:
    change, shown = OTHER_MODELS[name]
    made_for = str(getattr(identity(), name))
    refused(original, f"model.{name}", made_for, shown, "the model LlamaFor", model=replace(identity(), **change))


@pytest.mark.parametrize("family", ["llama_tied", "qwen2", "gpt2"])
def test_artefacts_of_other_tiny_models_are_refused(family: str, original: Path) -> None:
    refused(original, "artefact's model.", model=identity(family))


def test_the_display_name_of_a_model_does_not_matter(original: Path) -> None:
    assert load_artefact(original, replace(identity(), name="renamed"))


@pytest.mark.parametrize("name", ["revision", "weights_sha256"])
def test_revision_and_weights_count_where_both_sides_know_them(name: str, tmp_path: Path) -> None:
    spec, known = make_spec("affine"), replace(identity(), **{name: "a" * 64})
    save_artefact(tmp_path / "a", make_manifest(known, {1: spec}), [make_head(spec)], [make_router()], make_shortlist())
    assert load_artefact(tmp_path / "a", known)
    assert load_artefact(tmp_path / "a", identity())
    other = replace(identity(), **{name: "b" * 64})
    refused(tmp_path / "a", f"model.{name}", "a" * 64, "b" * 64, model=other)


def test_sampled_weights_decide_where_a_digest_is_not_known(original: Path) -> None:
    known = identity()
    name, values = next(iter(known.weights_sample.items()))

    def sampled(scale: float, dtype: str) -> ModelIdentity:
        sample = {**known.weights_sample, name: (*values[:-1], values[-1] * scale)}
        return replace(known, weights_sample=sample, dtype=dtype, weights_sha256="a" * 64)

    assert load_artefact(original, sampled(1.0, "float32"))
    for scale, dtype in ((1.003, "bfloat16"), (1.0004, "float16")):
        assert load_artefact(original, sampled(scale, dtype))
    for scale, dtype in ((1.0000001, "float32"), (1.03, "bfloat16"), (1.005, "float16"), (float("nan"), "bfloat16")):
        sides = repr(values[-1]), repr(values[-1] * scale)
        refused(original, f"weights_sample[{name!r}][7]", *sides, model=sampled(scale, dtype))
    fewer = {**known.weights_sample, name: values[:-1]}
    refused(original, "8", "7", model=replace(known, weights_sample=fewer))
    refused(original, "weights_sample", "one side", model=replace(known, weights_sample={"other": (1.0,)}))
    refused(original, "weights_sample", model=replace(known, weights_sample={}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_loaded_in_a_coarser_dtype_is_still_the_same_model(dtype: torch.dtype, original: Path) -> None:
    coarse = identify(copy.deepcopy(tiny_model("llama")).to(dtype), tiny_tokenizer(), None)
    assert load_artefact(original, coarse)


def test_a_wrong_model_is_refused_before_the_weights_are_read(artefact: Path) -> None:
    (artefact / HEADS).write_bytes(b"broken")
    refused(artefact, "model.width", model=replace(identity(), width=576))


# --- bytes that are not those that were written ---


def test_a_flipped_bit_anywhere_is_refused(artefact: Path) -> None:
    digest = load_artefact(artefact, None).digest
    for path in sorted(artefact.iterdir()):
        whole = path.read_bytes()
        for at in range(0, len(whole), 97):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            try:
                loaded = load_artefact(artefact, None)
            except ArtefactError:
                continue
            # A flip inside the manifest can be another valid manifest: then it is another artefact, and says so.
            assert path.name == MANIFEST, (path.name, at)
            assert loaded.digest != digest
        path.write_bytes(whole)


@pytest.mark.parametrize("name", [HEADS, MANIFEST, "report.md"])
def test_a_file_cut_short_or_longer_is_refused(name: str, artefact: Path) -> None:
    whole = (artefact / name).read_bytes()
    for keep in {0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 2} & set(range(len(whole) - 1)):
        (artefact / name).write_bytes(whole[:keep])
        refused(artefact, name)
    (artefact / name).write_bytes(whole + b"x")
    refused(artefact, name)


def test_a_digest_of_another_file_is_refused_with_both_digests(artefact: Path) -> None:
    whole = (artefact / HEADS).read_bytes()
    (artefact / HEADS).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    listed = json.loads((artefact / MANIFEST).read_text())["files"][HEADS]["sha256"]
    refused(artefact, HEADS, listed, hashlib.sha256((artefact / HEADS).read_bytes()).hexdigest()[:32])


@pytest.mark.parametrize("data", [b"", b"{}", b"x" * 500, (2**40).to_bytes(8, "little") + b"{}", pickle.dumps([1])])
def test_heads_that_are_no_safetensors_are_refused_even_if_the_manifest_vouches_for_them(
    data: bytes, artefact: Path
) -> None:
    vouch_for(artefact, HEADS, data)
    refused(artefact, HEADS, "safetensors")


# --- the folder ---


def test_an_extra_and_a_missing_file_are_named(artefact: Path) -> None:
    (artefact / "extra.bin").write_bytes(b"")
    refused(artefact, "extra.bin", "lists")
    (artefact / "extra.bin").unlink()
    (artefact / "sub").mkdir()
    refused(artefact, "sub", "lists")
    (artefact / "sub").rmdir()
    (artefact / "report.md").unlink()
    refused(artefact, "report.md", "nothing")
    (artefact / MANIFEST).unlink()
    refused(artefact, str(artefact)[:20], MANIFEST)


@pytest.fixture(params=[HEADS, MANIFEST, "report.md"])
def replaced(request: pytest.FixtureRequest, artefact: Path) -> Path:
    """A file of the artefact, moved out of the way."""
    (artefact / request.param).rename(artefact.parent / "moved")
    return artefact / str(request.param)


def test_a_symbolic_link_is_refused_even_to_the_right_bytes(replaced: Path) -> None:
    replaced.symlink_to(replaced.parent.parent / "moved")
    refused(replaced.parent, replaced.name, "a symbolic link")


@pytest.mark.timeout(60)
def test_a_pipe_is_refused_without_waiting_for_it(replaced: Path) -> None:
    """Nobody writes to it: whoever waits for it waits for ever."""
    os.mkfifo(replaced)
    refused(replaced.parent, replaced.name, "a pipe")


def test_a_socket_and_a_folder_in_place_of_a_file_are_refused(replaced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(replaced.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(replaced.name)
        refused(replaced.parent, replaced.name, "socket")
    replaced.unlink()
    replaced.mkdir()
    refused(replaced.parent, replaced.name, "a folder")


def test_a_pickle_is_never_read_and_says_that_a_folder_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "router.pt").write_bytes(pickle.dumps({"router": 1}))
    refused(tmp_path / "router.pt", "an artefact folder", "this path is no folder")


@pytest.mark.parametrize("name", ["heads.safetensors", "nothing", "na\0me", "x" * 300])
def test_what_is_no_folder_says_that_one_is_wanted(name: str, artefact: Path) -> None:
    refused(artefact / name, "folder")


# --- the manifest ---


def test_a_future_format_says_which_version_is_read_whatever_else_is_new_in_it(artefact: Path) -> None:
    edit_manifest(artefact, lambda values: values.update(format_version=2, novelty=[]))
    refused(artefact, "manifest.format_version", "got 2", "1, the one this version")


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, [1]])
def test_a_version_of_another_kind_is_refused(version: object, artefact: Path) -> None:
    edit_manifest(artefact, lambda values: values.update(format_version=version))
    refused(artefact, "format_version")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "manifest.json"),
        ("[]", "a JSON object"),
        ("{}", "format"),
        ('{"format": "other"}', "format"),
        ('{"format": "tide-artefact"', "manifest.json"),
        ('{"format": "tide-artefact", "format": "tide-artefact"}', "comes twice"),
        ('{"format": "tide-artefact", "x": {"y": 1, "y": 1}}', "comes twice"),
        ('{"format": NaN}', "NaN"),
        ("[" * 100_000, "manifest.json"),
        ('{"format": ' + "9" * 5000 + "}", "manifest.json"),
        ("\ufffe", "manifest.json"),
    ],
)
def test_a_manifest_that_is_no_plain_json_object_of_ours_is_refused(text: str, named: str, artefact: Path) -> None:
    (artefact / MANIFEST).write_bytes(text.encode("utf-16" if text == "\ufffe" else "utf-8"))
    refused(artefact, named)


def test_a_huge_manifest_is_refused_before_it_is_parsed(artefact: Path) -> None:
    with (artefact / MANIFEST).open("r+b") as stream:
        stream.truncate(5 * 2**20)
    refused(artefact, MANIFEST, "5242880", "4194304")


def test_every_key_of_the_manifest_is_needed_and_no_other_is_known(artefact: Path) -> None:
    whole = (artefact / MANIFEST).read_text()

    def objects(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        if isinstance(values, dict):
            yield path
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            if isinstance(value, (dict, list)):
                yield from objects(value, (*path, key))

    def at(values: Any, path: tuple[Any, ...]) -> Any:
        for key in path:
            values = values[key]
        return values

    checked = 0
    for path in objects(json.loads(whole)):
        free = path in (("files",), ("model", "weights_sample"))  # keys are data there
        for key in [] if free else at(json.loads(whole), path):
            values = json.loads(whole)
            del at(values, path)[key]
            (artefact / MANIFEST).write_text(json.dumps(values))
            refused(artefact, str(key))
            checked += 1
        values = json.loads(whole)
        at(values, path)["surprise"] = 1
        (artefact / MANIFEST).write_text(json.dumps(values))
        refused(artefact, *(() if free else ("surprise",)))
    assert checked > 60


BAD_VALUES: list[tuple[tuple[Any, ...], object]] = [
    (("checkpoints", 0, "layer"), 0),
    (("checkpoints", 0, "layer"), 3),  # twice
    (("checkpoints", 0, "layer"), 1.0),
    (("checkpoints", 0, "layer"), True),
    (("checkpoints", 1, "layer"), 1),  # not rising
    (("checkpoints", 1, "layer"), 4),  # the last
    (("checkpoints", 1, "layer"), 40),
    (("checkpoints",), []),
    (("checkpoints",), {}),
    (("checkpoints", 0, "head", "width"), 32),
    (("checkpoints", 0, "head", "kind"), "linear"),
    (("checkpoints", 0, "head", "deep"), 1),
    (("checkpoints", 0, "head", "norm_eps"), "1e-5"),
    (("checkpoints", 0, "head", "taps"), [2]),  # not behind the last checkpoint
    (("checkpoints", 0, "head", "taps"), [4]),  # the last layer
    (("checkpoints", 0, "head", "taps"), "3"),
    (("checkpoints", 0, "head"), None),
    (("checkpoints", 0, "router_bottleneck"), 0),
    (("checkpoints", 0, "router_bottleneck"), 8),
    (("checkpoints", 0, "acceptance"), [0.5]),
    (("checkpoints", 0, "acceptance", 0), 1.1),
    (("checkpoints", 0, "acceptance", 0), None),
    (("checkpoints", 0, "draft_threshold"), -0.1),
    (("checkpoints", 0, "draft_threshold"), "0.5"),
    (("checkpoints", 0, "fast", "disagreement"), -1),
    (("checkpoints", 0, "fast"), []),
    (("max_drafts",), 0),
    (("max_drafts",), 7),  # more than acceptance was measured for
    (("max_drafts",), 65),
    (("shortlist_size",), 1),
    (("shortlist_size",), 385),
    (("shortlist_size",), 95),
    (("shortlist_coverage",), 2),
    (("norm",), "none"),
    (("tool_version",), ""),
    (("data", "kind"), "a\x1b[31m"),
    (("data", "digest"), "abc"),
    (("data", "num_train_tokens"), -1),
    (("model", "name"), ""),
    (("model", "num_layers"), 3),
    (("model", "vocab_size"), 100),
    (("model", "config_sha256"), "A" * 64),
    (("model", "revision"), 3),
    (("model", "weights_sha256"), ""),
    (("model", "weights_sample"), {}),
    (("model", "weights_sample"), {"a": ["x"]}),
    (("files", HEADS, "size"), 1),
    (("files", HEADS, "size"), 5 * 2**30),
    (("files", HEADS, "sha256"), "0" * 64),
    (("files", HEADS), 3),
    (("files",), {}),
    (("files", "../manifest.json"), {"sha256": "0" * 64, "size": 1}),
    (("files", ".hidden"), {"sha256": "0" * 64, "size": 1}),
    (("files", MANIFEST), {"sha256": "0" * 64, "size": 1}),
    (("files", "nothing.md"), {"sha256": "0" * 64, "size": 1}),
]


@pytest.mark.parametrize(("path", "value"), BAD_VALUES, ids=lambda part: str(part)[:60])
def test_a_value_that_cannot_be_is_refused_by_its_place(path: tuple[Any, ...], value: object, artefact: Path) -> None:
    def change(values: Any) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = value

    edit_manifest(artefact, change)
    error = refused(artefact)
    assert error.field.startswith(("manifest.", "file ", "tensor "))


@pytest.mark.parametrize(("index", "layer"), [(0, 0), (0, 3), (1, 1), (1, 4)])
def test_a_layer_that_is_none_the_last_twice_or_out_of_order_is_refused_as_such(
    index: int, layer: int, artefact: Path
) -> None:
    edit_manifest(artefact, lambda values: values["checkpoints"][index].update(layer=layer))
    assert ".layer" in refused(artefact, "manifest.checkpoints[").field


def test_infinite_numbers_are_refused_by_their_place(artefact: Path) -> None:
    text = (artefact / MANIFEST).read_text()
    (artefact / MANIFEST).write_text(text.replace('"draft_threshold": 0.0', '"draft_threshold": 1e999', 1))
    refused(artefact, "manifest.checkpoints[0].draft_threshold", "inf")


# --- the tensors ---

WEIGHT, SHORTLIST = "checkpoint.3.router.down.weight", "shortlist"
BAD_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "missing": (lambda t: t.pop(WEIGHT), (WEIGHT, "nothing")),
    "extra": (lambda t: t.update(surprise=torch.zeros(1).half()), ("surprise", "none of this name")),
    "of another layer": (lambda t: t.update({"checkpoint.2.head.mix.bias": torch.zeros(48).half()}), ("checkpoint.2",)),
    "dtype": (lambda t: t.update({WEIGHT: t[WEIGHT].float()}), (WEIGHT, "float32", "float16")),
    "shape": (lambda t: t.update({WEIGHT: t[WEIGHT].T.contiguous()}), (WEIGHT, "[50, 16]", "[16, 50]")),
    "nan": (lambda t: t[WEIGHT][3, 7].fill_(torch.nan), (WEIGHT, "NaN")),
    "infinity": (lambda t: t[WEIGHT][3, 7].fill_(torch.inf), (WEIGHT, "infinity")),
    "no shortlist": (lambda t: t.pop(SHORTLIST), (SHORTLIST, "nothing")),
    "shortlist not rising": (lambda t: t[SHORTLIST][4].fill_(1), (SHORTLIST, "rising")),
    "shortlist with an id twice": (lambda t: t[SHORTLIST][4].copy_(t[SHORTLIST][3]), (SHORTLIST, "twice")),
    "shortlist below 0": (lambda t: t[SHORTLIST][0].fill_(-1), (SHORTLIST, "rising")),
    "shortlist past the vocabulary": (lambda t: t[SHORTLIST][-1].fill_(384), (SHORTLIST, "384")),
    "shortlist of another type": (lambda t: t.update({SHORTLIST: t[SHORTLIST].long()}), (SHORTLIST, "int64", "int32")),
    "shortlist of another size": (lambda t: t.update({SHORTLIST: t[SHORTLIST][:-1]}), (SHORTLIST, "95", "96")),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_are_not_as_the_manifest_says_are_refused_by_name(name: str, artefact: Path) -> None:
    change, named = BAD_TENSORS[name]
    edit_tensors(artefact, change)
    refused(artefact, *named)


# --- saving ---


def save(folder: Path, **changes: Any) -> str:
    spec = make_spec("affine")
    arguments: Values = {
        "manifest": make_manifest(identity(), {1: spec}),
        "heads": [make_head(spec)],
        "routers": [make_router()],
        "shortlist": make_shortlist(),
    }
    return save_artefact(folder, **{**arguments, **changes})


BAD_SAVES: dict[str, tuple[Callable[[], Values], str]] = {
    "nan weight": (lambda: {"heads": [nan_head()]}, "checkpoint.1.head.mix.bias"),
    "weight beyond half precision": (lambda: {"heads": [make_head(make_spec("affine"), scale=1e9)]}, "float16"),
    "another head": (lambda: {"heads": [make_head(make_spec("mlp"))]}, "head at layer 1"),
    "too few heads": (lambda: {"heads": []}, "heads, routers"),
    "another router": (lambda: {"routers": [make_router(bottleneck=8)]}, "checkpoint.1.router"),
    "shortlist out of order": (lambda: {"shortlist": make_shortlist().flip(0)}, "shortlist"),
    "shortlist of another size": (lambda: {"shortlist": make_shortlist(95)}, "shortlist"),
    "report with the name of a file": (lambda: {"reports": {HEADS: b""}}, "reports"),
    "report outside": (lambda: {"reports": {"../report.md": b""}}, "../report.md"),
}


def nan_head() -> Any:
    head = make_head(make_spec("affine"))
    head.mix.bias[3] = torch.nan
    return head


@pytest.mark.parametrize("name", BAD_SAVES)
def test_what_could_not_be_loaded_is_not_saved(name: str, tmp_path: Path) -> None:
    changes, named = BAD_SAVES[name]
    with pytest.raises(ArtefactError, match=named):
        save(tmp_path / "a", **changes())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: FastPoint(0.5, 0.1, float("inf"), 10),
        lambda: Checkpoint(1, make_spec("affine"), 16, [0.5], 0.5),  # type: ignore[arg-type]
        lambda: FileEntry("0", 1),
        lambda: make_manifest(identity(), {}),
        lambda: make_manifest(identity(), {2: make_spec("affine"), 1: make_spec("affine")}),
        lambda: make_manifest(identity(), {1: make_spec("affine", 32)}),
    ],
)
def test_records_are_checked_at_birth(make: Callable[[], object]) -> None:
    with pytest.raises(ArtefactError):
        make()


def test_a_new_artefact_takes_the_place_of_the_old_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    other = [make_head(make_spec("affine"), seed=9)]
    first = save(tmp_path / "deep" / "er" / "a", reports={"old.md": b"old"}, heads=other)
    second = save(tmp_path / "deep" / "er" / "a", reports={"new.md": b"new"})
    assert load_artefact(tmp_path / "deep" / "er" / "a", None).digest == second != first
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["a"]
    assert not (tmp_path / "deep" / "er" / "a" / "old.md").exists()


def test_other_reports_leave_the_digest_and_what_is_served_and_are_checked_like_the_first(artefact: Path) -> None:
    before = load_artefact(artefact, None)

    assert replace_reports(artefact, {"report.md": b"# Timed\n", "new.png": b"\x89PNG"}) == before.digest

    after = load_artefact(artefact, None)
    assert (after.digest, replace(after.manifest, files={})) == (before.digest, replace(before.manifest, files={}))
    assert after.manifest.files[HEADS] == before.manifest.files[HEADS]
    assert {path.name for path in artefact.iterdir()} == {HEADS, MANIFEST, "report.md", "new.png"}
    assert (artefact / "report.md").read_bytes() == b"# Timed\n"
    (artefact / "report.md").write_bytes(b"# Faked\n")
    refused(artefact, "report.md")


def test_reports_of_a_broken_artefact_are_not_replaced(artefact: Path) -> None:
    (artefact / HEADS).write_bytes(b"broken")
    with pytest.raises(ArtefactError, match=HEADS):
        replace_reports(artefact, {"report.md": b"# Timed\n"})
    assert (artefact / "report.md").read_bytes() == b"# Report\n"


def test_reports_that_cannot_be_written_leave_those_that_were_there(
    artefact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_swap", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(ArtefactError, match="No space left"):
        replace_reports(artefact, {"report.md": b"# Timed\n"})
    monkeypatch.undo()
    assert (artefact / "report.md").read_bytes() == b"# Report\n"
    assert load_artefact(artefact, None)
    assert list(artefact.parent.iterdir()) == [artefact]


def test_a_file_system_that_cannot_exchange_names_is_served_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", reports={"old.md": b"old"})
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: object())
    second = save(tmp_path / "a")
    assert load_artefact(tmp_path / "a", None).digest == second
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_with_something_else_in_it_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtefactError, match=r"thesis\.txt"):
        save(tmp_path / "home")
    save(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(ArtefactError, match=r"notes\.txt"):
        save(tmp_path / "a")
    with pytest.raises(ArtefactError, match="a name that is free"):
        save(tmp_path / "home" / "thesis.txt")
    with pytest.raises(ArtefactError, match="a name that is free"):
        save(Path("/"))
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"home", "a"}


def test_an_empty_folder_and_a_broken_artefact_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save(tmp_path / "a")
    (tmp_path / "a" / HEADS).write_bytes(b"broken")
    save(tmp_path / "a")
    assert load_artefact(tmp_path / "a", None).digest == save(tmp_path / "b")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("place", ["write", "fsync", "rename", "renameat2"])
@pytest.mark.parametrize("call", [0, 1, 2, 3])
def test_a_save_that_stops_anywhere_leaves_the_old_artefact_or_the_new_one(
    place: str, call: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(tmp_path / "a", reports={"old.md": b"old"}, heads=[make_head(make_spec("affine"), seed=9)])
    new = save(tmp_path / "b")
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise error
            return real(*args, **kwargs)

        return run

    if place == "write":
        monkeypatch.setattr(files, "write", failing(files.write))
    elif place == "renameat2":
        monkeypatch.setattr(files, "_swap", failing(files._swap))
    else:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: object())
        monkeypatch.setattr(files.os, place, failing(getattr(os, place)))
    message = ""
    try:
        save(tmp_path / "a")
    except (ArtefactError, KeyboardInterrupt) as caught:
        message = str(caught) or "interrupted"
    monkeypatch.undo()
    assert load_artefact(tmp_path / "a", None).digest in (old, new)
    if calls <= call:
        assert load_artefact(tmp_path / "a", None).digest == new
    else:
        assert message == "interrupted" or "No space left on device" in message
    save(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def publish_and_die(source: Path, target: Path, call: int) -> int:
    """Publish the files of `source` in a process that is killed at its n-th fsync; how the process ended.

    A fork of this one, which touches no tensor."""
    contents = {path.name: path.read_bytes() for path in source.iterdir()}
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    try:
        left, sync = call, os.fsync

        def fsync(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(descriptor)

        files.os.fsync = fsync  # type: ignore[assignment]
        with files.replacing(target) as temporary:
            for name, data in contents.items():
                files.write(temporary / name, data)
    finally:
        os._exit(1)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_killed_save_leaves_a_whole_artefact_and_the_next_one_clears_up(call: int, tmp_path: Path) -> None:
    """Synced are the two files, their folder, and after the swap the folder above."""
    old, new = save(tmp_path / "a"), save(tmp_path / "b", heads=[make_head(make_spec("affine"), seed=9)])
    assert os.WTERMSIG(publish_and_die(tmp_path / "b", tmp_path / "a", call)) == signal.SIGKILL
    assert load_artefact(tmp_path / "a", None).digest == (old if call < 4 else new)
    assert len(list(tmp_path.iterdir())) == 3
    save(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_what_another_process_is_writing_is_not_cleared_away(tmp_path: Path) -> None:
    with files.replacing(tmp_path / "a") as temporary:
        save(tmp_path / "a")
        assert temporary.is_dir()


def test_a_reader_who_has_the_folder_open_is_not_handed_half_of_the_next_artefact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a")
    read_bytes = files.read_bytes

    def replaced_meanwhile(folder: int, name: str, **limits: int) -> bytes:
        data = read_bytes(folder, name, **limits)
        if name == MANIFEST:
            monkeypatch.undo()
            save(tmp_path / "a", heads=[make_head(make_spec("affine"), seed=5)])
        return data

    monkeypatch.setattr(files, "read_bytes", replaced_meanwhile)
    refused(tmp_path / "a", HEADS, "nothing")


@pytest.mark.parametrize("place", ["file", "proc"])
def test_a_place_that_cannot_be_written_is_named_with_the_reason(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match="a folder that can be written: "):
        save(tmp_path / "file" / "a" if place == "file" else Path("/proc/tide/a"))


def test_a_record_names_the_place_of_what_it_refuses() -> None:
    with pytest.raises(ArtefactError) as caught:
        read(FileEntry, {"sha256": "0" * 64, "size": "1"}, "manifest.files['x']")
    assert str(caught.value) == "manifest.files['x'].size: got '1', expected an integer"
    sample = plain(identity()) | {"weights_sample": {"w": [1, 10**400]}}
    with pytest.raises(ArtefactError, match="a finite number"):
        read(ModelIdentity, sample, "model")


def test_thresholds_that_bounded_once_needed_are_ignored_with_one_note(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An artefact as an earlier version wrote it: the demo model's has them, too."""
    path = make_artefact(tmp_path / "a", layers=(1, 2))
    new = load_artefact(path, None)
    manifest = json.loads((path / "manifest.json").read_bytes())
    for checkpoint in manifest["checkpoints"]:
        assert "thresholds" not in checkpoint, "new artefacts have none"
        risk = {"num_sequences": 200, "risk": 0.01, "coverage": 0.4}
        checkpoint["thresholds"] = [{"epsilon": 0.02, "delta": 0.05, "threshold": 0.8, **risk}]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with caplog.at_level("INFO", logger="tide"):
        old = load_artefact(path, None)
    assert [record.message for record in caplog.records if "bounded" in record.message] == [
        "the artefact has thresholds of mode bounded, which needs none any more: they are ignored"
    ]
    assert old.manifest == new.manifest
    assert old.digest != new.digest


def test_the_shipped_artefact_loads_though_an_earlier_version_wrote_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tide"):
        artefact = load_artefact(Path(__file__).parents[3] / "deploy" / "artefacts" / "demo", None)
    assert artefact.manifest.checkpoints[0].layer == 2
    assert sum("thresholds of mode bounded" in record.message for record in caplog.records) == 1

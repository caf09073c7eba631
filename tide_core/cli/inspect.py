"""`tide inspect`: what an artefact holds, and whether it belongs to a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tide_core.cli import console
from tide_core.cli.exit_codes import with_exit_code
from tide_core.cli.output import write
from tide_core.config import AUTO, EngineConfig
from tide_core.errors import ArtefactError
from tide_core.models.quick_start import quick_start

if TYPE_CHECKING:
    from tide_core.exits.artefact.artefact import Artefact
    from tide_core.exits.artefact.fast import FastExits, FastModules
    from tide_core.exits.artefact.heads import HeadSpec
    from tide_core.exits.artefact.manifest import Checkpoint


@with_exit_code
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The folder of an artefact.")],
    model: Annotated[
        str | None, typer.Option(help="Also check that it was made for this model, named as for generate.")
    ] = None,
    quantization: Annotated[
        str, typer.Option(help="With --model: as the engine has it; fp8 makes other weights of a model that is not.")
    ] = AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more to standard error.")] = False,
) -> None:
    """Check an artefact, byte by byte, and print what it holds.

    With --model the command fails if the artefact was made for another model.
    """
    console.prepare(verbose=verbose)
    from tide_core.exits.artefact.artefact import load_artefact  # torch comes with it

    artefact = load_artefact(path, None)
    refusal = None if model is None else _refusal(artefact, model, quantization, quiet=quiet)
    matches = None if model is None else refusal is None
    write(_as_json(artefact, matches) if as_json else _as_text(artefact))
    if refusal is not None:
        raise refusal
    if model is not None and not as_json:
        write(f"\nmatches the model {model}\n")


def _refusal(artefact: Artefact, model: str, quantization: str, *, quiet: bool) -> ArtefactError | None:
    """The error if the artefact was made for another model."""
    from tide_core.exits.artefact.match import check_identity
    from tide_core.models.identity import identify
    from tide_core.models.loader import TORCH_DTYPES, find_model, load_model, load_tokenizer

    made_in = artefact.manifest.model.dtype
    with console.status(f"loading {model}", quiet=quiet):
        dtype = made_in if made_in in TORCH_DTYPES else "float32"
        resolved = find_model(EngineConfig(model=model, dtype=dtype, device="cpu", quantization=quantization))
        with quick_start():
            loaded = load_model(resolved, dtype=dtype, device="cpu", quantization=quantization)
            identity = identify(loaded, load_tokenizer(resolved), resolved)
    try:
        check_identity(artefact.manifest.model, identity)
    except ArtefactError as error:
        return error
    return None


def _as_json(artefact: Artefact, matches: bool | None) -> str:
    from tide_core.exits.artefact.strict_json import plain

    fields = {"path": str(artefact.path), "digest": artefact.digest, **plain(artefact.manifest)}
    for checkpoint, head, router in zip(fields["checkpoints"], artefact.heads, artefact.routers, strict=True):
        checkpoint["num_head_parameters"] = head.num_parameters
        checkpoint["num_router_parameters"] = sum(weight.numel() for weight in router.parameters())
    if matches is not None:
        fields["matches"] = matches
    return json.dumps(fields, indent=2, allow_nan=False) + "\n"


def _as_text(artefact: Artefact) -> str:
    return "".join(line.rstrip() + "\n" for line in _lines(artefact))


def _lines(artefact: Artefact) -> Iterator[str]:
    manifest, model, data = artefact.manifest, artefact.manifest.model, artefact.manifest.data
    yield f"artefact    {artefact.path}"
    yield f"digest      {artefact.digest}"
    yield f"format      {manifest.format_version}, written by version {manifest.tool_version}"
    yield f"model       {model.name}: {model.architecture}, {model.num_layers} layers of width {model.width}"
    yield f"  revision  {model.revision or 'not from the hub'}"
    yield f"  config    {model.config_sha256}"
    yield f"  tokenizer {model.tokenizer_sha256}"
    yield f"  weights   {model.weights_sha256 or f'{len(model.weights_sample)} sampled'}, seen in {model.dtype}"
    share = f"{manifest.shortlist_coverage:.1%} of the model's own text"
    yield f"shortlist   {manifest.shortlist_size:,} of {model.vocab_size:,} tokens, {share}"
    yield f"drafts      up to {manifest.max_drafts} in a cycle"
    yield f"data        {data.kind}, {data.num_train_tokens:,} tokens to train on"
    counts = data.num_train_sequences, data.num_calibration_sequences, data.num_test_sequences
    yield "  sequences {:,} to train, {:,} for thresholds, {:,} to test".format(*counts)
    yield f"  digest    {data.digest}"
    for checkpoint, head, router in zip(manifest.checkpoints, artefact.heads, artefact.routers, strict=True):
        size = sum(weight.numel() for weight in router.parameters())
        yield ""
        yield f"checkpoint after layer {checkpoint.layer} of {model.num_layers}"
        yield f"  head      {checkpoint.head.kind}, {head.num_parameters:,} parameters"
        yield from _shape(checkpoint.head)
        yield f"  router    bottleneck {checkpoint.router_bottleneck}, {size:,} parameters"
        yield from _measured(checkpoint)
    if manifest.fast is not None and artefact.fast is not None:
        yield from _fast_lines(manifest.fast, artefact.fast, model.num_layers)
    yield ""
    yield f"files       {sum(entry.size for entry in manifest.files.values()):,} bytes"
    width = max(map(len, manifest.files))
    for name, entry in manifest.files.items():
        yield f"  {name:{width}}  {entry.size:>13,}  {entry.sha256}"


def _fast_lines(fast: FastExits, modules: FastModules, num_layers: int) -> Iterator[str]:
    for each, head in zip(fast.exits, modules.heads, strict=True):
        yield ""
        yield f"fast exit after layer {each.layer} of {num_layers}"
        yield f"  head      {each.head.kind}, {head.num_parameters:,} parameters, MLP of width {each.head.hidden}"
    size = sum(weight.numel() for skip_map in modules.maps for weight in skip_map.parameters())
    yield ""
    yield f"skip maps   {len(modules.maps)} of rank {fast.rank}, {size:,} parameters"
    for contract in fast.contracts:
        found = f"{contract.disagreement:.4f} differ, {contract.layers_per_token:.2f} layers a token"
        yield f"  fast      epsilon {contract.epsilon:g}: thresholds {' '.join(map(_threshold, contract.thresholds))}"
        answers = f"{contract.num_sequences:,} answers of at most {contract.max_tokens} tokens"
        yield f"            {found}, certified on {answers} (delta {contract.delta:g})"
    if not fast.contracts:
        yield "  fast      no certified contract: a request names a threshold"


def _shape(spec: HeadSpec) -> Iterator[str]:
    if spec.deep:
        with_taps = f" with the states after layers {', '.join(map(str, spec.taps))}" if spec.taps else ""
        yield f"            fed with the last deep state{with_taps}, up to {spec.max_distance} tokens back"
    if spec.hidden:
        yield f"            MLP of width {spec.hidden}"
    if spec.attends:
        heads = f"{spec.num_heads} query and {spec.num_kv_heads} KV heads of size {spec.head_size}"
        narrow = f" at width {spec.inner} of {spec.width}" if spec.narrow else ""
        yield f"            block of {heads}, MLP of width {spec.ffn}{narrow}"


def _measured(checkpoint: Checkpoint) -> Iterator[str]:
    shares = " ".join(f"{share:.3f}" for share in checkpoint.acceptance)
    yield f"  drafting  while the score is at least {checkpoint.draft_threshold:.4g}"
    yield f"            right at distance 1, 2, …: {shares}"
    if checkpoint.fast is not None:
        fast = checkpoint.fast
        share = f"{fast.disagreement:.4f} disagree, {fast.layers_per_token:.2f} layers a token"
        yield f"  fast      threshold {_threshold(fast.threshold)}: {share} ({fast.num_sequences:,} sequences)"


def _threshold(value: float) -> str:
    """No score is above 1, so a higher threshold means no exit."""
    return f"{value:.4f}" if value <= 1 else "no exit"

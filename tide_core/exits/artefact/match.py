"""Whether an artefact belongs to a model. Every difference is refused with both sides named."""

from __future__ import annotations

from tide_core.errors import ArtefactError
from tide_core.identity import ModelIdentity

COMPARED = ("architecture", "num_layers", "width", "vocab_size", "config_sha256", "tokenizer_sha256")

TOLERANCES = {"bfloat16": (1e-2, 1e-6), "float16": (2e-3, 1e-6), "float32": (1e-6, 1e-12)}
"""Relative and absolute, by the coarser dtype of two samples of the same weights. Coarse ones first."""


def check_identity(artefact: ModelIdentity, model: ModelIdentity) -> None:
    """Refuse the artefact made for `artefact` beside the loaded `model`."""
    for name in COMPARED:
        _check(name, getattr(artefact, name), getattr(model, name), model.name)
    if artefact.revision is not None and model.revision is not None:
        _check("revision", artefact.revision, model.revision, model.name)
    if artefact.weights_sha256 is not None and model.weights_sha256 is not None:
        _check("weights_sha256", artefact.weights_sha256, model.weights_sha256, model.name)
    else:
        _check_sample(artefact, model)


def _check(name: str, made_for: object, loaded: object, model: str) -> None:
    if made_for != loaded:
        raise _difference(name, made_for, loaded, model)


def _check_sample(artefact: ModelIdentity, model: ModelIdentity) -> None:
    """Sampled values, where the digest of the weights is not known on both sides."""
    ours, theirs = artefact.weights_sample, model.weights_sample
    if set(ours) != set(theirs) or not ours:
        only = sorted(set(ours) ^ set(theirs))
        shown = f"{len(ours)} weights, {only[0]} on one side only" if only else "none"
        raise _difference("weights_sample", shown, f"{len(theirs)} weights", model.name)
    relative, absolute = _tolerance(artefact.dtype, model.dtype)
    for name, made_for in ours.items():
        _check(f"number of weights_sample[{name!r}]", len(made_for), len(theirs[name]), model.name)
        for index, (a, b) in enumerate(zip(made_for, theirs[name], strict=True)):
            if not abs(a - b) <= relative * max(abs(a), abs(b)) + absolute:  # not: NaN is equal to nothing
                raise _difference(f"weights_sample[{name!r}][{index}]", a, b, model.name)


def _tolerance(made_for: str, loaded: str) -> tuple[float, float]:
    """Weights that were rounded alike are equal."""
    if made_for == loaded:
        return 0.0, 0.0
    return next((limits for dtype, limits in TOLERANCES.items() if dtype in (made_for, loaded)), (0.0, 0.0))


def _difference(name: str, made_for: object, loaded: object, model: str) -> ArtefactError:
    return ArtefactError(f"artefact's model.{name}", made_for, f"{loaded!r}, as the model {model} has it")

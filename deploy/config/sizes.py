"""What the engine settings of a Serve config come to on a device that need not be here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy.artefact_source import ArtefactSource
from deploy.config.args import AppArgs
from deploy.object_store import is_url
from deploy.strict import yaml_file
from tide_core.config import EngineConfig
from tide_core.errors import ConfigError
from tide_core.models import hub
from tide_core.models.resolver import DEMO, ResolvedModel, find_here, resolve_configuration


def sizes_in_file(path: Path, device: str) -> list[str]:
    """A line for each application; raises ConfigError where the engine would not start for lack of memory."""
    return list(sizes(yaml_file.read(path), device))


def sizes(config: Mapping[str, Any], device: str) -> Iterator[str]:
    """The same for a parsed config that was checked."""
    from tide_core.engine.plan import device_named, plan_for_folder

    place = device_named(device)
    for index, app in enumerate(config["applications"]):
        args = AppArgs.model_validate(app.get("args") or {})
        engine = EngineConfig.from_mapping(args.engine)
        name = app.get("name", "default")
        model = _model_here(engine.model)
        if model is None:
            yield f"{name} on {device}: the model {engine.model} is not on this machine, so nothing was computed"
            continue
        try:
            found = plan_for_folder(engine, model.path, place, _heads(engine), model.gguf)
        except ConfigError as error:
            where = f"applications[{index}].args.engine.{error.field}"
            raise ConfigError("--device" if error.field == "device" else where, error.value, error.expected) from error
        yield f"{name} on {device}: {found}"


def _model_here(model: str) -> ResolvedModel | None:
    """None for a model that would have to be fetched. Of a GGUF file only the configuration is converted."""
    if is_url(model):
        return None
    if model == DEMO or model.lower().endswith(".gguf"):
        return resolve_configuration(model)
    found = find_here(model)
    if found is not None or not hub.is_hub_id(model):
        return found
    folder = hub.cached(model)
    return None if folder is None else ResolvedModel(folder, model, "hub")


def _heads(engine: EngineConfig) -> list[Any]:
    """The specs of the exit heads; none where the artefact is not on this machine."""
    from tide_core.engine.assemble import artefact_folder
    from tide_core.exits.artefact.artefact import load_artefact

    if is_url(engine.artefact) or not (
        engine.artefact in ("auto", "none") or Path(engine.artefact).expanduser().exists()
    ):
        return []
    folder = artefact_folder(engine, is_demo=engine.model == DEMO)
    if folder is None:
        return []
    artefact = load_artefact(ArtefactSource(str(folder)).local(None).folder, None)
    return [checkpoint.head for checkpoint in artefact.manifest.checkpoints]
